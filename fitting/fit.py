"""`fit`: one curve, from arrays to a result with its status."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from scalerl.fitting import grid
from scalerl.fitting.errors import InputError
from scalerl.fitting.forms import fit_form
from scalerl.fitting.intervals import c80_ends, parameter_ends, threshold, value_ends
from scalerl.fitting.least_squares import Floats
from scalerl.fitting.result import FitResult
from scalerl.fitting.sigmoid import R0, A, B, M, Sigmoid
from scalerl.fitting.status import OPEN_WIDTH, judge

METHODS = ("continuous", "grid", "paper")
FORMS = ("sigmoid", "power", "exponential", "entropy")


def fit(
    compute: ArrayLike,
    pass_rate: ArrayLike,
    *,
    r0: float | str | None = None,
    window: tuple[float | None, float | None] | None = None,
    method: str = "continuous",
    form: str = "sigmoid",
    fixed_A: float | None = None,
    level: float = 0.95,
    autocorrelation: bool = True,
    a_grid: ArrayLike | None = None,
    c_mid_grid: ArrayLike | None = None,
) -> FitResult:
    """Fit pass rate against compute.

    compute, pass_rate: [n], in order of training; a C = 0 entry is the base evaluation, which informs R0 and never
    enters the curve. r0: a number, "base" (one observation of R0), "first" (fixed at the run's first value, of least
    compute, which the window may leave out), "free", or None: base where there is one, else free (for the grid methods:
    the base or first value, fixed, and cells with A above it). window: (low, high) of
    compute, inclusive, either end None; it never removes the base evaluation. fixed_A holds A. For form="entropy"
    `compute` is the evaluation's entropy. Points that are not finite are left out.

    Raises InputError for arguments that make no fit; curves that give none have a status instead."""
    x, y, base, first = _points(compute, pass_rate, window, form)
    _check(method, form, level, fixed_A)
    if form != "sigmoid":
        return fit_form(form, x, y, level, autocorrelation)
    rule, fixed_r0 = _r0_rule(r0, base, first, method)
    p = 2 + (fixed_r0 is None) + (fixed_A is None)
    n_base = int(rule == "base" and fixed_r0 is None)
    common = {"method": method, "form": form, "r0_rule": rule, "n": len(y), "n_base": n_base, "level": level}
    if (reason := judge(x, y, p)) is not None:
        return FitResult(status=reason[0], message=reason[1], warnings=(reason[1],), **common)
    if method != "continuous":
        assert fixed_r0 is not None
        return _on_grid(x, y, fixed_r0, method, a_grid, c_mid_grid, common)
    problem = Sigmoid.of(x, y, base if n_base else None, fixed_r0, fixed_A)
    return _continuous(problem, p, level, autocorrelation, common)


def _continuous(problem: Sigmoid, p: int, level: float, autocorrelation: bool, common: dict[str, Any]) -> FitResult:
    theta, ssr = problem.solve()
    if theta[A] - theta[R0] <= 1e-9:
        message = f"no curve with A above R0={theta[R0]:.3f} fits; check R0 (--r0)"
        return FitResult(status="decreasing", message=message, warnings=(message,), **common)
    residuals = problem.y - problem.curve(theta, problem.x)
    found = threshold(residuals, ssr, problem.n, p, level, autocorrelation=autocorrelation)
    ends = parameter_ends(problem, theta, ssr, found.rise)
    a_interval, a_open = (float(theta[A]), float(theta[A])), (False, False)
    if A in ends:
        low, high = ends[A].pair()  # with R0 free, low may lie below the estimate of R0, where no ceiling can be
        a_interval, a_open = (max(low, float(theta[R0])), high), ends[A].flags()
    m, b = ends[M], ends[B]
    c_mid_interval = (
        0.0 if m.low_open[0] else _compute_of(m.low[0] + problem.shift),
        np.inf if m.high_open[0] else _compute_of(m.high[0] + problem.shift),
    )
    b_interval = (0.0 if b.low_open[0] else np.exp(b.low[0]), np.inf if b.high_open[0] else np.exp(b.high[0]))
    c80_interval = None
    if problem.fixed_a is not None:
        low, high = c80_ends(problem, theta, ssr, found.rise)
        c80_interval = (_compute_of(low + problem.shift), _compute_of(high + problem.shift))
    status, message = "ok", "ok"
    if A in ends and (a_open[1] or a_interval[1] - a_interval[0] > OPEN_WIDTH):
        status, message = "asymptote-open", _open_message(a_interval, theta, problem)

    return FitResult(
        status=status,
        message=message,
        warnings=() if status == "ok" else (message,),
        A=float(theta[A]),
        B=float(np.exp(theta[B])),
        C_mid=_compute_of(theta[M] + problem.shift),
        R0=float(theta[R0]),
        A_interval=a_interval,
        B_interval=(float(b_interval[0]), float(b_interval[1])),
        C_mid_interval=(float(c_mid_interval[0]), float(c_mid_interval[1])),
        C80_interval=c80_interval,
        A_open=a_open,
        B_open=b.flags(),
        C_mid_open=m.flags(),
        sd=float(np.sqrt(ssr / max(problem.n - p, 1))),
        rho=found.rho,
        ssr=ssr,
        predictor=partial(_predict, problem, theta, ssr, found.rise),
        **common,
    )


def _predict(problem: Sigmoid, theta: Floats, ssr: float, rise: float, c: Floats) -> tuple[Floats, Floats, Floats]:
    at = np.log(c) - problem.shift
    low, high = value_ends(problem, theta, ssr, rise, at)
    value = problem.curve(theta, at)
    return value, np.minimum(low, value), np.maximum(high, value)


_ALL_BUT_FULL = 0.98  # a ceiling above it is no less known for reaching 1


def _open_message(a_interval: tuple[float, float], theta: Floats, problem: Sigmoid) -> str:
    if a_interval[0] >= _ALL_BUT_FULL:
        return f"A is at least {a_interval[0]:.3f}, and can't be told from 1"
    last, middle = problem.x.max() + problem.shift, theta[M] + problem.shift
    further = "2 x C_mid" if middle > last else "twice its compute"
    return (
        f"A is at least {a_interval[0]:.3f}, its ceiling not yet seen; train to about "
        f"{_compute_of(max(middle, last) + np.log(2)):.3g} ({further}) or more"
    )


def _on_grid(
    x: Floats,
    y: Floats,
    r0: float,
    method: str,
    a_grid: ArrayLike | None,
    c_mid_grid: ArrayLike | None,
    common: dict[str, Any],
) -> FitResult:
    a_values = grid.A_GRID if a_grid is None else np.asarray(a_grid, dtype=float)
    c_values = grid.C_MID_GRID if c_mid_grid is None else np.asarray(c_mid_grid, dtype=float)
    a_values = a_values[a_values > r0]
    if not len(a_values):
        raise InputError(f"no A of the grid is above R0={r0:.3f}; give a higher --a-grid")
    cell = (grid.paper if method == "paper" else grid.grid)(x, y, r0, a_values, c_values)
    if not cell.b > 0:
        message = "the best cell of the grid has B <= 0: no rising curve of this grid fits"
        return FitResult(status="decreasing", message=message, warnings=(message,), **common)
    status, message, edge = "ok", "ok", None
    if on_edge := cell.on_edge(a_values, c_values):
        wide_a = np.arange(np.floor(r0 / 0.005) * 0.005 + 0.005, 1.0 + 1e-9, 0.005)
        low, high = max(np.log(x.min()) - np.log(10), -700.0), min(np.log(x.max()) + np.log(10), 700.0)
        wide_c = np.exp(np.linspace(low, high, 2 * len(grid.C_MID_GRID)))
        wider = grid.grid(x, y, r0, wide_a, wide_c)
        edge = {"at": on_edge, "A": wider.a, "B": wider.b, "C_mid": wider.c_mid, "ssr": wider.ssr}
        status = "at-edge"
        message = (
            f"{' and '.join(on_edge)} at the edge of the grid; on a wider one A={wider.a:.3f}, B={wider.b:.2f}, "
            f"C_mid={wider.c_mid:.4g}"
        )

    return FitResult(
        status=status,
        message=message,
        warnings=() if status == "ok" else (message,),
        A=cell.a,
        B=cell.b,
        C_mid=cell.c_mid,
        R0=r0,
        sd=float(np.sqrt(cell.ssr / max(len(y) - 3, 1))),
        ssr=cell.ssr,
        edge=edge,
        predictor=partial(_cell_value, r0, cell),
        **common,
    )


def _cell_value(r0: float, cell: grid.Cell, c: Floats) -> Floats:
    return r0 + (cell.a - r0) / (1 + np.exp(np.clip(cell.b * np.log(cell.c_mid / c), -700, 700)))


def _points(
    compute: ArrayLike, pass_rate: ArrayLike, window: tuple[float | None, float | None] | None, form: str
) -> tuple[Floats, Floats, float | None, float]:
    """(compute > 0 within the window, pass rate, base evaluation, first value), finite, in order of compute. Of several
    base evaluations the last counts; 0 where there is no value at all."""
    x, y = np.asarray(compute, dtype=float).ravel(), np.asarray(pass_rate, dtype=float).ravel()
    if len(x) != len(y):
        raise InputError(f"compute has {len(x)} values and pass_rate {len(y)}; give one of each an evaluation")
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(y) and (y.min() < 0 or y.max() > 1):
        raise InputError(f"pass rates from {y.min():g} to {y.max():g}: they lie in [0, 1]; divide percentages by 100")
    if form == "entropy":
        return x, y, None, 0.0
    if len(x) and x.min() < 0:
        raise InputError(f"compute {x.min():g} is negative")
    at_zero = x == 0
    base = float(y[at_zero][-1]) if at_zero.any() else None
    order = np.argsort(x, kind="stable")
    x, y, at_zero = x[order], y[order], at_zero[order]
    first = base if base is not None else float(y[0]) if len(y) else 0.0
    low, high = window or (None, None)
    inside = ~at_zero & (x >= (low or 0)) & (x <= (np.inf if high is None else high))
    return x[inside], y[inside], base, first


def _r0_rule(r0: float | str | None, base: float | None, first: float, method: str) -> tuple[str, float | None]:
    """(rule, fixed R0 or None where it is fitted)."""
    if r0 is None:
        r0 = ("base" if base is not None else "first") if method != "continuous" else None
        r0 = r0 or ("base" if base is not None else "free")
    if isinstance(r0, str) and r0 not in ("base", "first", "free"):
        raise InputError(f"r0={r0!r}: base, first, free or a number from 0 to below 1")
    if r0 == "base" and base is None:
        raise InputError("r0=base needs a base evaluation (a point at compute 0); use first, free or a number")
    if r0 == "free" and method != "continuous":
        raise InputError(f"method {method} needs a fixed R0; use r0=base, first or a number")
    if r0 == "base":
        return "base", (base if method != "continuous" else None)
    if r0 == "first":
        return "first", first
    if r0 == "free":
        return "free", None
    if not 0 <= float(r0) < 1:
        raise InputError(f"r0={r0}: a pass rate from 0 to below 1")
    return "fixed", float(r0)


def _check(method: str, form: str, level: float, fixed_a: float | None) -> None:
    if method not in METHODS:
        raise InputError(f"method={method}: one of {', '.join(METHODS)}")
    if form not in FORMS:
        raise InputError(f"form={form}: one of {', '.join(FORMS)}")
    if form != "sigmoid" and method != "continuous":
        raise InputError(f"method={method} fits form=sigmoid only")
    if not 0 < level < 1:
        raise InputError(f"level={level}: between 0 and 1, for example 0.95")
    if fixed_a is not None and not 0 < fixed_a <= 1:
        raise InputError(f"fixed_A={fixed_a}: above 0 and at most 1")
    if fixed_a is not None and (method != "continuous" or form != "sigmoid"):
        raise InputError("fixed_A goes with method=continuous and form=sigmoid")


def _compute_of(log: float) -> float:
    return float(np.exp(np.clip(log, -700.0, 700.0)))
