"""Does the first part of a run predict the rest?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from scalerl.fitting.errors import InputError
from scalerl.fitting.fit import fit
from scalerl.fitting.least_squares import Floats
from scalerl.fitting.result import FitResult


@dataclass(frozen=True)
class Predicted:
    """A point that the fit did not see, and what it says there; low and high are None without intervals."""

    C: float
    pass_rate: float
    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Backtest:
    """fitted: the fit of the points up to `cut`. mae: mean |predicted - measured| over the `n` points beyond. coverage:
    share of these whose measured value lies in the curve's interval widened by two residual sds (None without
    intervals). None where the fit is withheld. predictions: of the points beyond, in the order given."""

    fitted: FitResult
    cut: float
    n: int
    mae: float | None
    bias: float | None
    coverage: float | None
    predictions: tuple[Predicted, ...] = ()

    def __str__(self) -> str:
        if self.mae is None:
            return f"backtest: up to {self.cut:.4g} no fit ({self.fitted.status})"
        covered = "" if self.coverage is None else f", {self.coverage:.0%} inside the interval and its noise"
        errors = f"MAE {self.mae:.4f}, bias {self.bias:+.4f}"
        return f"backtest: fitted up to {self.cut:.4g}, {self.n} points beyond: {errors}{covered}"

    def to_dict(self) -> dict[str, Any]:
        names = ("cut", "n", "mae", "bias", "coverage")
        predictions = [vars(point) for point in self.predictions]
        return {"status": self.fitted.status, **{n: getattr(self, n) for n in names}, "predictions": predictions}


def backtest(compute: ArrayLike, pass_rate: ArrayLike, *, fraction: float = 0.5, **options: Any) -> Backtest:
    """Fit the points up to `fraction` of the largest compute and predict the rest. options: of `fit`, its window too.

    Raises InputError where no point lies beyond the cut, and for the entropy law."""
    if options.get("form") == "entropy":
        raise InputError("a backtest goes by compute, and the entropy law has none; use another form")
    if not 0 < fraction < 1:
        raise InputError(f"fraction={fraction}: between 0 and 1, for example 0.5")
    x, y = np.asarray(compute, dtype=float).ravel(), np.asarray(pass_rate, dtype=float).ravel()
    if len(x) != len(y):
        raise InputError(f"compute has {len(x)} values and pass_rate {len(y)}; give one of each an evaluation")
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
    points = tuple(_predicted(fitted, x[beyond], y[beyond]))
    errors, slack = np.array([p.value - p.pass_rate for p in points]), 2 * (fitted.sd or 0.0)
    inside = [
        p.low - slack <= p.pass_rate <= p.high + slack for p in points if p.low is not None and p.high is not None
    ]
    coverage = float(np.mean(inside)) if inside else None
    return Backtest(fitted, cut, len(points), float(np.abs(errors).mean()), float(errors.mean()), coverage, points)


def _predicted(fitted: FitResult, c: Floats, rates: Floats) -> list[Predicted]:
    found = fitted.predict(c)
    value, low, high = found if isinstance(found, tuple) else (found, np.full(len(c), None), np.full(len(c), None))
    columns = (part.tolist() for part in (c, rates, value, low, high))
    return [Predicted(*row) for row in zip(*columns, strict=True)]
