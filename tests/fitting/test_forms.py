"""Intervals and statuses of the forms other than the sigmoid; their golden values are in test_fit_cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import f as f_distribution

from scalerl.fitting import fit
from scalerl.fitting.result import FitResult

COMPUTE = np.linspace(0, 100_000, 61)[1:]


def power(c: float | np.ndarray) -> np.ndarray:
    return np.asarray(0.7 - 2.0 * np.asarray(c) ** -0.35)


def exponential(c: float | np.ndarray) -> np.ndarray:
    return np.asarray(0.62 - 0.25 * np.exp(-np.asarray(c) / 20_000))


def noisy(curve: Callable, seed: int, sd: float = 0.004) -> np.ndarray:
    return curve(COMPUTE) + sd * np.random.default_rng(seed).standard_normal(len(COMPUTE))


@pytest.mark.parametrize(("form", "curve", "ceiling"), [("power", power, 0.7), ("exponential", exponential, 0.62)])
def test_nominal_intervals_hold_the_truth(form: str, curve: Callable, ceiling: float):
    held_a = held_value = 0
    for seed in range(40):
        found = fit(COMPUTE, noisy(curve, seed), form=form)
        assert found.A_interval is not None
        held_a += found.A_interval[0] <= ceiling <= found.A_interval[1]
        _, low, high = found.predict(200_000.0)
        held_value += low <= curve(200_000.0) <= high
    assert held_a >= 35 and held_value >= 35


def test_interval_of_a_power_law_by_another_route():
    """A held where the interval ends, D and B found by scipy: the sum of squares has risen by the threshold."""
    y = noisy(power, 3)
    found = fit(COMPUTE, y, form="power", autocorrelation=False)
    assert found.A_interval is not None and found.ssr is not None and found.A_open == (False, False)

    def held(b: float, a: float) -> float:
        h = COMPUTE**-b
        r = a - y - max(h @ (a - y) / (h @ h), 0.0) * h
        return float(r @ r)

    dof = len(y) - 3
    expected = found.ssr * (1 + float(f_distribution.ppf(0.95, 1, dof)) / dof)
    for end in found.A_interval:
        least: Any = minimize_scalar(held, bounds=(0.01, 3), args=(end,), method="bounded", options={"xatol": 1e-10})
        assert least.fun == pytest.approx(expected, rel=1e-5)


def test_interval_of_the_entropy_law_is_that_of_a_line():
    entropy = np.linspace(0.9, 0.05, 30)
    y = 0.8 - 0.15 * np.exp(entropy) + 0.004 * np.random.default_rng(4).standard_normal(30)
    found = fit(entropy, y, form="entropy", autocorrelation=False)
    design = np.stack([np.ones(30), np.exp(entropy)], axis=1)
    beta, rss, *_ = np.linalg.lstsq(design, y, rcond=None)
    covariance = np.linalg.inv(design.T @ design) * rss[0] / 28
    for at, (value, low, high) in (
        (0.0, (found.A, *pair(found))),
        (0.3, found.predict(0.3)),
        (0.0, found.predict(0.0)),
    ):
        row = np.array([1.0, np.exp(at)])
        half = np.sqrt(f_distribution.ppf(0.95, 1, 28) * (row @ covariance @ row))
        assert (value, low, high) == pytest.approx((row @ beta, row @ beta - half, row @ beta + half), abs=1e-6)


def pair(found: FitResult) -> tuple[float, float]:
    assert found.A_interval is not None
    return found.A_interval


def test_ceiling_that_the_data_do_not_show_is_open():
    early = fit(COMPUTE[:12], noisy(power, 5)[:12], form="power")
    assert (early.status, early.A_open) == ("asymptote-open", (False, True))
    assert early.A_interval is not None and early.A_interval[1] == 1.0
    assert f"at least {early.A_interval[0]:.3f}" in early.message


def test_an_interval_is_not_that_of_a_steep_basin_alone():
    """Between 510 and 4038 nothing is seen: a step fits best, and a gentle rise to 1 is within the threshold too."""
    compute = np.array([212, 510, 4038, 4072, 4437, 4737.0])
    rate = np.array([0.3949, 0.4099, 0.6079, 0.6008, 0.6058, 0.5966])
    found = fit(compute, rate, r0=0.4)
    assert (found.status, found.A_open) == ("asymptote-open", (False, True))
    assert found.A_interval is not None and found.A_interval[1] >= found.predict(2 * compute.max())[2]


def test_power_law_exponent_has_an_interval_and_others_none():
    found = fit(COMPUTE, noisy(power, 6), form="power")
    assert found.B is not None and found.B_interval is not None and found.B_open == (False, False)
    assert found.B_interval[0] < 0.35 < found.B_interval[1] and found.B_interval[0] < found.B < found.B_interval[1]
    assert fit(COMPUTE, noisy(exponential, 6), form="exponential").B_interval is None


def test_autocorrelation_widens():
    y = noisy(exponential, 7) + 0.004 * np.sin(np.arange(60) / 4)
    wide, iid = (fit(COMPUTE, y, form="exponential", autocorrelation=a) for a in (True, False))
    assert iid.rho == 0.0 and wide.rho is not None and wide.rho > 0.3
    assert np.diff(pair(wide)) > np.diff(pair(iid))


@pytest.mark.parametrize("form", ["power", "exponential"])
def test_statuses_withhold_numbers(form: str):
    falling = fit(COMPUTE, 0.6 - 0.02 * np.log(COMPUTE), form=form)
    assert (falling.status, falling.A, falling.A_interval) == ("decreasing", None, None)
    assert fit(COMPUTE, np.full(60, 0.4), form=form).status == "flat"
    assert fit(COMPUTE[:4], power(COMPUTE[:4]), form=form).status == "too-few-points"
