"""Ending an arm early: when it is as good as certain that it ends below the base."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scalerl.fitting import fit, read_runs
from scalerl.fitting.compare import DRAWS, ONE_SD, RUN_SD, two_piece
from scalerl.fitting.errors import InputError

Interval = tuple[float, float, float]  # value, low, high
Points = tuple[NDArray[np.float64], NDArray[np.float64]]


@dataclass
class EarlyStop:
    """threshold: probability above which an arm is ended; x: axis of compute; target: compute of the comparison, None
    for twice what the base has reached. Both the ceiling and the value at the target must be below the base's.

    A new look is taken only when the arm has a new evaluation."""

    threshold: float
    x: str
    target: float | None = None
    _seen: dict[Path, int] = field(default_factory=dict)

    def reason(self, base: Path, arm: Path) -> str | None:
        """Why `arm` should be ended; None where it should not, or where either has no usable fit yet."""
        try:
            (a_x, a_y), (b_x, b_y) = self._points(arm), self._points(base)
        except InputError:
            return None  # no evaluations yet
        if self._seen.get(arm) == len(a_x):
            return None
        self._seen[arm] = len(a_x)
        ours, theirs = fit(a_x, a_y, level=ONE_SD), fit(b_x, b_y, level=ONE_SD)
        if ours.A is None or theirs.A is None or ours.A_interval is None or theirs.A_interval is None:
            return None
        target = self.target or 2 * float(b_x[-1])
        rng = np.random.default_rng(0)
        at_target = _below(ours.predict(target), theirs.predict(target), rng)
        ceiling = _below((ours.A, *ours.A_interval), (theirs.A, *theirs.A_interval), rng)
        if min(at_target, ceiling) <= self.threshold:
            return None
        return (
            f"ended early: below the base at {target:.3g} with probability {at_target:.3f} and in its ceiling with "
            f"{ceiling:.3f} (threshold {self.threshold:g})"
        )

    def _points(self, run: Path) -> Points:
        (found,) = read_runs([str(run)], x=self.x)
        return found.compute, found.pass_rate


def _below(ours: Interval, theirs: Interval, rng: np.random.Generator) -> float:
    """Share of draws in which ours is lower."""
    lower, upper = (two_piece(*interval, RUN_SD, DRAWS, rng) for interval in (ours, theirs))
    return float(np.mean(lower < upper))
