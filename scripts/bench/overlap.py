"""Wall time of `pipeline` against that of `ppo`, which alternates, for the same samples.

    OMP_NUM_THREADS=1 python scripts/bench/overlap.py --out runs/overlap

Runs the demo's model under both schedules in turn, generation in a process of its own, and prints each pair's times and
their ratio. Times are the training clock's, moves of weights included; starts, evaluations and checkpoints are not on
it. Overlap can halve the time at best, and does so where generating a batch costs as much as training on it: what each
side cost in the alternating run is printed beside, and --slots, the completions that decode together, evens it out."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Clock:
    """Seconds of training, and in them of each side's work."""

    wall: float
    generating: float
    training: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder that isn't there yet, for the runs")
    parser.add_argument("--engine", default="torch", choices=["torch", "sglang"])
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="further ones, of both schedules")
    arguments = parser.parse_args()
    ratios = []
    for number in range(arguments.repeats):
        pipeline, ppo = (run(schedule, number, arguments) for schedule in ("pipeline", "ppo"))
        ratios.append(pipeline.wall / ppo.wall)
        print(
            f"pipeline {pipeline.wall:.1f} s, ppo {ppo.wall:.1f} s (generating {ppo.generating:.1f} s, training "
            f"{ppo.training:.1f} s): {ratios[-1]:.3f}",
            flush=True,
        )
    print(f"pipeline / ppo, median of {len(ratios)}: {statistics.median(ratios):.3f}")


def run(schedule: str, number: int, arguments: argparse.Namespace) -> Clock:
    path = arguments.out / f"{schedule}{number}"
    engine = {
        # the ticks that a batch of 256 completions of about 27 tokens takes
        "torch": [f"engine.slots={arguments.slots}", f"engine.ticks_per_step={256 * 27 // arguments.slots}"],
        "sglang": ["engine=sglang", f"engine.concurrency={arguments.slots}"],
    }[arguments.engine]
    command = [
        *(str(Path(sys.executable).with_name("scalerl")), "train", "--run-dir", str(path), *engine),
        *(f"recipe.off_policy={schedule}", f"recipe.k={arguments.k}", f"steps={arguments.steps}"),
        *(f"eval.every={arguments.steps}", "eval.n_prompts=8", "eval.n_samples=1", "trainer.save_every=0"),
        *("recipe.prompts_per_batch=16", "recipe.zero_variance=keep"),  # every batch costs the same
        *arguments.overrides,
    ]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    last = json.loads((path / "eval.jsonl").read_text().splitlines()[-1])
    wall = last["device_hours"] * 3600 / 2  # trainer and generator
    return Clock(wall, wall * (1 - last["generator_idle"]), wall * (1 - last["trainer_idle"]))


if __name__ == "__main__":
    main()
