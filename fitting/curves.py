"""Runs and their fits together: what the commands and the figures work on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scalerl.fitting.errors import InputError
from scalerl.fitting.fit import fit
from scalerl.fitting.result import FitResult
from scalerl.fitting.runs import Floats, Run

Window = tuple[float | None, float | None]

R0_SHIFT = 0.02
_PARALLEL_FROM = 40  # curves; below, starting processes costs more than it saves


@dataclass(frozen=True)
class Settings:
    """Arguments of `scalerl.fitting.fit` that all runs share."""

    r0: float | str | None = None
    window: Window = (None, None)
    method: str = "continuous"
    form: str = "sigmoid"
    level: float = 0.95
    autocorrelation: bool = True
    grids: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        return {
            "r0": self.r0,
            "window": self.window,
            "method": self.method,
            "form": self.form,
            "level": self.level,
            "autocorrelation": self.autocorrelation,
            **self.grids,
        }


@dataclass(frozen=True, eq=False)
class Curve:
    """A run, its fit, and the window (low, high) of compute that was fitted, None where it is open."""

    run: Run
    result: FitResult
    window: Window = (None, None)
    A_at_R0: tuple[float | None, float | None] | None = None  # A with R0 fixed 0.02 lower and 0.02 higher

    @property
    def fitted(self) -> NDArray[np.bool_]:
        """[n] the curve points that the fit saw."""
        low, high = self.window
        c = self.run.compute
        return ~self.run.held_out & (c > 0) & (c >= (low or 0)) & (c <= (math.inf if high is None else high))

    @property
    def beyond(self) -> NDArray[np.bool_]:
        """[n] the points kept from the fit: marked so by the input, or past the end of the window."""
        high = self.window[1]
        return self.run.held_out | (self.run.compute > (math.inf if high is None else high))

    @property
    def budget(self) -> float | None:
        """Compute of the last fitted point."""
        compute = self.run.compute[self.fitted]
        return float(compute[-1]) if len(compute) else None


def points(run: Run, settings: Settings) -> tuple[Floats, Floats]:
    """([n], [n]) what the form is fitted to: entropy for the entropy law, compute for all others; and the pass rate.

    Raises InputError where the run has no entropy column.
    """
    use = ~run.held_out
    if settings.form != "entropy":
        return run.compute[use], run.pass_rate[use]
    if run.entropy is None:
        raise InputError(f"run '{run.name}': --form entropy needs one entropy column; name it with --entropy COLUMN")
    low, high = settings.window
    use &= np.isfinite(run.entropy) & (run.compute >= (low or 0))
    use &= run.compute <= (math.inf if high is None else high)
    return run.entropy[use], run.pass_rate[use]


def fit_run(run: Run, settings: Settings) -> Curve:
    """One run's fit, and for the sigmoid A under a start 0.02 lower and higher: nothing else moves A as much.

    Raises InputError, with the run's name, where the settings ask for what the run hasn't."""
    x, y = points(run, settings)
    try:
        result = fit(x, y, **settings.arguments())
    except InputError as error:
        raise InputError(f"run '{run.name}': {error}") from None
    shifted = None
    if settings.form == "sigmoid" and result.R0 is not None:
        shifted = (_ceiling(x, y, settings, result.R0 - R0_SHIFT), _ceiling(x, y, settings, result.R0 + R0_SHIFT))
    return Curve(run, result, settings.window, shifted)


def _ceiling(x: Floats, y: Floats, settings: Settings, r0: float) -> float | None:
    """A with that R0; None where R0 is no pass rate or no curve from it fits."""
    grid = "grid" if settings.method == "paper" else settings.method  # the same cell, in a hundredth of the time
    if not 0 <= r0 < 1:
        return None
    try:
        return fit(x, y, **settings.arguments() | {"r0": r0, "method": grid}).A
    except InputError:
        return None


def fit_runs(
    runs: Sequence[Run], settings: Settings, *, processes: int = 1, on_fitted: Callable[[], None] = lambda: None
) -> list[Curve]:
    """Fit every run, many of them in several processes. `on_fitted` is called once a run, for progress."""
    curves = []
    if processes < 2 or len(runs) < _PARALLEL_FROM:
        for run in runs:
            curves.append(fit_run(run, settings))
            on_fitted()
        return curves
    with ProcessPoolExecutor(processes) as pool:
        for curve in pool.map(fit_run, runs, [settings] * len(runs), chunksize=8):
            curves.append(curve)
            on_fitted()
    return curves
