"""Peak extra memory and time of chunked log-probabilities against log_softmax over all logits, forward and backward.

Each way runs in a process of its own, since a peak never falls; memory is the growth of the resident set on a CPU and
of the allocator's peak on a GPU, gradients included.

    python scripts/bench/logprob_memory.py [--vocab 152000] [--hidden 2048] [--tokens 2048] [--chunk 256] [--device cpu]
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import resource
import time
from typing import Any

import torch

from scalerl.kernels.head import head_logits
from scalerl.kernels.logprob import token_logprobs

GIB = 2**30


def measure(way: str, options: argparse.Namespace, out: Any) -> None:
    """Puts (peak extra bytes, seconds, mean log-probability) of one forward and backward pass."""
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden, device=device, requires_grad=True)
    weight = torch.randn(options.vocab, options.hidden, device=device)
    weight.mul_(options.hidden**-0.5).requires_grad_()  # in place: a temporary would hide the peak
    targets = torch.randint(0, options.vocab, (options.tokens,), device=device)
    before, start = peak_bytes(device), time.perf_counter()
    if way == "chunked":
        logp, _ = token_logprobs(hidden, weight, targets, chunk=options.chunk)
    else:
        logp = head_logits(hidden, weight, torch.float32).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    logp.sum().backward()
    extra = peak_bytes(device) - before
    out.put((extra, time.perf_counter() - start, float(logp.detach().mean())))


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=152_000)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    gradients = (options.vocab + options.tokens) * options.hidden * 4
    print(
        f"V={options.vocab} H={options.hidden} T={options.tokens} chunk={options.chunk} {options.device}, "
        f"{options.threads} thread(s); the gradients alone take {gradients / GIB:.2f} GiB"
    )
    context = mp.get_context("spawn")
    for way in ("chunked", "plain"):
        out = context.Queue()
        process = context.Process(target=measure, args=(way, options, out))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{way}: ended with exit code {process.exitcode} (out of memory?)")
        extra, seconds, mean = out.get()
        print(f"{way:8} peak extra {extra / GIB:6.2f} GiB   {seconds:7.2f} s   mean log-probability {mean:.5f}")


if __name__ == "__main__":
    main()
