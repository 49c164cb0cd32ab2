"""The published grid search of ScaleRL (arXiv 2510.13786, A.5), to the letter (`paper`) and fast (`grid`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import curve_fit

from scalerl.fitting.least_squares import Floats

A_GRID = np.round(np.arange(0.450, 0.800 + 1e-9, 0.005), 3)
C_MID_GRID = np.linspace(100.0, 40000.0, 100)
_B_NODES, _POLISHED = 160, 64  # fewer (40 and 32) miss the optimum in some data sets
_NEWTON_STEPS = 8
_LOG_B = np.linspace(np.log(0.02), np.log(60.0), _B_NODES)


@dataclass(frozen=True)
class Cell:
    """The winning cell and its B (which may be negative: a status, no result)."""

    a: float
    c_mid: float
    b: float
    ssr: float

    def on_edge(self, a_grid: Floats, c_mid_grid: Floats) -> list[str]:
        """Which parameters stand at an end of their grid."""
        return [
            name
            for name, value, grid in (("A", self.a, a_grid), ("C_mid", self.c_mid, c_mid_grid))
            if value in (grid[0], grid[-1])
        ]


def paper(compute: Floats, y: Floats, r0: float, a_grid: Floats = A_GRID, c_mid_grid: Floats = C_MID_GRID) -> Cell:
    """For every cell scipy's `curve_fit` of B from its default start; the least residual sum wins."""
    best = Cell(np.nan, np.nan, np.nan, np.inf)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for a in a_grid:
            for c_mid in c_mid_grid:
                curve = _curve_of_b(r0, a, c_mid)
                try:
                    (b,), _ = curve_fit(curve, compute, y)
                except (RuntimeError, ValueError):
                    continue
                ssr = float(np.sum((curve(compute, b) - y) ** 2))
                if ssr < best.ssr:
                    best = Cell(float(a), float(c_mid), float(b), ssr)
    return best


def _curve_of_b(r0: float, a: float, c_mid: float) -> Callable[[Floats, float], Floats]:
    """Eq. (1) of (C, B). `curve_fit` takes every further argument for a parameter, even one with a default."""

    def curve(c: Floats, b: float) -> Floats:
        return r0 + (a - r0) / (1 + (c_mid / c) ** b)

    return curve


def grid(compute: Floats, y: Floats, r0: float, a_grid: Floats = A_GRID, c_mid_grid: Floats = C_MID_GRID) -> Cell:
    """The same winner at once. g = expit(B (ln C - ln C_mid)) depends on neither A nor the data and the residual sum is
    quadratic in A, so one (C_mid x ln B) table serves all A; the best cells are then polished in B."""
    x, rise, log_c_mid = np.log(compute), y - r0, np.log(c_mid_grid)
    g = _expit(np.exp(_LOG_B)[None, :, None] * (x - log_c_mid[:, None, None]))
    gg, gy = np.einsum("cbn,cbn->cb", g, g), g @ rise
    d = (a_grid - r0)[:, None, None]
    table = d * gg
    table -= 2 * gy
    table *= d  # [A, C_mid, B], the residual sum but for its constant
    nodes = table.argmin(axis=2)
    least = _between_nodes(table, nodes)
    count = min(_POLISHED, least.size)
    chosen = np.argpartition(least, count - 1, axis=None)[:count]
    i, j = np.unravel_index(chosen, least.shape)
    log_b, ssr = _polish(x, rise, a_grid[i] - r0, log_c_mid[j], nodes[i, j])
    win = int(np.lexsort((chosen, ssr))[0])  # of equal sums the first cell, as a loop would keep it
    return Cell(float(a_grid[i[win]]), float(c_mid_grid[j[win]]), float(np.exp(log_b[win])), float(ssr[win]))


def _between_nodes(table: Floats, node: NDArray[np.intp]) -> Floats:
    """The least value of each cell [A, C_mid], on the parabola through the best node and its neighbours: the nodes'
    own least values, off by up to half a step, would rank the cells wrongly."""
    inner = np.clip(node, 1, _B_NODES - 2)
    before, at, after = (np.take_along_axis(table, (inner + s)[..., None], axis=2)[..., 0] for s in (-1, 0, 1))
    bend = before - 2 * at + after
    usable = (inner == node) & (bend > 0)
    drop = np.divide((before - after) ** 2, 8 * bend, out=np.zeros_like(bend), where=usable)
    return np.take_along_axis(table, node[..., None], axis=2)[..., 0] - drop


def _polish(x: Floats, rise: Floats, d: Floats, log_c_mid: Floats, node: NDArray[np.intp]) -> tuple[Floats, Floats]:
    """ln B, by Newton's method between the nodes beside the best, and the residual sum of K cells; [K] each."""
    distance = x - log_c_mid[:, None]
    low, high = _LOG_B[np.maximum(node - 1, 0)], _LOG_B[np.minimum(node + 1, _B_NODES - 1)]
    log_b, tiny = _LOG_B[node], np.finfo(float).tiny
    for _ in range(_NEWTON_STEPS):
        z = np.exp(log_b)[:, None] * distance
        g = _expit(z.copy())
        r, slope = d[:, None] * g - rise, d[:, None] * g * (1 - g) * z
        bend = slope * (1 + (1 - 2 * g) * z)
        first = np.einsum("kn,kn->k", r, slope)
        second = np.einsum("kn,kn->k", slope, slope) + np.einsum("kn,kn->k", r, bend)
        step = np.where(second > tiny, first / np.maximum(second, tiny), np.sign(first))
        log_b = np.clip(log_b - step, low, high)
    r = d[:, None] * _expit(np.exp(log_b)[:, None] * distance) - rise
    return log_b, np.einsum("kn,kn->k", r, r)


def _expit(z: Floats) -> Floats:
    """In place; numpy's tanh is several times as fast as scipy's expit."""
    z *= 0.5
    np.tanh(z, out=z)
    z += 1
    z *= 0.5
    return z
