"""Does the first part of a run predict the rest?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from scalerl.fitting.errors import InputError
from scalerl.fitting.fit import fit
from scalerl.fitting.result import FitResult


@dataclass(frozen=True)
class Backtest:
    """fitted: the fit of the points up to `cut`. mae: mean |predicted - measured| over the `n` points beyond. coverage:
    share of these whose measured value lies in the curve's interval widened by two residual sds (None without
    intervals). None where the fit is withheld."""

    fitted: FitResult
    cut: float
    n: int
    mae: float | None
    bias: float | None
    coverage: float | None

    def __str__(self) -> str:
        if self.mae is None:
            return f"backtest: up to {self.cut:.4g} no fit ({self.fitted.status})"
        covered = "" if self.coverage is None else f", {self.coverage:.0%} inside the interval"
        errors = f"MAE {self.mae:.4f}, bias {self.bias:+.4f}"
        return f"backtest: fitted up to {self.cut:.4g}, {self.n} points beyond: {errors}{covered}"

    def to_dict(self) -> dict[str, Any]:
        names = ("cut", "n", "mae", "bias", "coverage")
        return {"status": self.fitted.status, **{name: getattr(self, name) for name in names}}


def backtest(compute: ArrayLike, pass_rate: ArrayLike, *, fraction: float = 0.5, **options: Any) -> Backtest:
    """Fit the points up to `fraction` of the largest compute and predict the rest. options: of `fit`, its window too.

    Raises InputError where no point lies beyond the cut."""
    if not 0 < fraction < 1:
        raise InputError(f"fraction={fraction}: between 0 and 1, for example 0.5")
    x, y = np.asarray(compute, dtype=float), np.asarray(pass_rate, dtype=float)
    low, high = options.pop("window", None) or (None, None)
    inside = np.isfinite(x) & np.isfinite(y) & (x <= (np.inf if high is None else high))
    x, y = x[inside], y[inside]
    cut = fraction * float(x.max(initial=0.0))
    beyond = x > cut
    if not beyond.any():
        raise InputError("a backtest needs points beyond the cut; there are none")
    fitted = fit(x, y, window=(low, cut), **options)
    if fitted.A is None:
        return Backtest(fitted, cut, int(beyond.sum()), None, None, None)
    predictions = [fitted.predict(float(c)) for c in x[beyond]]
    if not isinstance(predictions[0], tuple):
        errors = np.array(predictions) - y[beyond]
        return Backtest(fitted, cut, len(errors), float(np.abs(errors).mean()), float(errors.mean()), None)
    value, lower, upper = np.array(predictions).T
    errors, slack = value - y[beyond], 2 * (fitted.sd or 0.0)
    covered = (y[beyond] >= lower - slack) & (y[beyond] <= upper + slack)
    return Backtest(fitted, cut, len(errors), float(np.abs(errors).mean()), float(errors.mean()), float(covered.mean()))
