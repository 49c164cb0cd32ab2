"""Ending an arm early: when it is as good as certain that it ends below the base."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scalerl.fitting import fit, read_runs
from scalerl.fitting.compare import DRAWS, RUN_SD
from scalerl.fitting.errors import InputError
from scalerl.fitting.result import FitResult

_ONE_SD = 0.6827

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
        ours, theirs = fit(a_x, a_y, level=_ONE_SD), fit(b_x, b_y, level=_ONE_SD)
        if ours.A is None or theirs.A is None or ours.A_interval is None or theirs.A_interval is None:
            return None
        target = self.target or 2 * float(b_x[-1])
        rng = np.random.default_rng(0)
        at_target = _below(_at(ours, target), _at(theirs, target), rng)
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


def _at(result: FitResult, target: float) -> tuple[float, float, float]:
    return result.predict(target)


def _below(ours: tuple[float, float, float], theirs: tuple[float, float, float], rng: np.random.Generator) -> float:
    """Share of draws in which ours is lower: two-piece normals with the distances to the 68 % ends as sds, and the
    run-to-run sd on each."""
    draws = []
    for value, low, high in (ours, theirs):
        down, up = max(value - low, 1e-12), max(high - value, 1e-12)
        z = np.abs(rng.standard_normal(DRAWS))
        side = np.where(rng.random(DRAWS) < down / (down + up), -down, up)
        draws.append(value + side * z + RUN_SD * rng.standard_normal(DRAWS))
    return float(np.mean(draws[0] < draws[1]))
