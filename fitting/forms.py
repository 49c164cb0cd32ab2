"""Other curve forms: power law, exponential, and the entropy law. Points only; none has intervals of its own here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scalerl.fitting.least_squares import Floats


@dataclass(frozen=True)
class Curve:
    """ceiling: the form's A. extra: its own parameters by name. value: the curve at x."""

    ceiling: float
    extra: dict[str, float]
    ssr: float
    value: Callable[[float], float]


def power(compute: Floats, y: Floats) -> Curve:
    """R = A - D / C^B with A <= 1, D > 0, B > 0 (ScaleRL, arXiv 2510.13786, A.4)."""
    scale = float(np.exp(np.log(compute).mean()))
    relative = compute / scale
    a, b, d, ssr = _shape(lambda b: relative**-b, y, np.log(1e-4), np.log(50.0))
    return Curve(
        a,
        {"B": b, "log_D": float(np.log(d) + b * np.log(scale)) if d > 0 else -np.inf},
        ssr,
        lambda c: a - d * (c / scale) ** -b,
    )


def exponential(compute: Floats, y: Floats) -> Curve:
    """R = A - D exp(-C / tau) with A <= 1, D > 0."""
    scale = float(compute.max())
    relative = compute / scale
    a, rate, d, ssr = _shape(lambda rate: np.exp(-relative * rate), y, np.log(1e-3), np.log(1e3))
    return Curve(a, {"D": d, "tau": scale / rate}, ssr, lambda c: a - d * float(np.exp(-c / scale * rate)))


def entropy_law(entropy: Floats, y: Floats) -> Curve:
    """R = -a exp(H) + b, ceiling b - a at H = 0 ("The Entropy Mechanism of RL for Reasoning LMs", arXiv 2505.22617)."""
    design = np.stack([-np.exp(entropy), np.ones_like(entropy)], axis=1)
    (a, b), *_ = np.linalg.lstsq(design, y, rcond=None)
    r = design @ np.array([a, b]) - y
    return Curve(float(b - a), {"a": float(a), "b": float(b)}, float(r @ r), lambda h: float(b - a * np.exp(h)))


def _shape(basis: Callable[[float], Floats], y: Floats, low: float, high: float) -> tuple[float, float, float, float]:
    """(A, shape, D, ssr) of y = A - D basis(shape) with A <= 1 and D >= 0: linear but for one parameter, which is
    searched on a log scale and polished from its best nodes."""

    def linear(log_shape: float) -> tuple[float, float, float]:
        h = basis(float(np.exp(log_shape)))
        spread = h - h.mean()
        d = max(0.0, -float(spread @ y) / max(float(spread @ spread), 1e-300))
        a = float(y.mean() + d * h.mean())
        if a > 1:
            a, d = 1.0, max(0.0, float(h @ (1 - y) / max(float(h @ h), 1e-300)))
        r = a - d * h - y
        return a, d, float(r @ r)

    nodes = np.linspace(low, high, 200)
    sums = np.array([linear(node)[2] for node in nodes])
    best = _golden(lambda s: linear(s)[2], nodes, sums)
    a, d, ssr = linear(best)
    return a, float(np.exp(best)), d, ssr


def _golden(f: Callable[[float], float], nodes: Floats, values: Floats) -> float:
    """The least point beside the best nodes, by golden section."""
    i = int(np.argmin(values))
    low, high = nodes[max(0, i - 1)], nodes[min(len(nodes) - 1, i + 1)]
    golden = (np.sqrt(5) - 1) / 2
    for _ in range(60):
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if f(left) < f(right) else (left, high)
    return float((low + high) / 2)
