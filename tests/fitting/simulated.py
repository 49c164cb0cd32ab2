"""Simulated curves with a known truth, and an independent fit of them by scipy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares
from scipy.special import expit

Array = np.ndarray
Truth = tuple[float, float, float, float]  # R0, A, B, C_mid

SCALERL: Truth = (0.40, 0.610, 1.92, 2542.0)
TABLE_1: tuple[Truth, ...] = tuple(  # ScaleRL (arXiv 2510.13786)
    (0.40, a, b, c_mid)
    for c_mid, b, a in (
        (2542, 1.92, 0.610),
        (11272, 1.89, 0.645),
        (2542, 2.44, 0.585),
        (3054, 2.22, 0.590),
        (2936, 2.07, 0.595),
        (4242, 1.65, 0.710),
        (2818, 1.77, 0.605),
        (10909, 1.70, 0.645),
        (2896, 2.05, 0.595),
        (1675, 1.09, 0.615),
    )
)


def sigmoid(truth: Truth, compute: Array) -> Array:
    r0, a, b, c_mid = truth
    with np.errstate(divide="ignore"):
        return r0 + (a - r0) * expit(b * (np.log(compute) - np.log(c_mid)))


def ar1(rng: np.random.Generator, n: int, rho: float) -> Array:
    """Stationary, unit variance."""
    shocks, series = rng.standard_normal(n), np.empty(n)
    series[0] = shocks[0]
    for i in range(1, n):
        series[i] = rho * series[i - 1] + np.sqrt(1 - rho**2) * shocks[i]
    return series


def noisy(
    truth: Truth, compute: Array, seed: int, sd: float = 0.0024, rho: float = 0.0, decimals: int | None = 4
) -> Array:
    values = sigmoid(truth, compute) + sd * ar1(np.random.default_rng(seed), len(compute), rho)
    return values if decimals is None else np.round(values, decimals)


@dataclass(frozen=True)
class Reference:
    """Least squares by `scipy.optimize.least_squares` from many starts; theta = (A, ln C_mid, ln B[, R0])."""

    compute: Array
    y: Array
    r0: float | None
    base: float | None = None

    @property
    def p(self) -> int:
        return 3 + (self.r0 is None)

    @property
    def n(self) -> int:
        return len(self.y) + (self.base is not None)

    def residuals(self, theta: Array) -> Array:
        r0 = theta[3] if self.r0 is None else self.r0
        r = r0 + (theta[0] - r0) * expit(np.exp(theta[2]) * (np.log(self.compute) - theta[1])) - self.y
        return r if self.base is None else np.append(r, r0 - self.base)

    def best(self, fixed_a: float | None = None, starts: list[Array] | None = None) -> tuple[Array, float]:
        held = () if fixed_a is None else (0,)
        free = [i for i in range(self.p) if i not in held]
        logs = np.log(self.compute)
        low = np.array([0.0, logs.min() - 25, np.log(0.01), 0.0])[: self.p]
        high = np.array([1.0, logs.max() + 25, np.log(300), 1.0])[: self.p]
        found = (np.zeros(self.p), np.inf)
        for start in starts or self._starts():
            theta = np.clip(start, low + 1e-9, high - 1e-9)
            if fixed_a is not None:
                theta[0] = fixed_a

            def part(values: Array, theta: Array = theta) -> Array:
                whole = theta.copy()
                whole[free] = values
                return self.residuals(whole)

            solved = least_squares(
                part, theta[free], bounds=(low[free], high[free]), xtol=1e-14, ftol=1e-14, gtol=1e-14
            )
            theta[free] = solved.x
            if 2 * solved.cost < found[1]:
                found = (theta, 2 * float(solved.cost))
        return found

    def _starts(self) -> list[Array]:
        logs = np.log(self.compute)
        return [
            np.array([a, m, b, float(self.y.min()) if self.r0 is None else self.r0])[: self.p]
            for a in (float(self.y.max()) + 0.01, 0.95)
            for m in (logs.mean(), logs.max())
            for b in (0.0, 0.7)
        ]

    def a_interval(self, rise: float) -> tuple[float, float]:
        """Where the sum of squares, minimised over the rest, has risen by `rise`: a scan of A in steps, then bisection.

        1 where it never rises that far."""
        theta, ssr = self.best()
        return self._end(theta, ssr + rise, -1), self._end(theta, ssr + rise, 1)

    def _end(self, theta: Array, threshold: float, sign: int) -> float:
        inner, step = theta[0], 0.0025 * sign
        while True:
            outer = min(inner + step, 1.0)
            moved, f = self.best(outer, [theta])
            if f > threshold:
                break
            if outer == 1.0:
                return 1.0
            theta, inner = moved, outer
        for _ in range(14):
            middle = (inner + outer) / 2
            _, f = self.best(middle, [theta])
            inner, outer = (inner, middle) if f > threshold else (middle, outer)
        return (inner + outer) / 2
