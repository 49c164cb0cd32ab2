"""What has become of a run, read from its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

State = Literal["absent", "begun", "done"]

_TAIL = 65_536  # bytes of a log that hold its last line


@dataclass(frozen=True)
class RunState:
    """step: of the last line of metrics; pass_rate: of the last held-out evaluation; None before the first."""

    state: State
    step: int
    pass_rate: float | None


def run_state(run: Path) -> RunState:
    """`done` where the last step of the run's configuration is trained, evaluated and saved."""
    try:
        steps = json.loads((run / "config.json").read_text())["steps"]
    except (OSError, ValueError, KeyError):
        return RunState("absent", 0, None)
    evaluation = last_row(run / "eval.jsonl", "held_out")
    step = int(last_row(run / "metrics.jsonl").get("step", 0))
    done = evaluation.get("step") == steps and (run / "checkpoints" / f"step_{steps}").is_dir()
    return RunState("done" if done else "begun", step, evaluation.get("pass_rate"))


def last_row(file: Path, set_name: str | None = None) -> dict[str, Any]:
    """The last whole object of a JSONL (of that evaluation set); empty where there is none."""
    try:
        with file.open("rb") as f:
            f.seek(0, 2)
            f.seek(max(0, f.tell() - _TAIL))
            lines = f.read().decode(errors="replace").splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the half line of a killed run
        if isinstance(row, dict) and (set_name is None or row.get("set") == set_name):
            return row
    return {}


def last_words(log: Path, lines: int = 3) -> list[str]:
    """The last lines of a run's log that say anything."""
    try:
        text = log.read_text(errors="replace")[-_TAIL:]
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()][-lines:]
