"""Tokens per second of the embedded engine and of the library's `generate`, on the same random model and prompts.

OMP_NUM_THREADS=1 python scripts/bench/engine_throughput.py --slots 512
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scalerl.rl.engines.decoder import load_decoder
from scalerl.rl.engines.torch_engine import TorchEngine
from scalerl.rl.types import Request, Sampling

PROMPT = 20


def build_model(vocab: int) -> Any:
    """The demo's shape: 294k parameters, one KV head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def engine_rate(model: Any, args: argparse.Namespace, prompts: torch.Tensor) -> float:
    """Tokens a second over all completions, prefill included. With --stops they end at random, and slots refill."""
    device = torch.device(args.device)
    decoder = load_decoder(model, dtype=torch.float32, head_dtype=torch.float32, device=device)
    stops = tuple(range(args.stops))
    engine = TorchEngine(decoder, slots=args.slots, sampling=Sampling(1.0, args.tokens, stops))
    groups = len(prompts) // args.group
    start = time.perf_counter()
    engine.submit([Request(g, tuple(prompts[g * args.group].tolist()), args.group, stream=0) for g in range(groups)])
    tokens = 0
    while not engine.idle:
        tokens += sum(len(c.tokens) for group in engine.tick() for c in group.completions)
    return tokens / (time.perf_counter() - start)


def library_rate(model: Any, args: argparse.Namespace, prompts: torch.Tensor) -> float:
    """Tokens a second of `generate` on batches of --slots rows, counted up to the stop token as the engine's are."""
    model.to(torch.device(args.device))
    start = time.perf_counter()
    tokens = 0
    with torch.inference_mode():
        for batch in prompts.split(args.slots):
            output = model.generate(
                batch.to(args.device),
                attention_mask=torch.ones_like(batch, device=args.device),
                do_sample=True,
                top_k=0,
                max_new_tokens=args.tokens,
                pad_token_id=0,
                eos_token_id=list(range(args.stops)) or None,
            )
            stopped = (output[:, PROMPT:] < args.stops).int().cumsum(1)
            tokens += int((stopped.cumsum(1) <= 1).sum())
    return tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=512)
    parser.add_argument("--completions", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=34)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--stops", type=int, default=0, help="number of stop ids; 0: all completions are --tokens long")
    parser.add_argument("--vocab", type=int, default=31)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = build_model(args.vocab)
    rows = args.completions // args.group
    prompts = torch.randint(args.vocab, (rows, PROMPT)).repeat_interleave(args.group, dim=0)
    engine = [engine_rate(model, args, prompts) for _ in range(args.repeats)]
    library = [library_rate(model, args, prompts) for _ in range(args.repeats)]
    result = {"engine_tokens_per_s": max(engine), "generate_tokens_per_s": max(library)}
    print(json.dumps({**result, "ratio": max(engine) / max(library), **vars(args)}))


if __name__ == "__main__":
    main()
