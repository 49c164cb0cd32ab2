"""Schedule, loss and zero-variance filter of the ScaleRL recipe on the demo's model, two seeds each: do they matter?

    python scripts/bench/axes_on_demo.py --study studies/axes      # about 12 minutes on two cores

Runs `scalerl sweep loo` (or goes on with it, or takes the study as it is), whose report has the fits and the verdicts,
and prints a Markdown table of what that leaves out: held-out pass rate half-way and at the end and training FLOPs, mean
over seeds and half their range; lag of the trained tokens, and mismatch with the generator that sampled them."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from scalerl.sweeps.plan import read_plan

AXES, SEEDS = "off_policy,loss,zero_variance", "2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, required=True, help="folder of the study")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    sweep = [sys.executable, "-m", "scalerl.cli", "sweep", "loo", "--jobs", str(arguments.jobs)]
    if (arguments.study / "plan.json").exists():
        sweep += ["--resume", str(arguments.study)]
    else:
        sweep += ["--study", str(arguments.study), "--axes", AXES, "--seeds", SEEDS, f"steps={arguments.steps}"]
    subprocess.run(sweep, check=True, stdout=sys.stderr)
    print("| arm | pass rate half-way | at the end | training FLOPs | median lag | k3 | F(2) |")
    print("|---|---|---|---|---|---|---|")
    for arm in read_plan(arguments.study).arms:
        print(row(arm.name, sorted((arguments.study / "runs").glob(f"{arm.name}-seed*"))))


def row(arm: str, runs: Sequence[Path]) -> str:
    evaluations = [read(run / "eval.jsonl") for run in runs]
    steps = [step for run in runs for step in read(run / "metrics.jsonl") if "mismatch_k3" in step]
    half = spread([rows[len(rows) // 2]["pass_rate"] for rows in evaluations], ".3f")
    end = spread([rows[-1]["pass_rate"] for rows in evaluations], ".3f")
    flops = spread([rows[-1]["flops"] / 1e12 for rows in evaluations], ".2f")
    lag = sorted(step["lag_median"] for step in steps)[len(steps) // 2]
    k3, extreme = (sum(step[name] for step in steps) / len(steps) for name in ("mismatch_k3", "extreme_share"))
    return f"| {arm} | {half} | {end} | {flops}e12 | {lag} | {k3:.1e} | {extreme:.1e} |"


def spread(values: Sequence[float], form: str) -> str:
    return f"{sum(values) / len(values):{form}} ± {(max(values) - min(values)) / 2:{form}}"


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
