"""Backtests of simulated curves."""

from __future__ import annotations

import json

import numpy as np
import pytest

from scalerl.fitting import InputError, backtest, fit
from tests.fitting.simulated import SCALERL, noisy, sigmoid

COMPUTE = np.linspace(0, 30_000, 76)


def test_errors_are_those_of_the_fit_of_the_first_half():
    y = noisy(SCALERL, COMPUTE, 1)
    found = backtest(COMPUTE, y)
    first, later = fit(COMPUTE, y, window=(None, 15_000)), COMPUTE > 15_000
    predicted = np.array([first.predict(c) for c in COMPUTE[later]])
    errors = predicted[:, 0] - y[later]
    slack = 2 * (first.sd or 0)
    inside = (predicted[:, 1] - slack <= y[later]) & (y[later] <= predicted[:, 2] + slack)
    assert (found.cut, found.n, found.fitted.n, found.fitted.n_base) == (15_000, later.sum(), 37, 1)
    assert found.mae == pytest.approx(np.abs(errors).mean()) and found.bias == pytest.approx(errors.mean())
    assert found.coverage == pytest.approx(inside.mean())


def test_first_half_of_a_sigmoid_predicts_the_rest():
    found = [backtest(COMPUTE, noisy(SCALERL, COMPUTE, seed)) for seed in range(10)]
    assert np.mean([b.mae or 1.0 for b in found]) < 0.004  # noise of sd 0.0024 alone gives 0.0019
    assert np.mean([b.coverage or 0.0 for b in found]) > 0.9


def test_another_curve_than_the_first_half_promised_is_seen():
    y = sigmoid(SCALERL, COMPUTE)
    y[COMPUTE > 15_000] += 0.05
    found = backtest(COMPUTE, y)
    assert found.mae == pytest.approx(0.05, abs=1e-3) and found.bias == pytest.approx(-0.05, abs=1e-3)
    assert found.coverage == 0


def test_fraction_window_and_rows_that_are_no_points():
    y = noisy(SCALERL, COMPUTE, 2)
    y[-1] = np.nan
    found = backtest(COMPUTE, y, fraction=0.7, window=(1000.0, 20_000.0), r0=0.4)
    assert found.cut == pytest.approx(14_000) and found.fitted.r0_rule == "fixed"
    assert found.n == ((COMPUTE > 14_000) & (COMPUTE <= 20_000)).sum()
    assert found.fitted.n == ((COMPUTE >= 1000) & (COMPUTE <= 14_000)).sum()


def test_grid_methods_have_no_coverage():
    found = backtest(COMPUTE, noisy(SCALERL, COMPUTE, 3), method="grid")
    assert found.coverage is None and found.mae is not None and found.mae < 0.01
    assert "inside" not in str(found)


def test_no_fit_of_the_first_part_gives_no_numbers():
    found = backtest(COMPUTE, noisy(SCALERL, COMPUTE, 4), fraction=0.04)
    assert found.fitted.status == "too-few-points"
    assert found.mae is found.bias is found.coverage is None
    assert "no fit (too-few-points)" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["status"] == "too-few-points"


def test_wrong_arguments():
    y = noisy(SCALERL, COMPUTE, 5)
    with pytest.raises(InputError, match="fraction"):
        backtest(COMPUTE, y, fraction=1.0)
    with pytest.raises(InputError, match="beyond the cut"):
        backtest([0.0], [0.4])


def test_predictions_are_of_the_points_beyond():
    y = noisy(SCALERL, COMPUTE, 6)
    found = backtest(COMPUTE, y)
    later = COMPUTE > 15_000
    assert [p.C for p in found.predictions] == COMPUTE[later].tolist()
    assert [p.pass_rate for p in found.predictions] == y[later].tolist()
    assert [(p.value, p.low, p.high) for p in found.predictions] == [found.fitted.predict(c) for c in COMPUTE[later]]
    row = json.loads(json.dumps(found.to_dict()))
    assert row["predictions"][0].keys() == {"C", "pass_rate", "value", "low", "high"}
    on_grid = backtest(COMPUTE, y, method="grid").predictions[0]
    assert on_grid.low is on_grid.high is None


def test_entropy_law_has_no_compute_to_cut():
    with pytest.raises(InputError, match="entropy law"):
        backtest(np.linspace(0.6, 0.1, 20), np.linspace(0.4, 0.5, 20), form="entropy")
