"""Arms of single recipe axes on the demo's model, a few seeds each: does a choice matter here, beyond the seeds' noise?

    python scripts/bench/axes_on_demo.py --out runs/axes --steps 100 --seeds 0 1 --jobs 2

Each arm is an ordinary run on one thread. Prints a Markdown table: held-out pass rate half-way and at the end (mean
over seeds and half their range), the lag of trained tokens, and the mismatch between trainer and generator."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ARMS = {
    "scalerl": [],
    "loss=dapo": ["recipe.loss=dapo"],
    "loss=gspo": ["recipe.loss=gspo"],
    "off_policy=ppo, k=8": ["recipe.off_policy=ppo"],
    "off_policy=pipeline, k=0": ["recipe.k=0"],
    "zero_variance=keep": ["recipe.zero_variance=keep"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs; finished ones are reused")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    arguments = parser.parse_args()
    jobs = [(arm, seed) for arm in arguments.arms for seed in arguments.seeds]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        runs = dict(zip(jobs, pool.map(lambda job: run(job[0], job[1], arguments), jobs), strict=True))
    print(f"| arm | pass rate at step {arguments.steps // 2} | at step {arguments.steps} | median lag | k3 | F(2) |")
    print("|---|---|---|---|---|---|")
    for arm in arguments.arms:
        print(row(arm, [runs[arm, seed] for seed in arguments.seeds]))


def run(arm: str, seed: int, arguments: argparse.Namespace) -> Path:
    name = arm.replace(", ", "-").replace("=", "-")
    path = arguments.out / f"{name}-seed{seed}-steps{arguments.steps}"
    if not path.exists():
        command = [
            str(Path(sys.executable).with_name("scalerl")),
            "train",
            "--run-dir",
            str(path),
            "engine.process=inline",
        ]
        command += [f"seed={seed}", f"steps={arguments.steps}", f"eval.every={arguments.steps // 4}", *ARMS[arm]]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        print(f"{arm}, seed {seed}: done", file=sys.stderr)
    return path


def row(arm: str, paths: list[Path]) -> str:
    evaluations = [read(path / "eval.jsonl") for path in paths]
    metrics = [[m for m in read(path / "metrics.jsonl") if "mismatch_k3" in m] for path in paths]
    half = [rows[len(rows) // 2]["pass_rate"] for rows in evaluations]
    last = [rows[-1]["pass_rate"] for rows in evaluations]
    tail = [m for rows in metrics for m in rows[len(rows) // 2 :]]
    lag = sorted(m["lag_median"] for m in tail)[len(tail) // 2]
    k3 = sum(m["mismatch_k3"] for m in tail) / len(tail)
    extreme = sum(m["extreme_share"] for m in tail) / len(tail)
    return f"| {arm} | {spread(half)} | {spread(last)} | {lag} | {k3:.1e} | {extreme:.1e} |"


def spread(values: list[float]) -> str:
    return f"{sum(values) / len(values):.3f} ± {(max(values) - min(values)) / 2:.3f}"


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
