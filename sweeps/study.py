"""Runs a plan: starts what is missing, resumes what is begun, skips what is done, and tells how each run fares."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from scalerl.sweeps.early_stop import EarlyStop
from scalerl.sweeps.launch import Job, Launcher, Order
from scalerl.sweeps.plan import Arm, Plan
from scalerl.sweeps.state import last_words, run_state

POLL = 0.5  # seconds
STOPPED = "stopped.json"  # run folder -> why it was ended early

Status = Literal["waiting", "running", "done", "stopped", "failed"]


@dataclass
class Member:
    """One run of the study, as its live table shows it. resumed_at: the step from which this launch goes on; words: the
    last lines of a failed run's log, or why it was stopped."""

    arm: Arm
    seed: int
    name: str
    order: Order
    status: Status = "waiting"
    step: int = 0
    pass_rate: float | None = None
    resumed_at: int = 0
    started: float = 0.0
    job: Job | None = None
    words: list[str] = field(default_factory=list)

    def seconds_left(self, steps: int) -> float | None:
        if self.status != "running" or self.step <= self.resumed_at:
            return None
        pace = (time.monotonic() - self.started) / (self.step - self.resumed_at)
        return pace * (steps - self.step)


def run_study(
    study: Path,
    plan: Plan,
    launcher: Launcher,
    *,
    early_stop: EarlyStop | None = None,
    on_change: Callable[[Sequence[Member]], None] = lambda members: None,
) -> list[Member]:
    """Bring every run of the plan to its end; returns them in the plan's order, base first.

    A failed run stops no other; where this process is interrupted, its runs are told to end and the study can be
    resumed. `on_change` is called twice a second."""
    members = _members(study, plan)
    stopped = _read_stopped(study)
    for member in members:
        _look(member)
        if member.order.run.name in stopped:
            member.status, member.words = "stopped", [stopped[member.order.run.name]]
    try:
        while any(m.status in ("waiting", "running") for m in members):
            _start_waiting(members, launcher)
            for member in members:
                if member.status == "running":
                    _follow(member)
            if early_stop is not None:
                _stop_hopeless(study, members, early_stop, stopped)
            on_change(members)
            time.sleep(POLL)
    finally:
        for member in members:
            if member.status == "running" and member.job is not None:
                member.job.stop()
    on_change(members)
    return members


def _members(study: Path, plan: Plan) -> list[Member]:
    study = study.resolve()
    found = []
    for seed in plan.seeds:
        for arm in plan.arms:
            run = study / plan.run_folder(arm, seed)
            order = Order(run, tuple(plan.run_overrides(arm, seed)), study / "logs" / f"{run.name}.log")
            name = arm.name if len(plan.seeds) == 1 else f"{arm.name} seed {seed}"
            found.append(Member(arm, seed, name, order))
    return found


def _look(member: Member) -> None:
    state = run_state(member.order.run)
    member.step, member.pass_rate = state.step, state.pass_rate
    if state.state == "done" and member.status == "waiting":
        member.status = "done"


def _start_waiting(members: Sequence[Member], launcher: Launcher) -> None:
    running = sum(m.status == "running" for m in members)
    for member in [m for m in members if m.status == "waiting"][: max(0, launcher.jobs - running)]:
        try:
            member.job = launcher.start(member.order)
        except OSError as error:
            member.status, member.words = "failed", [f"can't be started: {error.strerror or error}"]
            continue
        member.status, member.started, member.resumed_at = "running", time.monotonic(), member.step


def _follow(member: Member) -> None:
    assert member.job is not None
    code = member.job.poll()
    _look(member)
    if code is None:
        return
    if code == 0 and run_state(member.order.run).state == "done":
        member.status = "done"
        return
    member.status = "failed"
    member.words = last_words(member.order.log) or [f"exit code {code}, no output"]


def _stop_hopeless(study: Path, members: Sequence[Member], early_stop: EarlyStop, stopped: dict[str, str]) -> None:
    for member in members:
        base = next(m for m in members if m.arm.axis is None and m.seed == member.seed)
        if member.status != "running" or member is base:
            continue
        if reason := early_stop.reason(base.order.run, member.order.run):
            assert member.job is not None
            member.job.stop()
            member.status, member.words = "stopped", [reason]
            stopped[member.order.run.name] = reason
            beside = study / f"{STOPPED}.tmp"
            beside.write_text(json.dumps(stopped, indent=2) + "\n")
            os.replace(beside, study / STOPPED)


def _read_stopped(study: Path) -> dict[str, str]:
    try:
        return json.loads((study / STOPPED).read_text())
    except (OSError, ValueError):
        return {}
