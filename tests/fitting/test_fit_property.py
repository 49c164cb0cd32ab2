"""No arrays make `fit` print what cannot be, warn, or fail otherwise than with InputError."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.fitting import InputError, backtest, compare, fit
from scalerl.fitting.result import WITH_PARAMETERS, FitResult
from tests.fitting.simulated import sigmoid

COMPUTE = st.one_of(
    st.floats(0, 1e5),
    st.floats(1e-300, 1e300),
    st.sampled_from([0.0, 1.0, 1e-300, 1e25, 5e-324, 1.7e308, math.nan, math.inf]),
)
RATES = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 0.5, 0.5, math.nan, math.inf]))
R0_RULES = st.sampled_from([None, "base", "first", "free", 0.0, 0.4, 0.99])
OPTIONS = st.fixed_dictionaries(
    {"r0": R0_RULES},
    optional={
        "method": st.sampled_from(["continuous", "grid"]),
        "form": st.sampled_from(["sigmoid", "sigmoid", "power", "exponential", "entropy"]),
        "window": st.tuples(st.none() | st.floats(0, 1e4), st.none() | st.floats(1e2, 1e6)),
        "level": st.floats(0.01, 0.999),
        "autocorrelation": st.booleans(),
        "fixed_A": st.none() | st.floats(0.01, 1),
    },
)


@st.composite
def odd_points(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    n = draw(st.integers(0, 24))
    return draw(st.lists(COMPUTE, min_size=n, max_size=n)), draw(st.lists(RATES, min_size=n, max_size=n))


@st.composite
def curves(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Sigmoids, steps, falls and constants with noise, cut to [0, 1], in any unit, some with a base evaluation."""
    n = draw(st.integers(1, 30))
    compute = np.sort(np.array(draw(st.lists(st.floats(1, 1e5), min_size=n, max_size=n))))
    r0, a = draw(st.floats(0, 1)), draw(st.floats(0, 1))
    truth = (r0, a, draw(st.floats(0.05, 50)), draw(st.floats(1, 1e6)))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    y = sigmoid(truth, compute) + draw(st.sampled_from([0.0, 1e-9, 0.003, 0.1])) * rng.standard_normal(n)
    y = np.clip(np.round(y, draw(st.sampled_from([1, 3, 17]))), 0, 1)
    compute = compute * draw(st.sampled_from([1.0, 1e-200, 1e25, 1e200]))
    return (np.append(0.0, compute), np.append(r0, y)) if draw(st.booleans()) else (compute, y)


def plausible(found: FitResult) -> None:
    row = json.loads(json.dumps(finite(found.to_dict()), allow_nan=False))
    assert row["status"] == found.status
    if found.A is None:
        assert found.status not in WITH_PARAMETERS and found.B is found.C_mid is found.R0 is None
        assert found.A_interval is None
        return
    assert found.status in WITH_PARAMETERS
    if found.form != "sigmoid":
        assert found.B is None or found.B > 0
        return
    assert found.B is not None and found.C_mid is not None and found.R0 is not None
    assert found.B > 0 and found.C_mid > 0 and 0 <= found.R0 <= found.A <= 1
    intervals = ((found.A_interval, found.A), (found.B_interval, found.B), (found.C_mid_interval, found.C_mid))
    for interval, value in intervals:
        assert interval is None or interval[0] <= value <= interval[1]
    if found.A_interval is not None:
        for c in (found.C_mid, 1.0, 1e300, 1e-300):
            value, low, high = found.predict(c)
            assert 0 <= low <= value <= high <= 1


def finite(value: Any) -> Any:
    """Infinities to None; a NaN stays and fails."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and math.isinf(value) else value


@settings(max_examples=250, deadline=None)
@given(odd_points(), OPTIONS)
def test_odd_points(points: tuple[list[float], list[float]], options: dict[str, Any]):
    check(*points, options)


@settings(max_examples=250, deadline=None)
@given(curves(), OPTIONS)
def test_odd_curves(points: tuple[np.ndarray, np.ndarray], options: dict[str, Any]):
    check(*points, options)


def check(compute: Any, pass_rate: Any, options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            found = fit(compute, pass_rate, **options)
        except InputError as error:
            assert str(error) and "\n" not in str(error)
            return
        plausible(found)


@settings(max_examples=60, deadline=None)
@given(st.lists(curves() | odd_points(), min_size=2, max_size=4), R0_RULES)
def test_odd_studies(points: list[tuple[Any, Any]], r0: Any):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            found = compare({f"run{i}": p for i, p in enumerate(points)}, draws=200, r0=r0)
        except InputError:
            return
        json.dumps(finite(found.to_dict()), allow_nan=False)
        shares = [r.probability for r in found.runs if r.probability is not None]
        assert not shares or math.isclose(sum(shares), 1)
        assert found.verdict and "nan" not in found.verdict


@settings(max_examples=60, deadline=None)
@given(curves() | odd_points(), OPTIONS)
def test_odd_backtests(points: tuple[Any, Any], options: dict[str, Any]):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            found = backtest(*points, **options)
        except InputError:
            return
        json.dumps(finite(found.to_dict()), allow_nan=False)
        assert found.mae is None or found.mae >= 0
