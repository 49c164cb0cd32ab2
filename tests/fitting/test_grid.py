"""The fast grid search on data sets where many cells are nearly as good as the best."""

from __future__ import annotations

import numpy as np
import pytest

from scalerl.fitting import fit, grid
from tests.fitting.simulated import SCALERL, ar1, noisy, sigmoid


def near_ties(seed: int) -> tuple[np.ndarray, np.ndarray, float]:
    """The ceiling lies beyond the data, so that A, B and C_mid trade off along a valley."""
    rng = np.random.default_rng(seed)
    truth = (0.38, rng.uniform(0.6, 0.75), rng.uniform(1, 2), rng.uniform(12_000, 30_000))
    compute = np.linspace(0, 30_000, 37)[1:]
    return compute, sigmoid(truth, compute) + 0.0035 * ar1(rng, 36, 0.5 * (seed % 2)), 0.38


def test_polishing_every_cell_finds_no_better_one(monkeypatch: pytest.MonkeyPatch):
    found = [grid.grid(*near_ties(seed)) for seed in range(50)]
    monkeypatch.setattr(grid, "_POLISHED", len(grid.A_GRID) * len(grid.C_MID_GRID))
    assert found == [pytest.approx(grid.grid(*near_ties(seed))) for seed in range(50)]


def test_the_cell_is_the_least_of_its_row_and_column():
    compute, y, r0 = near_ties(1)
    cell = grid.grid(compute, y, r0)
    for a in grid.A_GRID:
        assert grid.grid(compute, y, r0, np.array([a]), np.array([cell.c_mid])).ssr >= cell.ssr * (1 - 1e-12)
    for c_mid in grid.C_MID_GRID:
        assert grid.grid(compute, y, r0, np.array([cell.a]), np.array([c_mid])).ssr >= cell.ssr * (1 - 1e-12)


def test_first_value_is_the_runs_even_where_the_window_leaves_it_out():
    compute = np.linspace(0, 8000, 41)[1:]
    y = noisy(SCALERL, compute, 1)
    found = fit(compute, y, method="grid", window=(2000.0, None))
    assert (found.R0, found.r0_rule, found.n) == (y[0], "first", 31)
    based = fit(np.append(0.0, compute), np.append(0.41, y), method="grid", window=(2000.0, None))
    assert (based.R0, based.r0_rule, based.n_base) == (0.41, "base", 0)


@pytest.mark.parametrize("unit", [1e-6, 1e20])
def test_wider_grid_follows_the_unit_of_compute(unit: float):
    compute = np.linspace(0, 12_000, 41)[1:] * unit
    y = noisy((0.40, 0.61, 1.92, 2542.0), compute / unit, 2)
    found = fit(compute, y, r0=0.4, method="grid")
    assert found.status == "at-edge" and found.edge is not None
    assert found.edge["A"] == pytest.approx(0.61, abs=0.01)
    assert found.edge["C_mid"] == pytest.approx(2542 * unit, rel=0.1)
