"""What a resume must settle before it trains: whether the configuration may differ, and what work was lost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalerl.rl.checkpoint import Checkpoint
from scalerl.rl.config import RunConfig, flat
from scalerl.rl.errors import UserError
from scalerl.rl.runlog import read_rows, read_sources, write_config, write_rows

# Completions in flight, the sampler's history and the tensors of a checkpoint were made under these.
FIXED = (
    "seed",
    "model",
    "task",
    "engine.kind",
    "engine.slots",
    *(f"recipe.{name}" for name in ("off_policy", "k", "prompts_per_batch", "group_size", "generation_budget")),
    *(f"recipe.{name}" for name in ("length_control", "interrupt", "sampling", "sampling_mask", "router_replay", "kl")),
)
_CLOCKS = ("device_hours", "eval_device_hours", "checkpoint_device_hours")
Changes = dict[str, tuple[Any, Any]]


def check_changes(written: RunConfig, config: RunConfig, checkpoint: Checkpoint | None, *, allowed: bool) -> Changes:
    """Values of `config` that differ from the checkpoint's, or without one from those `written` at the start: key ->
    (was, is). More `steps` are always allowed.

    Raises UserError that lists the differences unless they are `allowed`, and for those that no checkpoint survives."""
    before = written.model_dump(mode="json") if checkpoint is None else checkpoint.state["config"]
    was, new = flat(before), flat(config.model_dump(mode="json"))
    changes: Changes = {
        key: (was.get(key), new.get(key))
        for key in sorted(was.keys() | new.keys())
        if was.get(key) != new.get(key) and key != "run_dir"
    }
    asked = {key: change for key, change in changes.items() if not (key == "steps" and config.steps > before["steps"])}
    listed = "; ".join(f"{key}: was {old}, is {value}" for key, (old, value) in asked.items())
    if asked and not allowed:
        raise UserError(f"the run was made under another configuration ({listed}); --allow-change goes on all the same")
    fixed = [key for key in asked if any(key == name or key.startswith(f"{name}.") for name in FIXED)]
    if fixed:
        raise UserError(f"{fixed[0]} can't change within a run ({listed}); start a new one")
    if checkpoint is not None and "steps" in asked:
        dispatched = checkpoint.state["schedule"]["dispatched"]
        least = -(-dispatched // config.recipe.prompts_per_batch)
        if config.steps < least:
            raise UserError(f"steps={config.steps}, but the run has begun with the batches up to {least}")
    return changes


def write_changes(path: Path, config: RunConfig, changes: Changes) -> None:
    """Bring the run's `config.json` up to date."""
    write_config(path, config, {**read_sources(path), **dict.fromkeys(changes, "command line of a resume")})


def is_complete(state: Mapping[str, Any], config: RunConfig) -> bool:
    """Whether a checkpoint leaves nothing to do under `config`."""
    grown = config.steps > state["config"]["steps"]
    trained = state["schedule"]["trained"] >= state["schedule"]["end"]
    return trained and not grown and state["evaluated"] == state["ledger"]["step"]


def record_resume(path: Path, step: int, hours: float, changes: Changes) -> float:
    """Note a resume at `step` in `resumes.jsonl`; returns the device hours lost over all resumes.

    hours: on the checkpoint's clock. What was logged beyond them (training, evaluation and checkpoints) is lost; the
    part of a step that a kill left unlogged is known to nobody. To be called before the log is cut."""
    file = path / "resumes.jsonl"
    logged = [row for name in ("metrics.jsonl", "eval.jsonl") for row in read_rows(path / name, _CLOCKS)]
    reached = max([hours, *(sum(row[clock] for clock in _CLOCKS) for row in logged)])
    before = read_rows(file, ("step", "from_hours", "to_hours", "lost_device_hours"))
    row = {"step": step, "from_hours": hours, "to_hours": reached, "lost_device_hours": reached - hours}
    # A kill between this note and the cut of the log must not count the same loss twice.
    if not before or changes or any(before[-1][key] != row[key] for key in row):
        row["changes"] = {key: list(change) for key, change in changes.items()}
        before.append(row)
        write_rows(file, before)
    return sum(resume["lost_device_hours"] for resume in before)
