"""What a study's run folders hold: the held-out curves, what training said of itself, and which runs are not there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.fitting.errors import InputError
from scalerl.fitting.readers import read_runs
from scalerl.fitting.runs import Floats, Run
from scalerl.sweeps.plan import Arm, Plan
from scalerl.sweeps.state import last_words


@dataclass(frozen=True, eq=False)
class Training:
    """Per training step, all [m]; NaN where a step gave no value. Entropy in nats a token."""

    step: Floats
    truncation: Floats
    entropy: Floats


@dataclass(frozen=True, eq=False)
class StudyRun:
    """One run of a plan. trouble: why it is missing, unreadable or shorter than planned, in words; None where it is
    whole. run: its held-out curve, None where there is none to read."""

    arm: Arm
    seed: int
    folder: str
    trouble: str | None
    run: Run | None
    training: Training


def gather(study: Path, plan: Plan) -> list[StudyRun]:
    """Every run of the plan, in its order; those that can't be read come with the reason and without a curve."""
    stopped = _stopped(study)
    return [_gathered(study, plan, arm, seed, stopped) for arm in plan.arms for seed in plan.seeds]


def _gathered(study: Path, plan: Plan, arm: Arm, seed: int, stopped: Mapping[str, str]) -> StudyRun:
    folder = plan.run_folder(arm, seed)
    path, run, trouble = study / folder, None, None
    if (path / "eval.jsonl").exists():
        try:
            (read,) = read_runs([path], x=plan.x)
            run = replace(read, name=f"{arm.name} seed {seed}", arm=arm.name)
            trouble = _short(path, run)
        except InputError as error:
            trouble = f"can't be read ({error})"
    else:
        trouble = "missing: no evaluation yet" if path.is_dir() else "missing: not started"
    if trouble is not None and path.name in stopped:
        trouble = stopped[path.name]
    elif trouble is not None and (last := last_words(study / "logs" / f"{path.name}.log", 1)):
        trouble += f"; its log ends: {last[0]}"
    return StudyRun(arm, seed, folder, trouble, run, _training(path / "metrics.jsonl"))


def _short(path: Path, run: Run) -> str | None:
    """A run that ends before the last step of its configuration."""
    try:
        planned = int(json.loads((path / "config.json").read_text())["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return "its config.json can't be read: whether it is finished isn't known"
    last = int(run.step[-1]) if run.step is not None and len(run) else 0
    return f"unfinished: evaluated up to step {last} of {planned}" if last < planned else None


def _stopped(study: Path) -> dict[str, str]:
    """Run folder's name -> why the study ended that run early."""
    try:
        return json.loads((study / "stopped.json").read_text())
    except (OSError, ValueError):
        return {}


def _training(file: Path) -> Training:
    rows = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break  # the half line of a run that was killed, or works at this moment

    def column(name: str) -> Floats:
        return np.array([_number(row.get(name)) for row in rows], dtype=float)

    return Training(column("step"), column("truncation_rate"), column("entropy"))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else np.nan
