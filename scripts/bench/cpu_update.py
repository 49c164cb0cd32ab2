"""Seconds of one optimiser step of the demo's trainer on a CPU: as torch and transformers have it, and with each of
the measures that scalerl takes there added to those before.

    OMP_NUM_THREADS=1 python scripts/bench/cpu_update.py

`memory`: freed memory stays with the process (`rl/process.py`). `linear`: fp32 products through oneDNN
(`kernels/linear.py`; nothing where MKL does as well). `norms`: their gradient written out (`kernels/rms_norm.py`).
Each measurement is a process of its own, the variants are interleaved, and times are medians. The batch has the demo's
size, with random tokens, under random weights."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch

from scalerl.cli.compose import compose
from scalerl.rl.config import RunConfig
from scalerl.rl.models import load
from scalerl.rl.process import set_up_process
from scalerl.rl.run import model_folder
from scalerl.rl.tasks import build_task
from scalerl.rl.trainer import Trainer
from scalerl.rl.types import Completion, ScoredGroup

VARIANTS = ("plain", "memory", "linear", "norms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of each measurement, the first two not counted")
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    arguments = parser.parse_args()
    if arguments.one:
        print(measure(arguments.one, arguments.steps, arguments.overrides))
        return
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(arguments.rounds):
        for variant in VARIANTS:
            command = [sys.executable, __file__, *sys.argv[1:], "--one", variant]
            found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            seconds[variant].append(float(found.stdout.split()[-1]))
    print("| | s a step | of plain |")
    print("|---|---|---|")
    for variant, of in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(of, seconds["plain"], strict=True))
        print(f"| {variant} | {statistics.median(of):.3f} | {ratio:.2f} |")


def measure(variant: str, steps: int, overrides: list[str]) -> float:
    if variant == "plain":
        torch.set_num_threads(1)
    else:
        set_up_process(1)
    if variant in ("plain", "memory"):
        load.replace_linear_layers = lambda model: None
    if variant != "norms":
        load.fuse_rms_norms = lambda model: None
    with tempfile.TemporaryDirectory() as folder:
        settings = ["model.warm_start.steps=0", f"model.cache_dir={folder}", "recipe.zero_variance=keep", *overrides]
        config = compose(settings, run_dir=f"{folder}/run").config
        trainer = Trainer(config, model_folder(config, build_task(config.task)))
        groups = batch(config)
        found = []
        for step in range(steps):
            start = time.perf_counter()
            trainer.update(trainer.prepare(groups, 0), step)
            trainer.finish_batch(step + 1)
            found.append(time.perf_counter() - start)
    return statistics.median(found[2:])


def batch(config: RunConfig) -> list[ScoredGroup]:
    """Completions of 12 to 38 tokens, a prompt's nearly equal, behind prompts of 12 to 16; one in three is correct."""
    rng = np.random.default_rng(0)
    prompts = build_task(config.task).train_prompts()[: config.recipe.prompts_per_batch]
    groups = []
    for number, prompt in enumerate(prompts):
        n, length = config.recipe.group_size, int(rng.integers(12, 37))
        nothing = np.zeros(n, dtype=bool)
        groups.append(
            ScoredGroup(
                group=number,
                epoch=0,
                prompt=prompt,
                prompt_ids=tuple(rng.integers(1, 12, rng.integers(12, 17)).tolist()),
                completions=tuple(completion(rng, length + int(rng.integers(3))) for _ in range(n)),
                correct=np.arange(n) % 3 == 0,
                verifier_error=nothing,
                unparsed=nothing,
                masked=nothing,
                shaping=np.zeros(n),
            )
        )
    return groups


def completion(rng: np.random.Generator, n: int) -> Completion:
    return Completion(
        tokens=rng.integers(1, 12, n).astype(np.int32),
        logprobs=np.full(n, -2.5, dtype=np.float32),
        versions=np.zeros(n, dtype=np.int32),
        injected=np.zeros(n, dtype=bool),
        finish="stop",
    )


if __name__ == "__main__":
    main()
