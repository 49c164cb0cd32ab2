"""Comparisons of simulated studies whose truth is known."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.stats import norm
from scipy.stats import t as t_distribution

from scalerl.fitting import InputError, compare, fit
from tests.fitting.simulated import Truth, noisy

COMPUTE = np.linspace(0, 16_000, 41)
Runs = dict[str, tuple[np.ndarray, np.ndarray]]


def study(truths: dict[str, Truth], seed: int = 0) -> Runs:
    return {name: (COMPUTE, noisy(truth, COMPUTE, seed + i)) for i, (name, truth) in enumerate(truths.items())}


def test_one_ceiling_and_other_slopes_are_tied_and_told_apart_by_b():
    slopes = {"slow": 1.3, "middle": 1.9, "steep": 2.6}
    found = compare(study({name: (0.40, 0.61, b, 2500.0) for name, b in slopes.items()}))
    assert [r.tied for r in found.runs] == [True] * 3
    assert found.common_A == pytest.approx(np.mean([r.result.A or 0 for r in found.runs]))
    assert found.common_A == pytest.approx(0.61, abs=0.01)
    for run in found.runs:
        assert run.common is not None and found.common_A == run.common.A
        assert pytest.approx(slopes[run.name], rel=0.1) == run.common.B
    assert found.b_noise is not None and found.b_noise < 0.5
    verdict = found.verdict
    assert verdict.index("steep B") < verdict.index("middle B") < verdict.index("slow B")
    assert "C80" in verdict and "differ beyond their noise" in verdict


def test_b_noise_is_that_of_a_difference_of_the_two_least_certain():
    found = compare(study({name: (0.40, 0.61, 1.9, 2500.0) for name in "abc"}))
    halves = sorted((r.common.B_interval[1] - r.common.B_interval[0]) / 2 for r in found.runs if r.common)  # pyright: ignore
    assert found.b_noise == pytest.approx(np.hypot(halves[1], halves[2]))
    assert "differ within their noise" in found.verdict


def test_equal_recipes_are_not_told_apart():
    found = compare(study({name: (0.40, 0.61, 1.92, 2542.0) for name in "ab"}))
    assert "is not told apart" in found.verdict or "probably" in found.verdict
    assert (found.run_sd, found.run_sd_source, found.margin) == (0.01, "assumed", 0.02)
    assert max(r.probability or 0 for r in found.runs) < 0.95


def test_higher_ceiling_leads():
    found = compare(study({"low": (0.40, 0.56, 1.92, 2542.0), "high": (0.40, 0.66, 1.92, 2542.0)}))
    low, high = found.runs
    assert (low.tied, high.tied, low.common, high.common) == (False, True, None, None)
    assert high.probability is not None and high.probability > 0.99
    assert found.verdict.startswith("at 3.2e+04 high leads:")
    assert f"highest ceiling: high, A {high.result.A:.3f}" in found.verdict
    assert found.b_noise is None


def test_probabilities_sum_to_1_and_follow_from_the_seed():
    runs = study({name: (0.40, a, 1.9, 2500.0) for name, a in (("a", 0.60), ("b", 0.61), ("c", 0.615))})
    first, again, other = (compare(runs, seed=seed) for seed in (3, 3, 4))
    assert sum(r.probability or 0 for r in first.runs) == pytest.approx(1)
    assert [r.probability for r in first.runs] == [r.probability for r in again.runs]
    assert [r.probability for r in first.runs] != [r.probability for r in other.runs]
    assert first.verdict == again.verdict


def test_probability_where_run_to_run_noise_is_all():
    """Then the draws are normal, and the probability of two runs is known."""
    runs = study({"a": (0.40, 0.60, 1.9, 2500.0), "b": (0.40, 0.63, 1.9, 2500.0)})
    found = compare(runs, run_sd=0.1, draws=40_000)
    a, b = found.runs
    assert a.value is not None and b.value is not None
    assert b.probability == pytest.approx(norm.cdf((b.value - a.value) / (0.1 * np.sqrt(2))), abs=0.01)
    assert (found.run_sd, found.run_sd_source) == (0.1, "given")


def test_values_are_the_curves_at_the_target():
    runs = study({"a": (0.40, 0.60, 1.9, 2500.0), "b": (0.40, 0.63, 1.9, 2500.0)})
    found = compare(runs, target=50_000.0)
    assert found.target == 50_000.0 and compare(runs).target == 32_000.0
    for run in found.runs:
        assert (run.value, run.low, run.high) == fit(*runs[run.name]).predict(50_000.0)


def test_run_without_a_fit_is_named_and_has_no_numbers():
    runs = study({"a": (0.40, 0.60, 1.9, 2500.0), "b": (0.40, 0.63, 1.9, 2500.0)})
    falling = COMPUTE > 8000
    runs["gone"] = (COMPUTE, np.where(falling, 0.2, runs["a"][1]))
    runs["short"] = (COMPUTE[:3], runs["a"][1][:3])
    found = compare(runs)
    gone = found.runs[2]
    assert gone.value is gone.probability is gone.common is gone.result.A is None and not gone.tied
    assert "gone gives no fit (collapsed)" in found.verdict and "short gives no fit (too-few-points)" in found.verdict
    assert sum(r.probability or 0 for r in found.runs) == pytest.approx(1)
    alone = compare({name: runs[name] for name in ("gone", "short")})
    assert alone.verdict.startswith("no run gives a usable fit") and alone.common_A is None


def test_open_ceiling_is_no_highest_a():
    early = COMPUTE / 16
    runs = study({"a": (0.40, 0.60, 1.9, 2500.0), "b": (0.40, 0.605, 1.9, 2500.0)})
    runs["early"] = (early, noisy((0.40, 0.61, 1.92, 2542.0), early, 12))
    found = compare(runs, r0=0.4)
    assert found.runs[2].result.A_open == (False, True)
    assert [r.tied for r in found.runs] == [True, True, False]
    assert found.common_A == pytest.approx(0.60, abs=0.01)
    only = compare({name: runs[name] for name in ("a", "early")}, r0=0.4)
    assert "highest ceiling: a, A 0.6" in only.verdict and "early's is open, A at least" in only.verdict


def test_seeds_give_the_margin_the_run_sd_and_a_t_interval():
    truths, arms = {}, {}
    for arm, ceilings in {"base": (0.58, 0.60, 0.62), "new": (0.64, 0.66)}.items():
        for i, a in enumerate(ceilings):
            truths[f"{arm}-{i}"], arms[f"{arm}-{i}"] = (0.40, a, 1.9, 2500.0), arm
    found = compare(study(truths), arms=arms)
    base, new = found.arms
    ceilings = np.array([r.result.A for r in found.runs[:3]], dtype=float)
    values = [np.array([r.value for r in found.runs if arms[r.name] == arm], dtype=float) for arm in ("base", "new")]
    half = t_distribution.ppf(0.975, 2) * ceilings.std(ddof=1) / np.sqrt(3)
    assert (base.name, base.runs, new.runs) == ("base", ("base-0", "base-1", "base-2"), ("new-0", "new-1"))
    assert pytest.approx(ceilings.mean()) == base.A
    assert base.A_interval == pytest.approx((ceilings.mean() - half, ceilings.mean() + half))
    assert base.run_sd == pytest.approx(values[0].std(ddof=1))
    assert found.run_sd_source == "seeds"
    assert found.run_sd == pytest.approx(np.sqrt((2 * values[0].var(ddof=1) + values[1].var(ddof=1)) / 3))
    assert found.margin == pytest.approx(2 * ceilings.std(ddof=1)) and found.margin > 0.03
    given = compare(study(truths), arms=arms, margin=0.005, run_sd=0.02)
    assert (given.margin, given.run_sd, given.run_sd_source) == (0.005, 0.02, "given")


def test_seeds_whose_ceiling_is_not_seen_give_no_mean_and_no_margin():
    early = COMPUTE / 16
    runs = study({f"base-{i}": (0.40, 0.60, 1.9, 2500.0) for i in range(2)})
    runs |= {f"new-{i}": (early, noisy((0.40, 0.64, 1.9, 2500.0), early, 10 + i)) for i in range(2)}
    found = compare(runs, arms={name: name.partition("-")[0] for name in runs}, r0=0.4)
    assert [run.result.A_open for run in found.runs] == [(False, False)] * 2 + [(False, True)] * 2
    base, new = found.arms
    assert (new.A, new.A_interval) == (None, None) and base.A is not None
    assert found.run_sd == pytest.approx(base.run_sd)
    assert found.margin == pytest.approx(max(0.02, 2 * np.std([run.result.A or 0 for run in found.runs[:2]], ddof=1)))
    json.dumps(found.to_dict(), allow_nan=False)


def test_one_seed_an_arm_tells_nothing_about_seeds():
    runs = study({"a": (0.40, 0.60, 1.9, 2500.0), "b": (0.40, 0.63, 1.9, 2500.0)})
    found = compare(runs, arms={"a": "one", "b": "other"})
    assert found.arms == () and found.run_sd_source == "assumed"


def test_records_and_pairs_are_the_same_and_the_result_is_plain():
    @dataclass
    class Run:
        name: str
        compute: np.ndarray
        pass_rate: np.ndarray

    runs = study({"a": (0.40, 0.60, 1.9, 2500.0), "b": (0.40, 0.63, 1.9, 2500.0)})
    found, same = compare(runs), compare([Run(name, *pair) for name, pair in runs.items()])
    assert found.verdict == same.verdict
    row = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [r["name"] for r in row["runs"]] == ["a", "b"] and row["verdict"] == found.verdict
    with pytest.raises(InputError, match="two runs are named 'a'"):
        compare([Run("a", *runs["a"]), Run("a", *runs["b"])])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "grid", "r0": 0.4}, "needs intervals"),
        ({"form": "power"}, "needs intervals"),
        ({"target": -1.0}, "target"),
        ({"arms": {"c": "x"}}, "'c', which is no run"),
    ],
)
def test_wrong_arguments(options: dict, message: str):
    with pytest.raises(InputError, match=message):
        compare(study({"a": (0.40, 0.60, 1.9, 2500.0), "b": (0.40, 0.63, 1.9, 2500.0)}), **options)


def test_one_run_is_no_comparison():
    with pytest.raises(InputError, match="at least two runs"):
        compare(study({"a": (0.40, 0.60, 1.9, 2500.0)}))


def test_seeds_of_one_arm_are_one_recipe_in_the_verdict():
    """Three equal seeds share the draws among them; their recipe's mean leads all the same."""
    truths = {f"new-{i}": (0.40, 0.66, 1.9, 2500.0) for i in range(3)} | {"old": (0.40, 0.58, 1.9, 2500.0)}
    arms = {name: "new" for name in truths if name != "old"}
    found = compare(study(truths), arms=arms, run_sd=0.01)
    assert max(r.probability or 0 for r in found.runs) < 0.7
    (new,) = found.arms
    assert new.probability > 0.99
    assert found.verdict.startswith("at 3.2e+04 new (mean of 3 seeds) leads:")
    assert json.loads(json.dumps(found.to_dict()))["arms"][0]["probability"] == new.probability


def test_only_open_ceilings_tie_nothing():
    early = COMPUTE / 16
    runs = {name: (early, noisy((0.40, 0.61, 1.92, 2542.0), early, seed)) for name, seed in (("a", 12), ("b", 13))}
    found = compare(runs, r0=0.4)
    assert all(r.result.A_open == (False, True) and not r.tied for r in found.runs)
    assert found.common_A is None and "highest ceiling" not in found.verdict
    assert "a's is open, A at least" in found.verdict and "b's is open, A at least" in found.verdict
