"""From the raw rows of one run to its curve: what is dropped, sorted and refused, each with its message."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from scalerl.fitting.errors import InputError
from scalerl.fitting.readers.cutting import Part, Role
from scalerl.fitting.runs import MAX_LISTED, Dropped, Floats, Run

_MANY = 8  # rows from which a column that falls all the time is told from one that restarts
_ROUNDING = 1e-9  # of a mean of ones


@dataclass(frozen=True)
class Rules:
    """What the user asked for where a table allows more than one reading."""

    scale: str | None = None
    keep: str = "last"
    on_compute_reset: str = "error"
    compute_per_step: float | None = None

    def __post_init__(self) -> None:
        for option, value, known in (
            ("--scale", self.scale, (None, "fraction", "percent")),
            ("--keep", self.keep, ("last", "first", "error")),
            ("--on-compute-reset", self.on_compute_reset, ("error", "accumulate")),
        ):
            if value not in known:
                raise InputError(f"{option} {value}: one of {', '.join(k for k in known if k)}")
        cost = self.compute_per_step
        if cost is not None and not (cost > 0 and math.isfinite(cost)):
            raise InputError(f"--compute-per-step {cost}: must be a positive number")


@dataclass(frozen=True)
class _Rows:
    """Rows of all parts, in the order of the files, all [n]. `part` indexes the parts and `row` that part's table."""

    x: Floats
    y: Floats
    step: Floats
    entropy: Floats
    held_out: NDArray[np.bool_]
    row: NDArray[np.int64]
    part: NDArray[np.int32]

    def take(self, index: NDArray) -> _Rows:
        """The rows of a mask or of an order; no copy where the mask takes them all."""
        if index.dtype == bool and index.all():
            return self
        return _Rows(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def __len__(self) -> int:
        return len(self.x)


class _Assembly:
    """The rules, in order, with what they report."""

    def __init__(self, name: str, parts: Sequence[Part], rules: Rules) -> None:
        self.name = name
        self.parts = parts
        self.rules = rules
        self.messages: list[str] = list(dict.fromkeys(m for part in parts for m in part.table.messages))
        files = list(dict.fromkeys(part.table.path for part in parts))
        if len(files) > 1:
            self.messages.append(f"run '{name}' is joined from {', '.join(files)}")
        self.dropped: list[Dropped] = []
        self.n_dropped = 0
        self.has_step = _all_or_none(name, parts)
        self.x_name = parts[0].chosen.x or "compute"
        self.y_name = parts[0].chosen.y

    def run(self) -> Run:
        rows = self._concatenated()
        if self.rules.compute_per_step is not None:
            rows = replace(rows, x=np.where(np.isinf(rows.step), np.nan, rows.step) * self.rules.compute_per_step)
        elif self.has_step:
            rows = self._joined_by_step(rows)
        rows = self._usable(rows.take(~np.isnan(rows.y)))
        rows = replace(rows, y=self._fractions(rows))
        if self.has_step:
            rows = self._in_step_order(rows)
        rows = self._one_base(rows)
        rows = replace(rows, x=self._rising_compute(rows))
        return Run(
            name=self.name,
            compute=rows.x,
            pass_rate=rows.y,
            held_out=rows.held_out,
            step=rows.step if self.has_step else None,
            entropy=rows.entropy if np.isfinite(rows.entropy).any() else None,
            arm=self.parts[0].arm,
            x_name=self.x_name,
            y_name=self.y_name,
            sources=tuple(dict.fromkeys(source for part in self.parts for source in part.sources)),
            dropped=tuple(self.dropped),
            n_dropped=self.n_dropped,
            messages=tuple(self.messages),
        )

    def where(self, rows: _Rows, i: int) -> str:
        return self.parts[int(rows.part[i])].table.where(int(rows.row[i]))

    def _concatenated(self) -> _Rows:
        def joined(role: Role) -> Floats:
            columns = [part.required(role) for part in self.parts]
            return columns[0] if len(columns) == 1 else np.concatenate(columns)

        return _Rows(
            x=joined("x"),
            y=joined("y"),
            step=joined("step"),
            entropy=joined("entropy"),
            held_out=np.concatenate([part.held_out for part in self.parts]),
            row=np.concatenate([part.rows for part in self.parts]),
            part=np.concatenate([np.full(len(part.rows), i, dtype=np.int32) for i, part in enumerate(self.parts)]),
        )

    def _joined_by_step(self, rows: _Rows) -> _Rows:
        """Give an evaluation without compute (or entropy) what another row of the same step says."""
        bare = ~np.isnan(rows.y)
        return replace(
            rows,
            x=_filled(rows.step, rows.x, bare & np.isnan(rows.x)),
            entropy=_filled(rows.step, rows.entropy, bare & np.isnan(rows.entropy)),
        )

    def _usable(self, rows: _Rows) -> _Rows:
        """Drop and list rows whose pass rate, compute or step is no finite number."""
        roles: list[tuple[Role, str, Floats]] = [("y", self.y_name, rows.y), ("x", self.x_name, rows.x)]
        if self.has_step:
            roles.insert(0, ("step", "step", rows.step))
        good = np.all([np.isfinite(cells) for _, _, cells in roles], axis=0)
        bad = np.flatnonzero(~good)
        self.n_dropped = len(bad)
        for i in bad[:MAX_LISTED].tolist():
            part, row = self.parts[int(rows.part[i])], int(rows.row[i])
            role, name, cells = next(r for r in roles if not np.isfinite(r[2][i]))
            reason = f"no {name}" if np.isnan(cells[i]) else f"{name} is {part.odd_text(role, row)}"
            self.dropped.append(Dropped(part.table.path, part.table.lines[row], reason))
        if self.n_dropped:
            places = [self.where(rows, i) for i in bad[:8].tolist()]
            first = "; ".join(f"{p} ({d.reason})" for p, d in zip(places, self.dropped, strict=False))
            more = "; ..." if self.n_dropped > 8 else ""
            self.messages.append(f"{_count(self.n_dropped, 'row')} dropped: {first}{more}")
        return rows.take(good)

    def _fractions(self, rows: _Rows) -> Floats:
        """Pass rates in [0, 1]; raises InputError on any other reading of them that the user didn't name."""
        y, percent = np.where((rows.y > 1) & (rows.y <= 1 + _ROUNDING), 1.0, rows.y), self.rules.scale == "percent"
        for part in self.parts:
            row = part.table.column(part.chosen.y).percent_row
            if row is not None and not percent:
                raise InputError(
                    f"{part.table.where(row)}: {self.y_name} is written with a percent sign; give --scale percent"
                )
        signed = all(part.table.column(part.chosen.y).all_percent for part in self.parts)
        if not len(y):
            return y
        if (y < 0).any():
            i = int(np.argmax(y < 0))
            raise InputError(f"{self.where(rows, i)}: {self.y_name} {y[i]:g} is below 0, and no pass rate")
        above = y > 1
        first = f"the first at {self.where(rows, int(np.argmax(above)))} ({y[int(np.argmax(above))]:g})"
        count = f"{int(above.sum())} of {len(y)} values of {self.y_name} exceed 1, {first}"
        if above.any() and (above | (y == 0)).sum() < len(y) and not signed:
            raise InputError(
                f"run '{self.name}': {count}: a mixture of fractions and percent; mend the column "
                "(where all are percent: by a sign behind each, 0.4%)"
            )
        if above.any() and not percent:
            raise InputError(f"run '{self.name}': {count}: give --scale percent if they are percent")
        if percent and not above.any() and not signed:
            raise InputError(
                f"run '{self.name}': none of {len(y)} values of {self.y_name} exceeds 1; they look like fractions "
                "already: leave out --scale percent, or write a sign behind each (0.4%)"
            )
        if percent and (y > 100).any():
            i = int(np.argmax(y > 100))
            raise InputError(f"{self.where(rows, i)}: {self.y_name} {y[i]:g} is above 100 %")
        return y / 100 if percent else y

    def _in_step_order(self, rows: _Rows) -> _Rows:
        falls = np.flatnonzero(np.diff(rows.step) < 0)
        rows_sorted = rows.take(np.argsort(rows.step, kind="stable")) if len(falls) else rows
        step = rows_sorted.step
        repeats = np.flatnonzero(np.diff(step) == 0)
        if len(falls):
            i = int(falls[0]) + 1
            self.messages.append(
                f"{_count(len(falls), 'row')} out of step order, the first at {self.where(rows, i)} (step "
                f"{rows.step[i]:g} after {rows.step[i - 1]:g}); sorted by step"
            )
        if not len(repeats):
            return rows_sorted
        doubled = np.unique(step[repeats])
        named = ",".join(f"{s:g}" for s in doubled[:20]) + (",..." if len(doubled) > 20 else "")
        i = int(repeats[0])
        places = f"step {step[i]:g} at {self.where(rows_sorted, i)} and {self.where(rows_sorted, i + 1)}"
        if self.rules.keep == "error":
            raise InputError(
                f"run '{self.name}': steps {named} are written more than once ({places}); --keep last or first"
            )
        if self.rules.keep == "last":
            kept = np.append(step[1:] != step[:-1], True)
        else:
            kept = np.append(True, step[1:] != step[:-1])
        self.messages.append(
            f"{_count(len(doubled), 'step')} written more than once ({named}; {places}): "
            f"kept the {self.rules.keep} written, {_count(int((~kept).sum()), 'row')} left out"
        )
        return rows_sorted.take(kept)

    def _one_base(self, rows: _Rows) -> _Rows:
        """Of the rows at compute 0 that a run begins with, the one that is the base evaluation: by step the first,
        since later ones are trained (as where hours are rounded), and in a table without steps the last written."""
        zeros = int(np.argmax(rows.x != 0)) if (rows.x != 0).any() else len(rows)
        if zeros < 2:
            return rows
        base = 0 if self.has_step else zeros - 1
        others = [i for i in range(zeros) if i != base]
        reason = f"{self.x_name} is 0 as in {self.where(rows, base)}, which is the base evaluation"
        for i in others[: MAX_LISTED - len(self.dropped)]:
            part, row = self.parts[int(rows.part[i])], int(rows.row[i])
            self.dropped.append(Dropped(part.table.path, part.table.lines[row], reason))
        self.n_dropped += len(others)
        self.messages.append(
            f"{_count(len(others), 'row')} dropped, the first {self.where(rows, others[0])}: {reason}; "
            "compute in finer units would keep them"
        )
        return rows.take(np.delete(np.arange(len(rows)), others))

    def _rising_compute(self, rows: _Rows) -> Floats:
        x = rows.x
        if (x < 0).any():
            i = int(np.argmax(x < 0))
            raise InputError(f"{self.where(rows, i)}: {self.x_name} {x[i]:g} is negative")
        falls = np.flatnonzero(np.diff(x) < 0) + 1
        if not len(falls):
            return x
        i = int(falls[0])
        at, before = (f" at step {rows.step[i]:g}", f" at step {rows.step[i - 1]:g}") if self.has_step else ("", "")
        fall = f"{self.where(rows, i)}: {self.x_name} {x[i]!s}{at} is below {x[i - 1]!s}{before}"
        if len(x) >= _MANY and len(falls) * 3 > len(x):
            raise InputError(
                f"{fall}, and falls {len(falls)} times in {len(x)} rows: it looks like a rate and no running total; "
                "name another column with --x"
            )
        if self.rules.on_compute_reset == "error":
            more = f" (the first of {len(falls)} such falls)" if len(falls) > 1 else ""
            raise InputError(
                f"{fall}{more}; where the count restarted at a resume, --on-compute-reset accumulate "
                "adds the value before the fall"
            )
        offsets = np.zeros_like(x)
        offsets[falls] = x[falls - 1]
        restarts = _count(len(falls), "restart")
        self.messages.append(f"{fall}; {restarts} of the count: the value before each fall was added")
        return x + np.cumsum(offsets)


def assemble(name: str, parts: Sequence[Part], rules: Rules) -> Run:
    """One run from its parts, by the rules. Raises InputError that names file and line, and the option that helps."""
    return _Assembly(name, parts, rules).run()


def _all_or_none(name: str, parts: Sequence[Part]) -> bool:
    """Whether the run has steps; a run of several files needs them in all or in none."""
    stepped, stepless = [], []
    for part in parts:
        step, evaluated = part.cells("step"), ~np.isnan(part.required("y"))
        if step is not None and not np.isnan(step[evaluated]).all():
            stepped.append(part)
        elif evaluated.any():
            stepless.append(part)
    if stepped and stepless:
        raise InputError(
            f"run '{name}': {stepped[0].table.path} has steps and {stepless[0].table.path} has none; "
            "they can't be put in order"
        )
    return bool(stepped)


def _filled(step: Floats, cells: Floats, missing: NDArray[np.bool_]) -> Floats:
    """`cells` with the missing ones taken from rows of the same step: its last value for its last missing one, and so
    on backwards, the first where there are fewer. A resumed run logs a step again, with an evaluation or without."""
    given = np.isfinite(cells) & np.isfinite(step)
    missing = missing & np.isfinite(step)
    if not missing.any() or not given.any():
        return cells
    given &= np.isin(step, step[missing])
    values: defaultdict[float, list[float]] = defaultdict(list)
    for s, value in zip(step[given].tolist(), cells[given].tolist(), strict=True):
        values[s].append(value)
    filled = cells.copy()
    for i, s in zip(np.flatnonzero(missing)[::-1].tolist(), step[missing][::-1].tolist(), strict=True):
        if s in values:
            filled[i] = values[s].pop() if len(values[s]) > 1 else values[s][0]
    return filled


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")
