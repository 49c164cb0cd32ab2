"""Curves of the kinds that people bring, against an independent fit, and the rules of `fit`."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest
from scipy.stats import f as f_distribution

from scalerl.fitting import InputError, fit, grid
from scalerl.fitting.result import FitResult
from tests.fitting.simulated import SCALERL, TABLE_1, Reference, Truth, ar1, noisy, sigmoid

STEPS = np.arange(100, 4001, 100) * 1.5  # 40 evaluations of a run to 6,000 GPU-hours


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def like_reference(found: FitResult, reference: Reference) -> None:
    theta, ssr = reference.best()
    assert pytest.approx(theta[0], abs=5e-4) == found.A
    assert pytest.approx(np.exp(theta[2]), abs=0.01) == found.B
    assert found.C_mid == pytest.approx(np.exp(theta[1]), rel=5e-3)
    assert found.ssr == pytest.approx(ssr, rel=1e-4)
    assert pytest.approx(reference.r0 if reference.r0 is not None else theta[3], abs=1e-3) == found.R0


def plain_interval(reference: Reference, ssr: float) -> tuple[float, float]:
    dof = reference.n - reference.p
    return reference.a_interval(ssr * float(f_distribution.ppf(0.95, 1, dof)) / dof)


def rows_of(found: FitResult) -> dict[str, Any]:
    """to_dict as a strict reader gets it."""
    return json.loads(json.dumps(found.to_dict(), default=str))


@pytest.mark.parametrize(
    ("truth", "compute", "seed"),
    [
        (SCALERL, STEPS, 1),
        ((0.40, 0.602, 2.0, 3200.0), STEPS[1::2], 2),  # the shorter run of a chart export
        ((0.40, 0.61, 1.92, 2542.0), np.arange(100, 3001, 100) * 1.5, 3),
    ],
)
def test_ordinary_curves_with_r0_given(truth: Truth, compute: np.ndarray, seed: int):
    y = noisy(truth, compute, seed)
    found = fit(compute, y, r0=0.40, autocorrelation=False)
    reference = Reference(compute, y, 0.40)
    like_reference(found, reference)
    assert found.A_interval == pytest.approx(plain_interval(reference, found.ssr or 0.0), abs=5e-4)
    assert (found.status, found.A_open, found.warnings) == ("ok", (False, False), ())
    assert (found.n, found.n_base, found.r0_rule, found.rho) == (len(y), 0, "fixed", 0.0)


def test_order_of_rows_does_not_matter():
    y = noisy(SCALERL, STEPS, 4)
    shuffled = np.random.default_rng(0).permutation(len(y))
    a, b = fit(STEPS, y, r0=0.4), fit(STEPS[shuffled], y[shuffled], r0=0.4)
    assert (a.A, a.A_interval) == (b.A, b.A_interval)


def test_dead_branch_left_in_the_middle_opens_the_ceiling():
    compute = STEPS[:30]
    y = noisy(SCALERL, compute, 5)
    y[15:19] -= 0.06
    found = fit(compute, y, r0=0.4)
    like_reference(found, Reference(compute, y, 0.4))
    assert (found.status, found.A_open) == ("asymptote-open", (False, True))
    assert found.A_interval is not None and found.A_interval[1] == 1.0
    assert "at least" in found.message


@pytest.mark.parametrize(("n", "r0", "needed"), [(3, 0.4, 5), (4, 0.4, 5), (5, "free", 6), (0, None, 6)])
def test_too_few_points(n: int, r0: Any, needed: int):
    found = fit(STEPS[:n], noisy(SCALERL, STEPS, 6)[:n], r0=r0)
    assert found.status == "too-few-points"
    assert found.message == f"need at least {needed} points in the window (have {n})"
    withheld(found)


def withheld(found: FitResult) -> None:
    assert found.A is found.B is found.C_mid is found.R0 is found.C80 is None
    assert found.A_interval is found.B_interval is found.C_mid_interval is None
    assert found.warnings == (found.message,)
    with pytest.raises(ValueError, match=found.status):
        found.predict(1000.0)


def test_constant_is_flat():
    found = fit(STEPS[:16], np.full(16, 0.412))
    assert found.status == "flat"
    assert found.message.startswith("pass rate does not rise: range 0.000")
    withheld(found)


def test_noise_without_a_trend_is_flat():
    found = fit(STEPS, 0.4 + 0.003 * np.random.default_rng(3).standard_normal(len(STEPS)))
    assert found.status == "flat"
    withheld(found)


def test_significant_fall_is_decreasing():
    found = fit(STEPS, 0.5 - 0.02 * np.log(STEPS / STEPS[0]))
    assert (found.status, "falls" in found.message) == ("decreasing", True)
    withheld(found)


def collapsing(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rises to 6,000, then falls to 0.18."""
    compute = np.arange(1, 41) * 250.0
    y = noisy((0.40, 0.60, 1.9, 2300.0), compute, seed)
    after = compute > 6000
    y[after] -= np.minimum((compute[after] - 6000) * 2e-4, y[after] - 0.18)
    return compute, y


def test_collapse_names_the_highest_point():
    compute, y = collapsing(7)
    found = fit(compute, y, r0=0.4)
    top = compute[np.argmax(y)]
    assert found.status == "collapsed"
    assert f"use --fit-max {top:g}" in found.message and f"({y.max():.2f} at {top:g})" in found.message
    withheld(found)
    rising = compute <= top
    before = fit(compute, y, r0=0.4, window=(None, top))
    assert (before.status, before.n) == ("ok", rising.sum())
    like_reference(before, Reference(compute[rising], y[rising], 0.4))


def test_a_dip_at_the_end_within_the_noise_is_no_collapse():
    y = noisy(SCALERL, STEPS, 8)
    y[-1] -= 0.03
    assert fit(STEPS, y, r0=0.4).status == "ok"


def test_base_evaluation_informs_r0_and_is_no_point():
    compute, y = np.append(0.0, STEPS), np.append(0.4013, noisy(SCALERL, STEPS, 9))
    found = fit(compute, y)
    like_reference(found, Reference(STEPS, y[1:], None, base=0.4013))
    assert (found.r0_rule, found.n, found.n_base) == ("base", 40, 1)
    first = fit(compute, y, r0="first")
    like_reference(first, Reference(STEPS, y[1:], 0.4013))
    assert (first.r0_rule, first.R0, first.n, first.n_base) == ("first", 0.4013, 40, 0)
    free = fit(compute, y, r0="free")
    like_reference(free, Reference(STEPS, y[1:], None))
    assert (free.r0_rule, free.n_base) == ("free", 0)
    assert width(free) > width(found) > width(first)


def width(found: FitResult) -> float:
    assert found.A_interval is not None
    return found.A_interval[1] - found.A_interval[0]


def test_r0_rules_without_a_base_evaluation():
    y = noisy(SCALERL, STEPS, 10)
    assert fit(STEPS, y).r0_rule == "free"
    first = fit(STEPS, y, r0="first")
    assert (first.r0_rule, first.R0) == ("first", y[0])
    on_grid = fit(STEPS, y, method="grid")
    assert (on_grid.r0_rule, on_grid.R0) == ("first", y[0])
    with pytest.raises(InputError, match="base evaluation"):
        fit(STEPS, y, r0="base")
    with pytest.raises(InputError, match="fixed R0"):
        fit(STEPS, y, r0="free", method="grid")


def test_r0_far_above_the_data_prints_no_curve():
    found = fit(STEPS, noisy(SCALERL, STEPS, 11), r0=0.9)
    assert (found.status, "R0=0.900" in found.message) == ("decreasing", True)
    withheld(found)


def test_before_the_midpoint_the_ceiling_is_open():
    compute = np.linspace(50, 1200, 23)
    found = fit(compute, noisy(SCALERL, compute, 12), r0=0.4)
    assert found.status == "asymptote-open"
    assert found.A_interval is not None and found.A_open is not None
    assert found.A_interval[0] <= SCALERL[1] <= found.A_interval[1] == 1.0 and found.A_open[1]
    assert f"at least {found.A_interval[0]:.3f}" in found.message and "2 x C_mid" in found.message


def test_values_that_are_not_finite_are_left_out():
    y = noisy(SCALERL, STEPS, 13)
    spoilt, compute = y.copy(), STEPS.copy()
    spoilt[[3, 8]], compute[20] = (np.nan, np.inf), np.nan
    good = np.isfinite(spoilt) & np.isfinite(compute)
    a, b = fit(compute, spoilt, r0=0.4), fit(STEPS[good], y[good], r0=0.4)
    assert (a.n, a.A, a.A_interval) == (37, b.A, b.A_interval)


def test_window_is_inclusive_and_keeps_the_base_evaluation():
    compute, y = np.append(0.0, STEPS), np.append(0.4, noisy(SCALERL, STEPS, 14))
    found = fit(compute, y, window=(STEPS[4], STEPS[33]))
    assert (found.n, found.n_base, found.r0_rule) == (30, 1, "base")
    inner = fit(np.append(0.0, STEPS[4:34]), np.append(0.4, y[5:35]))
    assert (found.A, found.B, found.A_interval) == (inner.A, inner.B, inner.A_interval)
    assert fit(compute, y, window=(None, STEPS[33])).n == 34
    assert fit(compute, y, window=(STEPS[4], None)).n == 36


@pytest.mark.parametrize("unit", [1.0, 1e-6, 3600.0, 1e12, 1e25])
def test_table_1_is_recovered_in_any_unit(unit: float):
    for truth in TABLE_1:
        compute = np.geomspace(500, 50_000, 30)
        found = fit(compute * unit, sigmoid(truth, compute))
        r0, a, b, c_mid = truth
        assert found.status == "ok"
        assert pytest.approx(a, rel=5e-5) == found.A and pytest.approx(r0, rel=5e-5) == found.R0
        assert pytest.approx(b, rel=5e-5) == found.B and found.C_mid == pytest.approx(c_mid * unit, rel=5e-5)
        value, low, high = found.predict(2e5 * unit)
        assert low == pytest.approx(value, abs=1e-6) and high == pytest.approx(value, abs=1e-6)


def test_fixed_ceiling():
    y = noisy(SCALERL, STEPS, 15)
    found = fit(STEPS, y, r0=0.4, fixed_A=0.61)
    assert (found.A, found.A_interval, found.A_open) == (0.61, (0.61, 0.61), (False, False))
    theta, ssr = Reference(STEPS, y, 0.4).best(fixed_a=0.61)
    assert pytest.approx(np.exp(theta[2]), rel=1e-3) == found.B and found.ssr == pytest.approx(ssr, rel=1e-6)
    free = fit(STEPS, y, r0=0.4)
    assert found.B_interval is not None and free.B_interval is not None
    assert np.diff(found.B_interval) < np.diff(free.B_interval)
    assert fit(STEPS[:4], y[:4], r0=0.4, fixed_A=0.61).status == "too-few-points"


def test_higher_level_is_wider():
    y = noisy(SCALERL, STEPS, 16)
    widths = [width(fit(STEPS, y, level=level)) for level in (0.68, 0.95, 0.99)]
    assert widths[0] < widths[1] < widths[2]


def test_autocorrelated_noise_widens_by_the_formula():
    compute = np.linspace(0, 20_000, 61)[1:]
    y = noisy(SCALERL, compute, 17, sd=0.0035, rho=0.6, decimals=None)
    found, iid = fit(compute, y, r0=0.4), fit(compute, y, r0=0.4, autocorrelation=False)
    assert found.A == iid.A and width(found) > 1.2 * width(iid) and found.rho is not None
    reference = Reference(compute, y, 0.4)
    theta, ssr = reference.best()
    r = reference.residuals(theta)
    n, p = len(y), 3
    rho = min(max(float(r[1:] @ r[:-1] / (r @ r)) + 4 / n, 0), 0.9)
    k = (1 + rho) / (1 - rho)
    assert found.rho == pytest.approx(rho, abs=1e-3)
    rise = ssr * float(f_distribution.ppf(0.95, 1, max(2, n / k - p))) * k / (n - p)
    assert found.A_interval == pytest.approx(reference.a_interval(rise), abs=5e-4)
    assert found.sd == pytest.approx(np.sqrt(ssr / (n - p)), rel=1e-4)


def test_prediction_holds_the_truth_and_widens_away_from_the_data():
    compute, held = np.linspace(0, 12_000, 61), 0
    for seed in range(20):
        found = fit(compute, noisy(SCALERL, compute, seed))
        widths = []
        for c in (3000.0, 24_000.0, 200_000.0):
            value, low, high = found.predict(c)
            assert low <= value <= high
            widths.append(high - low)
            held += low <= sigmoid(SCALERL, np.array([c]))[0] <= high
        assert widths[0] < widths[1] < widths[2] <= width(found) * 1.001
    assert held >= 52  # 57 of 60 nominally


@pytest.mark.parametrize("last", [3000.0, 6000.0, 16_000.0])
def test_far_beyond_the_data_the_prediction_becomes_the_ceiling(last: float):
    """The interval of the curve goes over into that of A, smoothly, whether A's upper end is open or not."""
    compute = np.linspace(0, last, 31)
    found = fit(compute, noisy(SCALERL, compute, 18))
    value, low, high = found.predict(np.geomspace(last, 1e12, 40))
    assert found.A is not None and found.A_interval is not None
    assert (value[-1], low[-1], high[-1]) == pytest.approx((found.A, *found.A_interval), abs=1e-3)
    assert (np.diff(value) >= 0).all() and (np.diff(low) >= -1e-5).all() and (np.diff(high) >= -1e-5).all()


def test_predictions_of_several_are_those_of_each():
    compute = np.linspace(0, 6000, 31)
    found, at = fit(compute, noisy(SCALERL, compute, 18)), np.array([[500.0, 4000.0], [12_000.0, 1e5]])
    together = found.predict(at)
    assert all(part.shape == (2, 2) for part in together)
    for i in np.ndindex(2, 2):
        assert [part[i] for part in together] == pytest.approx(found.predict(float(at[i])), abs=1e-5)
    on_grid = fit(compute, noisy(SCALERL, compute, 18), method="grid").predict(at)
    assert on_grid.shape == (2, 2) and (np.diff(on_grid.ravel()) > 0).all()


def test_predict_refuses_what_is_no_compute():
    found = fit(STEPS, noisy(SCALERL, STEPS, 19))
    for c in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="positive"):
            found.predict(c)


def random_set(seed: int) -> tuple[np.ndarray, np.ndarray, float]:
    rng = np.random.default_rng(seed)
    n = (75, 36, 17)[seed % 3]
    truth = (rng.uniform(0.3, 0.42), rng.uniform(0.5, 0.75), rng.uniform(1, 2.5), rng.uniform(1500, 15_000))
    compute = np.linspace(0, rng.uniform(10_000, 100_000), n + 1)[1:]
    return compute, sigmoid(truth, compute) + 0.0035 * ar1(rng, n, 0.5 * (seed % 2)), truth[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_grid_finds_the_cell_of_the_published_search(seed: int):
    compute, y, r0 = random_set(seed)
    fast, slow = grid.grid(compute, y, r0), grid.paper(compute, y, r0)
    assert (fast.a, fast.c_mid) == (slow.a, slow.c_mid)
    assert fast.b == pytest.approx(slow.b, rel=1e-4) and fast.ssr == pytest.approx(slow.ssr, rel=1e-6)


def test_grid_finds_the_cell_of_the_published_search_on_a_small_grid():
    a_grid, c_mid_grid = np.arange(0.5, 0.75, 0.025), np.linspace(1000, 20_000, 12)
    for seed in range(3):
        compute, y, r0 = random_set(seed)
        found = {m: fit(compute, y, r0=r0, method=m, a_grid=a_grid, c_mid_grid=c_mid_grid) for m in ("grid", "paper")}
        fast, slow = found["grid"], found["paper"]
        assert (fast.A, fast.C_mid, fast.status) == (slow.A, slow.C_mid, slow.status)
        assert pytest.approx(slow.B, rel=1e-4) == fast.B
        assert fast.A_interval is None and isinstance(fast.predict(1e5), float)


def test_edge_of_the_grid_is_said_and_refitted():
    truth = (0.40, 0.90, 1.5, 3000.0)
    compute = np.linspace(0, 60_000, 41)[1:]
    found = fit(compute, noisy(truth, compute, 20), r0=0.4, method="grid")
    assert (found.status, found.A) == ("at-edge", 0.8)
    assert found.edge is not None and "A" in found.edge["at"]
    assert found.edge["A"] == pytest.approx(0.90, abs=0.01) and found.edge["C_mid"] == pytest.approx(3000, rel=0.05)
    assert f"A={found.edge['A']:.3f}" in found.message


def test_grid_with_a_best_cell_that_falls_gives_no_numbers():
    """Rising data wholly below the grid's lowest A and R0: the best published cell has B < 0."""
    compute = np.linspace(0, 6000, 31)[1:]
    y = noisy((0.1, 0.3, 1.9, 2500.0), compute, 21)
    for method in ("grid", "paper"):
        found = fit(compute, y, r0=0.44, method=method, a_grid=[0.45, 0.5], c_mid_grid=np.linspace(100, 4000, 5))
        assert found.B is None or found.B > 0
        assert found.A is None or (found.R0 is not None and found.A >= found.R0)
    assert found.status == "decreasing"  # of `paper`
    withheld(found)


def test_grid_needs_a_ceiling_above_r0():
    with pytest.raises(InputError, match="--a-grid"):
        fit(STEPS, noisy(SCALERL, STEPS, 22), r0=0.85, method="grid")


@pytest.mark.parametrize(("window", "a"), [((1.5e3, 5e4), 1.000), ((5e3, 5e4), 0.738), ((3e4, 6e4), 0.648)])
def test_power_law_golden_values(window: tuple[float, float], a: float):
    compute = np.linspace(0, 100_000, 76)[1:]
    found = fit(compute, sigmoid((0.40, 0.645, 1.70, 10909.0), compute), form="power", window=window)
    assert pytest.approx(a, abs=1e-3) == found.A


@pytest.mark.parametrize("unit", [1.0, 1e21])
def test_power_law_is_recovered(unit: float):
    compute = np.geomspace(100, 1e5, 25) * unit
    found = fit(compute, 0.7 - 2.0 * (compute / unit) ** -0.5, form="power")
    assert (pytest.approx(0.7, abs=1e-6), pytest.approx(0.5, rel=1e-5)) == (found.A, found.B)
    assert found.extra["log_D"] == pytest.approx(np.log(2.0) + 0.5 * np.log(unit), abs=1e-4)
    assert found.predict(4e4 * unit) == pytest.approx((0.69, 0.69, 0.69), abs=1e-6)


def test_exponential_is_recovered():
    compute = np.linspace(100, 9000, 30)
    found = fit(compute, 0.62 - 0.25 * np.exp(-compute / 2000), form="exponential")
    assert pytest.approx(0.62, abs=1e-6) == found.A
    assert found.extra == {"D": pytest.approx(0.25, rel=1e-5), "tau": pytest.approx(2000, rel=1e-5)}


def test_entropy_law_is_recovered():
    entropy = np.linspace(0.6, 0.02, 20)
    found = fit(entropy, -0.15 * np.exp(entropy) + 0.8, form="entropy")
    assert pytest.approx(0.65, abs=1e-9) == found.A
    assert found.extra == {"a": pytest.approx(0.15, rel=1e-6), "b": pytest.approx(0.8, rel=1e-6)}
    assert found.predict(0.3) == pytest.approx((-0.15 * np.exp(0.3) + 0.8,) * 3, abs=1e-6)


def test_entropy_law_without_a_law():
    entropy = np.linspace(0.6, 0.02, 20)
    assert fit(entropy, 0.4 + 0.1 * entropy, form="entropy").status == "decreasing"
    assert fit(entropy, 0.4 + 0.01 * (-1.0) ** np.arange(20), form="entropy").status == "flat"
    assert fit(np.full(20, 0.3), np.linspace(0.4, 0.5, 20), form="entropy").status == "flat"
    assert fit(entropy[:4], np.linspace(0.4, 0.5, 4), form="entropy").status == "too-few-points"
    with pytest.raises(InputError, match="nats"):
        fit(entropy * 100, np.linspace(0.4, 0.5, 20), form="entropy")


def test_status_order():
    """A short collapsed curve is too short first; a collapsed one without a trend is collapsed first."""
    compute, y = collapsing(23)
    assert fit(compute[22:26], y[22:26], r0=0.4).status == "too-few-points"
    assert fit(compute, y, r0=0.4, method="grid").status == "collapsed"
    symmetric = 0.5 - 0.2 * np.abs(np.linspace(-1, 1, 21))
    assert fit(np.geomspace(10, 1000, 21), symmetric).status == "collapsed"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "best"}, "continuous, grid, paper"),
        ({"form": "line"}, "sigmoid, power"),
        ({"form": "power", "method": "grid"}, "form=sigmoid"),
        ({"level": 1.0}, "level"),
        ({"fixed_A": 1.5}, "fixed_A"),
        ({"fixed_A": 0.6, "method": "grid", "r0": 0.4}, "fixed_A"),
        ({"r0": 1.2}, "r0"),
        ({"r0": "last"}, "base, first, free"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        fit(STEPS, noisy(SCALERL, STEPS, 24), **options)


def test_wrong_data():
    y = noisy(SCALERL, STEPS, 25)
    with pytest.raises(InputError, match="divide percentages"):
        fit(STEPS, 100 * y)
    with pytest.raises(InputError, match="negative"):
        fit(-STEPS, y)
    with pytest.raises(InputError, match="40 values and pass_rate 39"):
        fit(STEPS, y[1:])


def test_compute_at_which_80_percent_is_reached():
    found = fit(STEPS, noisy(SCALERL, STEPS, 26), r0=0.4)
    assert found.C80 is not None and found.A is not None and found.R0 is not None
    value, _, _ = found.predict(found.C80)
    assert value == pytest.approx(found.R0 + 0.8 * (found.A - found.R0), rel=1e-9)


def test_to_dict_is_plain():
    row = rows_of(fit(STEPS, noisy(SCALERL, STEPS, 27)))
    assert row["status"] == "ok" and row["C80"] > row["C_mid"] and len(row["A_interval"]) == 2
    assert "predictor" not in row
