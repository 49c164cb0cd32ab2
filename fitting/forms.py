"""Other curve forms: power law, exponential, entropy law. All are R = A - D h(x), where h falls to 0 as the ceiling
A <= 1 is neared and has one parameter of shape or none: for a given shape A and D > 0 are a linear problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from scalerl.fitting.errors import InputError
from scalerl.fitting.intervals import Ends, find_ends, threshold
from scalerl.fitting.least_squares import Floats
from scalerl.fitting.result import FitResult
from scalerl.fitting.status import OPEN_WIDTH, TREND_P, judge, trend

_NODES, _ZOOM_NODES, _ZOOMS = 200, 21, 6  # of the search over the shape, on a log scale
_LOG_SHAPES = {"power": (np.log(1e-4), np.log(50.0)), "exponential": (np.log(1e-3), np.log(1e3)), "entropy": (0.0, 0.0)}
_MAX_ENTROPY = 50.0  # nats a token; a vocabulary of a million words has at most 14
_MAX_EXPONENT = 300.0
_FAR = 14.0  # ln of the factor beyond the last compute at which any exponential has long been at its ceiling
_LEAST_GAIN = 1e-9


@dataclass(frozen=True)
class Form:
    """One form's data. x: compute, or entropy for the entropy law [n]; y: pass rates [n]."""

    name: str
    x: Floats
    y: Floats

    def basis(self, log_shape: Floats, x: Floats) -> Floats:
        """h [S, n] at x [n] for shapes [S]; at most 1 within the data."""
        shape = np.exp(log_shape)[:, None]
        if self.name == "power":
            exponent = shape * (np.log(self.x.min()) - np.log(x))
        elif self.name == "exponential":
            least = self.x.min() / self.x.max()
            exponent = shape * (least - np.exp(np.minimum(np.log(x) - np.log(self.x.max()), _FAR)))
        else:
            return np.expm1(np.minimum(x, _MAX_EXPONENT))[None] / np.expm1(self.x.max())
        return np.exp(np.clip(exponent, -_MAX_EXPONENT, _MAX_EXPONENT))

    def linear(self, log_shape: Floats) -> tuple[Floats, Floats, Floats]:
        """(A, D, sum of squares) [S] with A <= 1 and D >= 0."""
        h = self.basis(log_shape, self.x)
        spread = h - h.mean(axis=1, keepdims=True)
        d = np.maximum(-spread @ self.y / np.maximum(np.einsum("sn,sn->s", spread, spread), 1e-300), 0.0)
        a = self.y.mean() + d * h.mean(axis=1)
        capped = np.maximum(h @ (1 - self.y) / np.maximum(np.einsum("sn,sn->s", h, h), 1e-300), 0.0)
        a, d = np.where(a > 1, 1.0, a), np.where(a > 1, capped, d)
        r = a[:, None] - d[:, None] * h - self.y
        return a, d, np.einsum("sn,sn->s", r, r)

    def pinned(self, log_shape: Floats, value: float, x: float | None) -> Floats:
        """Sums of squares [S] with the curve held at `value` where x is, or at its ceiling for None."""
        h = self.basis(log_shape, self.x)
        h0 = np.zeros((len(h), 1)) if x is None else self.basis(log_shape, np.array([x]))
        away = h - h0
        d = away @ (value - self.y) / np.maximum(np.einsum("sn,sn->s", away, away), 1e-300)
        most = np.divide(1 - value, h0[:, 0], out=np.full(len(h), np.inf), where=h0[:, 0] > 1e-100)  # A = value + D h0
        d = np.clip(d, 0.0, most)
        r = value - d[:, None] * away - self.y
        return np.einsum("sn,sn->s", r, r)

    def best(self, sums: Callable[[Floats], Floats]) -> tuple[float, float]:
        """(ln shape, least sum of squares): a table, then ever finer ones about its best node."""
        low, high = _LOG_SHAPES[self.name]
        nodes = np.linspace(low, high, _NODES) if low < high else np.array([low])
        for _ in range(_ZOOMS if low < high else 0):
            i = int(np.argmin(sums(nodes)))
            nodes = np.linspace(nodes[max(i - 1, 0)], nodes[min(i + 1, len(nodes) - 1)], _ZOOM_NODES)
        found = sums(nodes)
        i = int(np.argmin(found))
        return float(nodes[i]), float(found[i])

    def value(self, a: float, d: float, log_shape: float, x: float) -> float:
        return float(a - d * self.basis(np.array([log_shape]), np.array([x]))[0, 0])

    def extra(self, a: float, d: float, log_shape: float) -> dict[str, float]:
        """The form's own parameters by the names of its formula."""
        shape, least = np.exp(log_shape), self.x.min()
        if self.name == "power":
            return {"log_D": float(np.log(d) + shape * np.log(least))}
        if self.name == "exponential":
            rate = shape / self.x.max()
            return {"D": float(d * np.exp(min(least * rate, _MAX_EXPONENT))), "tau": float(1 / rate)}
        slope = d / np.expm1(self.x.max())
        return {"a": float(slope), "b": float(a + slope)}


def fit_form(name: str, x: Floats, y: Floats, level: float, autocorrelation: bool) -> FitResult:
    """Power law R = A - D / C^B (ScaleRL, arXiv 2510.13786, A.4; extra: log_D), exponential R = A - D exp(-C / tau)
    (D, tau), or entropy law R = -a exp(H) + b with its ceiling b - a at H = 0 (arXiv 2505.22617; a, b).

    x: compute > 0 in ascending order, or entropies H in nats in order of training. Raises InputError for entropies
    that are none."""
    common: dict[str, Any] = {"method": "continuous", "form": name, "r0_rule": "none", "n_base": 0}
    common |= {"n": len(y), "level": level}
    p = 2 if name == "entropy" else 3
    if name == "entropy" and len(x) and not 0 <= x.min() <= x.max() <= _MAX_ENTROPY:
        raise InputError(f"entropies from {x.min():g} to {x.max():g}: nats a token lie from 0 to {_MAX_ENTROPY:g}")
    if (reason := _judge(name, x, y, p)) is not None:
        return FitResult(status=reason[0], message=reason[1], warnings=(reason[1],), **common)
    problem = Form(name, x, y)
    log_shape, ssr = problem.best(lambda s: problem.linear(s)[2])
    a, d = (float(part[0]) for part in problem.linear(np.array([log_shape]))[:2])
    if d <= _LEAST_GAIN:
        message = f"no rising {name} curve fits"
        return FitResult(status="decreasing", message=message, warnings=(message,), **common)
    residuals = y - (a - d * problem.basis(np.array([log_shape]), x)[0])
    found = threshold(residuals, ssr, len(y), p, level, autocorrelation=autocorrelation)
    ends = _value_ends(problem, a, None, ssr, found.rise)
    interval, is_open = ends.pair(), ends.flags()
    status, message = "ok", "ok"
    if is_open[1] or interval[1] - interval[0] > OPEN_WIDTH:
        status = "asymptote-open"
        message = f"A is at least {interval[0]:.3f}, its ceiling not yet seen; train for longer"
    shape: dict[str, Any] = {}
    if name == "power":
        b = _shape_ends(problem, log_shape, ssr, found.rise)
        low, high = (float(np.exp(end)) for end in b.pair())
        flags = b.flags()
        shape = {"B": float(np.exp(log_shape)), "B_open": flags}
        shape["B_interval"] = (0.0 if flags[0] else low, np.inf if flags[1] else high)
    return FitResult(
        status=status,
        message=message,
        warnings=() if status == "ok" else (message,),
        A=a,
        A_interval=interval,
        A_open=is_open,
        sd=float(np.sqrt(ssr / (len(y) - p))),
        rho=found.rho,
        ssr=ssr,
        extra=problem.extra(a, d, log_shape),
        predictor=partial(_predict, problem, a, d, log_shape, ssr, found.rise),
        **shape,
        **common,
    )


def _judge(name: str, x: Floats, y: Floats, p: int) -> tuple[str, str] | None:
    """As for all curves; the entropy law has no time, so a collapse is nothing to it."""
    if name != "entropy":
        return judge(x, y, p)
    reason = judge(np.arange(1.0, len(y) + 1), y, p)
    if reason is not None and reason[0] == "too-few-points":
        return reason
    if np.ptp(x) < 1e-9:
        return "flat", f"the entropy does not change: range {np.ptp(x):.3f}"
    slope, p_value = trend(-x, y)
    if p_value > TREND_P:
        return "flat", f"pass rate does not rise as the entropy falls: range {np.ptp(y):.3f}, trend p = {p_value:.2f}"
    return ("decreasing", "pass rate falls with the entropy") if slope < 0 else None


def _predict(
    problem: Form, a: float, d: float, log_shape: float, ssr: float, rise: float, x: Floats
) -> tuple[Floats, Floats, Floats]:
    value = np.array([problem.value(a, d, log_shape, at) for at in x.tolist()])
    pairs = [_value_ends(problem, v, at, ssr, rise).pair() for v, at in zip(value.tolist(), x.tolist(), strict=True)]
    low, high = np.array(pairs).T
    return value, np.minimum(low, value), np.maximum(high, value)


def _value_ends(problem: Form, value: float, x: float | None, ssr: float, rise: float) -> Ends:
    """Of the curve at x, or of its ceiling."""

    def profile(values: Floats, start: Floats) -> tuple[Floats, Floats]:
        sums = [problem.best(lambda s: problem.pinned(s, v, x))[1] for v in values.tolist()]  # noqa: B023
        return start, np.array(sums)

    lowest = 0.0 if x is None else min(value, 0.0) - 1.0
    limits = (np.array([lowest]), np.array([1.0]))
    return find_ends(profile, np.array([value]), np.zeros(1), np.array([1e-3]), limits, ssr, rise)


def _shape_ends(problem: Form, log_shape: float, ssr: float, rise: float) -> Ends:
    def profile(values: Floats, start: Floats) -> tuple[Floats, Floats]:
        return start, problem.linear(values)[2]

    limits = tuple(np.array([end]) for end in _LOG_SHAPES[problem.name])
    return find_ends(profile, np.array([log_shape]), np.zeros(1), np.array([0.05]), (limits[0], limits[1]), ssr, rise)
