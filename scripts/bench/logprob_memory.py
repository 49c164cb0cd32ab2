"""Peak extra memory and time, forward and backward, of log-probabilities from hidden states and head weights.

    OMP_NUM_THREADS=1 python scripts/bench/logprob_memory.py --vocab 152064 --hidden 2048 --tokens 2048 --repeats 2

`plain` makes all logits (linear, log_softmax, gather); `recomputed` is `token_logprobs`, `one_pass` is
`weighted_logprob_sum`. The objective is CISPO's. Each measurement is a process of its own, since a peak never falls;
the variants are interleaved, and a variant's time is its fastest: of the clock on a GPU, on a CPU the seconds that the
process had, so that others' work on the machine counts little. Extra memory is the rise of the peak above what the
inputs take, less the gradients: of the resident set on a CPU (Linux), of the allocator on a GPU."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scalerl.kernels import linear
from scalerl.kernels.logprob import token_logprobs, weighted_logprob_sum

EPS_MAX = 5.0


def coefficient(logp: Tensor, logp_gen: Tensor, advantage: Tensor) -> Tensor:
    return (logp - logp_gen).exp().clamp(max=EPS_MAX) * advantage


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, logp_gen: Tensor, advantage: Tensor) -> Tensor:
    logp = F.linear(hidden.float(), weight.float()).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    return (coefficient(logp.detach(), logp_gen, advantage) * logp).sum()


def recomputed(hidden: Tensor, weight: Tensor, targets: Tensor, logp_gen: Tensor, advantage: Tensor) -> Tensor:
    logp, _ = token_logprobs(hidden, weight, targets)
    return (coefficient(logp.detach(), logp_gen, advantage) * logp).sum()


def one_pass(hidden: Tensor, weight: Tensor, targets: Tensor, logp_gen: Tensor, advantage: Tensor) -> Tensor:
    def c(logp: Tensor, rows: slice) -> Tensor:
        return coefficient(logp, logp_gen[rows], advantage[rows])

    return weighted_logprob_sum(hidden, weight, targets, c)[0]


VARIANTS: dict[str, Callable[..., Tensor]] = {"plain": plain, "recomputed": recomputed, "one_pass": one_pass}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=152_064)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of hidden and weight")
    parser.add_argument("--mkl", action="store_true", help="all products on a CPU by MKL, as on Intel's processors")
    parser.add_argument("--variant", choices=list(VARIANTS), help="measure this one here, and print its JSON")
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(measure(VARIANTS[arguments.variant], arguments)))
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for _ in range(arguments.repeats):
        for name in VARIANTS:
            command = [sys.executable, __file__, *sys.argv[1:], "--variant", name]
            found[name].append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    seconds = {name: min(m["seconds"] for m in ms) for name, ms in found.items()}
    extra = {name: max(m["extra_mib"] for m in ms) for name, ms in found.items()}
    print("| variant | s | x plain | extra MiB | of plain | objective |")
    print("|---|---|---|---|---|---|")
    for name, measured in found.items():
        print(
            f"| {name} | {seconds[name]:.2f} | {seconds[name] / seconds['plain']:.2f} | {extra[name]:.0f} | "
            f"1/{extra['plain'] / extra[name]:.1f} | {measured[0]['objective']:.4f} |"
        )


def measure(variant: Callable[..., Tensor], arguments: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(arguments.threads)
    if arguments.mkl:
        linear.onednn_pays = lambda: False
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    n, width, vocab = arguments.tokens, arguments.hidden, arguments.vocab
    given: dict[str, Any] = {"device": device, "dtype": getattr(torch, arguments.dtype)}
    hidden = torch.randn(n, width, **given).requires_grad_()
    weight = torch.randn(vocab, width, **given).mul_(width**-0.5).requires_grad_()
    targets = torch.randint(0, vocab, (n,), device=device)
    logp_gen, advantage = -torch.rand(n, device=device) - 12, torch.randn(n, device=device)
    few = [t[:8] for t in (targets % 64, logp_gen, advantage)]
    variant(hidden.detach()[:8].requires_grad_(), weight.detach()[:64].requires_grad_(), *few).backward()  # warm-up
    before = in_use(device)
    restart_peak(device)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    start = clock()
    value = variant(hidden, weight, targets, logp_gen, advantage)
    (-value).backward()
    extra = peak(device) - before - hidden.nbytes - weight.nbytes
    return {
        "seconds": clock() - start,
        "extra_mib": extra / 2**20,
        "objective": float(value.detach()),
    }


def in_use(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def restart_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
