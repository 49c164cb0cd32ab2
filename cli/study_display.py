"""What a study looks like on a terminal: its plan, and a live table of its runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalerl.sweeps.plan import Plan
    from scalerl.sweeps.study import Member


def print_plan(plan: Plan) -> None:
    """Each arm with exactly what differs from the base, what is left out and why, and the cost."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    runs = len(plan.arms) * len(plan.seeds)
    title = f"study {plan.name}: {len(plan.arms)} arms x {len(plan.seeds)} seed(s) = {runs} runs, compared on {plan.x}"
    console.print(title, markup=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("arm", "differs from the base in"):
        table.add_column(name, overflow="fold")
    for arm in plan.arms:
        changes = "\n".join(f"{key}: {old} -> {new}" for key, (old, new) in arm.difference.items()) or "-"
        table.add_row(Text(arm.name), Text(changes + (f"\nidentical: {arm.identical}" if arm.identical else "")))
    console.print(table)
    for name, reason in plan.skipped.items():
        console.print(f"no arm {name}: {reason}", markup=False, soft_wrap=True)
    console.print(
        f"a run: {plan.steps} steps, {plan.completions:,} completions, at most {plan.tokens:,} generated tokens with "
        f"its evaluations; all: at most {runs * plan.tokens:,}",
        markup=False,
        soft_wrap=True,
    )


class StudyDisplay:
    """A live table on a terminal; elsewhere a line whenever a run changes its status or has a new evaluation."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._told: dict[str, Any] = {}
        self._live: Any = None

    def __enter__(self) -> StudyDisplay:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._live is not None:
            self._live.stop()

    def update(self, members: Sequence[Member]) -> None:
        if self._live is not None:
            self._live.update(self._table(members))
            return
        for member in members:
            now = (member.status, member.pass_rate)
            if member.status != "waiting" and self._told.get(member.name) != now:
                self._told[member.name] = now
                print(f"{member.name}: {' '.join(_cells(member, self._plan.steps)[1:])}".rstrip(), file=sys.stderr)

    def _table(self, members: Sequence[Member]) -> Any:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in ("run", "status", "step", "held-out", "left"):
            table.add_column(name, justify="left" if name in ("run", "status") else "right")
        for member in members:
            table.add_row(*(Text(cell) for cell in _cells(member, self._plan.steps)))
        return table


def _cells(member: Member, steps: int) -> list[str]:
    left = member.seconds_left(steps)
    return [
        member.name,
        member.status,
        f"{member.step}/{steps}",
        "-" if member.pass_rate is None else f"{member.pass_rate:.3f}",
        "" if left is None else f"{int(left) // 60}:{int(left) % 60:02d}",
    ]
