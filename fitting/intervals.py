"""Profile-likelihood intervals, their threshold widened for autocorrelated checkpoints.

An end is where the sum of squares, minimised over all other parameters, has risen to
SSR [1 + F_level(1, m) k / (n - p)] with rho = clip(r1 + 4/n, 0, 0.9), k = (1 + rho) / (1 - rho), m = max(2, n/k - p)
and r1 the lag-1 autocorrelation of the curve's residuals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import expit
from scipy.stats import f as f_distribution

from scalerl.fitting.least_squares import Bools, Floats, minimise
from scalerl.fitting.sigmoid import R0, A, B, M, Sigmoid

_EXPANSIONS, _BISECTIONS = 60, 40
_LN4 = float(np.log(4.0))
_EXACT = 1e-22  # a sum of squares below this times n is an exact fit, whose intervals are points
_INSIDE = 1e-9
_GENTLE = float(np.log(2.0))  # ln B of a curve that rises over a decade of compute


@dataclass(frozen=True)
class Threshold:
    """rho: the autocorrelation that was allowed for; rise: how much the sum of squares may rise."""

    rho: float
    rise: float


def threshold(residuals: Floats, ssr: float, n: int, p: int, level: float, *, autocorrelation: bool) -> Threshold:
    """residuals: of the curve points, in order of compute; n: observations; p: free parameters."""
    if ssr <= _EXACT * n or n <= p:
        return Threshold(0.0, 0.0)
    rho, k = 0.0, 1.0
    if autocorrelation:
        lag1 = float(residuals[1:] @ residuals[:-1] / (residuals @ residuals)) if residuals.any() else 0.0
        rho = float(np.clip(lag1 + 4 / n, 0.0, 0.9))
        k = (1 + rho) / (1 - rho)
    m = max(2.0, n / k - p)
    return Threshold(rho, ssr * float(f_distribution.ppf(level, 1, m)) * k / (n - p))


@dataclass(frozen=True)
class Ends:
    """low, high: [K]; low_open, high_open: bool [K], True where the bound was reached below the threshold."""

    low: Floats
    high: Floats
    low_open: Bools
    high_open: Bools

    def pair(self) -> tuple[float, float]:
        """Of a single profile."""
        return float(self.low[0]), float(self.high[0])

    def flags(self) -> tuple[bool, bool]:
        return bool(self.low_open[0]), bool(self.high_open[0])


# (values [2K], starts [2K, p]) -> (solutions [2K, p], sums of squares [2K]); all low sides, then all high sides
Profile = Callable[[Floats, Floats], tuple[Floats, Floats]]


def find_ends(
    profile: Profile,
    estimate: Floats,
    theta: Floats,
    scale: Floats,
    limits: tuple[Floats, Floats],
    ssr: float,
    rise: float,
) -> Ends:
    """Ends of K profiles at once, each walked outwards from the estimate [K] and then closed in on, every solution
    starting from that of the last value inside. theta: the fit's own solution [p]; scale: first steps [K].

    The square root of the rise is close to linear in the parameter, so regula falsi on it takes few steps."""
    k = len(estimate)
    if rise <= 0:
        return Ends(estimate, estimate, np.zeros(k, bool), np.zeros(k, bool))
    inner, limit = np.concatenate([estimate, estimate]), np.concatenate(limits)
    step = np.concatenate([-scale, scale])
    start, height_in = np.tile(theta, (2 * k, 1)), np.full(2 * k, -1.0)

    def height(values: Floats) -> tuple[Floats, Floats]:
        solution, f = profile(values, start)
        return solution, np.sqrt(np.maximum(f - ssr, 0.0) / rise) - 1

    outer = _within(inner + step, limit, step)
    solution, height_out = height(outer)
    for _ in range(_EXPANSIONS):
        short = (height_out < 0) & (outer != limit)
        if not short.any():
            break
        step = np.where(short, 2 * step, step)
        inner, height_in = np.where(short, outer, inner), np.where(short, height_out, height_in)
        start = np.where(short[:, None], solution, start)
        outer = np.where(short, _within(outer + step, limit, step), outer)
        moved, heights = height(outer)
        solution = np.where(short[:, None], moved, solution)
        height_out = np.where(short, heights, height_out)
    is_open = height_out < 0
    for _ in range(_BISECTIONS):
        wide = np.abs(outer - inner) > 1e-7 * (1e-3 + np.abs(outer))
        unsettled = ~is_open & wide & (np.abs(height_out) > 1e-6)
        if not unsettled.any():
            break
        share = np.clip(-height_in / np.maximum(height_out - height_in, 1e-300), 0.05, 0.95)
        middle = np.where(unsettled, inner + share * (outer - inner), outer)
        moved, heights = height(middle)
        beyond, within = unsettled & (heights >= 0), unsettled & (heights < 0)
        # Illinois: the end that stays gets half its height, or it might stay for ever.
        height_in = np.where(within, heights, np.where(beyond, height_in * 0.5, height_in))
        height_out = np.where(beyond, heights, np.where(within, height_out * 0.5, height_out))
        start = np.where(within[:, None], moved, start)
        inner, outer = np.where(within, middle, inner), np.where(beyond, middle, outer)
    return Ends(outer[:k], outer[k:], is_open[:k], is_open[k:])


def _within(values: Floats, limit: Floats, step: Floats) -> Floats:
    return np.where(step < 0, np.maximum(values, limit), np.minimum(values, limit))


def parameter_ends(problem: Sigmoid, theta: Floats, ssr: float, rise: float) -> dict[int, Ends]:
    """The ends of A, m and b (those that are free), by their index."""
    which = np.array([i for i in (A, M, B) if problem.free[i]])
    lower, upper = problem.bounds
    held = np.concatenate([which, which])
    free = np.tile(problem.free, (len(held), 1))
    free[np.arange(len(held)), held] = False

    def profile(values: Floats, start: Floats) -> tuple[Floats, Floats]:
        # The rest of the fit may lie in another basin than the last value's: a steep curve no longer feels its slope.
        gentle = start.copy()
        gentle[:, B] = np.where(problem.free[B], _GENTLE, start[:, B])
        starts = np.concatenate([start, gentle])
        starts[np.arange(2 * len(held)), np.tile(held, 2)] = np.tile(values, 2)
        theta, f = minimise(problem.residuals, starts, np.tile(free, (2, 1)), lower, upper)
        theta, f = theta.reshape(2, len(held), -1), f.reshape(2, -1)
        best = np.argmin(f, axis=0)
        return theta[best, np.arange(len(held))], f[best, np.arange(len(held))]

    scale = _scale(problem, theta, rise)[which]
    lowest = np.where(which == A, max(theta[R0], 0.0) if problem.fixed_r0 is not None else 0.0, lower[which])
    limits = (lowest, upper[which])
    found = find_ends(profile, theta[which], theta, scale, limits, ssr, rise)
    return {
        int(p): Ends(found.low[i : i + 1], found.high[i : i + 1], found.low_open[i : i + 1], found.high_open[i : i + 1])
        for i, p in enumerate(which)
    }


def c80_ends(problem: Sigmoid, theta: Floats, ssr: float, rise: float) -> tuple[float, float]:
    """The interval of ln C80 = m + ln 4 / B (centred like m), by profile over the other parameters."""
    lower, upper = (side[[A, B, R0]] for side in problem.bounds)
    free = problem.free[[A, B, R0]]

    def profile(values: Floats, start: Floats) -> tuple[Floats, Floats]:
        def residuals(t: Floats) -> tuple[Floats, Floats]:
            reach = _LN4 * np.exp(-t[:, 1])
            r, jacobian = problem.residuals(np.stack([t[:, 0], values - reach, t[:, 1], t[:, 2]], axis=-1))
            d_b = jacobian[..., B] + jacobian[..., M] * reach[:, None]
            return r, np.stack([jacobian[..., A], d_b, jacobian[..., R0]], axis=-1)

        return minimise(residuals, start, free, lower, upper)

    reach = _LN4 * np.exp(-theta[B])
    gradient = np.array([0.0, 1.0, -reach, 0.0])[problem.free]
    spread = float(gradient @ _covariance(problem, theta) @ gradient)
    scale = np.clip(np.sqrt(max(spread, 0.0) * rise), 1e-6, 0.5)
    limits = (problem.bounds[0][[M]], problem.bounds[1][[M]])
    estimate = np.array([theta[M] + reach])
    return find_ends(profile, estimate, theta[[A, B, R0]], np.array([scale]), limits, ssr, rise).pair()


def _scale(problem: Sigmoid, theta: Floats, rise: float) -> Floats:
    """A first guess at the distance of an end from the estimate, from the curvature; [4]."""
    covariance = _covariance(problem, theta)
    scale = np.full(4, 1e-3)
    scale[problem.free] = np.sqrt(np.maximum(np.diag(covariance), 0.0) * rise)
    return np.clip(scale, 1e-6, [0.05, 0.5, 0.5, 0.05])


def _covariance(problem: Sigmoid, theta: Floats) -> Floats:
    """Of the free parameters, up to the residual variance: the inverse of their curvature. It scales first steps."""
    _, jacobian = problem.residuals(theta[None])
    columns = jacobian[0][:, problem.free]
    return np.linalg.pinv(columns.T @ columns, rcond=1e-10)


def value_ends(problem: Sigmoid, theta: Floats, ssr: float, rise: float, x: Floats) -> tuple[Floats, Floats]:
    """The intervals (low [K], high [K]) of the *curve* at ln C = x [K] (centred), by profile; not those of a new
    evaluation."""
    value = problem.curve(theta, x)
    low = (problem.fixed_r0 if problem.fixed_r0 is not None else 0.0) + _INSIDE
    high = (problem.fixed_a if problem.fixed_a is not None else 1.0) - _INSIDE
    moves = (value > low) & (value < high)
    lows, highs = value.copy(), value.copy()
    if rise <= 0 or not moves.any():
        return lows, highs
    value, x = value[moves], x[moves]
    gradient, covariance = _gradient(problem, theta, x)[:, problem.free], _covariance(problem, theta)
    spread = np.einsum("kp,pq,kq->k", gradient, covariance, gradient)
    scale = np.clip(np.sqrt(np.maximum(spread, 0.0) * rise), 1e-6, 0.1)
    limits = (np.full(len(x), low), np.full(len(x), high))
    sides = np.concatenate([x, x])
    ends = find_ends(
        lambda values, start: _through(problem, values, sides, start), value, theta, scale, limits, ssr, rise
    )
    lows[moves] = np.where(ends.low > low, ends.low, low - _INSIDE)
    highs[moves] = np.where(ends.high < high, ends.high, high + _INSIDE)
    return lows, highs


def _through(problem: Sigmoid, values: Floats, x: Floats, start: Floats) -> tuple[Floats, Floats]:
    """The best curves through `values` [K] at x [K]: theta [K, 4], sums of squares [K].

    Each is sought in three ways, since none is well conditioned everywhere: with m, with A = 1 and m, and with A
    following from the value. The last is the one that holds far beyond the data, where the value nearly is A."""
    k = len(values)
    lower, upper = (np.tile(side, (k, 1)) for side in problem.bounds)
    if problem.fixed_a is None:
        lower[:, A] = values + _INSIDE / 2
    if problem.fixed_r0 is None:
        upper[:, R0] = values - _INSIDE / 2
    start, free = np.clip(start, lower, upper), np.tile(problem.free, (k, 1))
    free[:, M] = False
    at_top, held = start.copy(), free.copy()
    at_top[:, A], held[:, A] = upper[:, A], False
    twice, at = np.concatenate([values, values]), np.concatenate([x, x])
    theta, f = minimise(
        lambda t: problem.pinned_by_m(t, twice, at),
        np.concatenate([start, at_top]),
        np.concatenate([free, held]),
        np.tile(lower, (2, 1)),
        np.tile(upper, (2, 1)),
    )
    a, slope, r0 = theta[:, A], np.exp(theta[:, B]), theta[:, R0]
    theta[:, M] = at - np.log((twice - r0) / (a - twice)) / slope
    found, sums = [theta[:k], theta[k:]], [f[:k], f[k:]]
    if problem.fixed_a is None:
        free = np.tile(problem.free, (k, 1))
        free[:, A] = False
        theta, f = minimise(lambda t: problem.pinned_by_a(t, values, x), start, free, lower, upper)
        g = expit(np.exp(theta[:, B]) * (x - theta[:, M]))
        theta[:, A] = theta[:, R0] + (values - theta[:, R0]) / np.maximum(g, 1e-300)
        found.append(theta)
        sums.append(np.where(theta[:, A] <= 1, f, np.inf))
    best = np.argmin(sums, axis=0)
    return np.stack(found)[best, np.arange(k)], np.stack(sums)[best, np.arange(k)]


def _gradient(problem: Sigmoid, theta: Floats, x: Floats) -> Floats:
    """Of the curve at x [K] with respect to theta; [K, 4]."""
    slope = np.exp(theta[B])
    g = expit(slope * (x - theta[M]))
    bend = (theta[A] - theta[R0]) * g * (1 - g)
    return np.stack([g, -bend * slope, bend * slope * (x - theta[M]), 1 - g], axis=-1)
