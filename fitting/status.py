"""Whether a curve is one that may be fitted: too few points, a collapse, no trend, a fall."""

from __future__ import annotations

import numpy as np
from scipy.stats import f as f_distribution

from scalerl.fitting.least_squares import Floats

MIN_POINTS = 5
OPEN_WIDTH = 0.1  # an interval of A wider than this does not say where the ceiling is
TREND_P = 0.05
_MIN_FALL = 0.05
_HALF_WINDOW = 2  # of the running median over 5 points


def judge(compute: Floats, y: Floats, p: int) -> tuple[str, str] | None:
    """(status, message) of a curve that gives no parameters; None for one to fit. compute > 0, in order; p: parameters
    that would be fitted."""
    needed = max(MIN_POINTS, p + 2)
    if len(y) < needed:
        return "too-few-points", f"need at least {needed} points in the window (have {len(y)})"
    if message := _collapse(compute, y):
        return "collapsed", message
    if np.ptp(np.log(compute)) < 1e-9:
        return "too-few-points", f"all {len(y)} points have the same compute ({compute[0]:g})"
    slope, p_value = trend(np.log(compute), y)
    if p_value > TREND_P:
        return "flat", f"pass rate does not rise: range {np.ptp(y):.3f}, trend p = {p_value:.2f}"
    if slope < 0:
        return "decreasing", f"pass rate falls with compute: from {y[0]:.3f} to {y[-1]:.3f}"
    return None


def _collapse(compute: Floats, y: Floats) -> str | None:
    """A run that rose and fell: the mean of the last 3 points lies below the running median's peak, and so does the
    median's first value, each by more than max(0.05, 5 sd of the points about the median)."""
    w = _HALF_WINDOW
    median = np.array([np.median(y[max(0, i - w) : i + w + 1]) for i in range(len(y))])
    peak, least = float(median.max()), max(_MIN_FALL, 5 * float(np.std(y - median)))
    fall = peak - float(y[-3:].mean())
    if fall <= least or peak - float(median[0]) <= least:
        return None
    top = int(np.argmax(y))
    return (
        f"falls {fall:.2f} from its peak ({y[top]:.2f} at {compute[top]:g}); fit covers a collapse; "
        f"use --fit-max {compute[top]:g}"
    )


def trend(x: Floats, y: Floats) -> tuple[float, float]:
    """Slope of y on x, and the p value of the F-test of that trend against a constant."""
    x, centred = x - x.mean(), y - y.mean()
    total = float(centred @ centred)
    if total <= 1e-24 * len(y):
        return 0.0, 1.0
    slope = float(x @ centred / (x @ x))
    left = max(total - slope**2 * float(x @ x), 0.0)
    if left <= 1e-15 * total:
        return slope, 0.0
    return slope, float(f_distribution.sf((total - left) / (left / (len(y) - 2)), 1, len(y) - 2))
