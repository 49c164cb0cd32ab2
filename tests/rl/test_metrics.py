"""Metrics of micro-batches merge into the step's, whatever the split."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.rl.metrics import Histogram, Max, Mean, Metrics, Variance

KINDS: tuple[Any, ...] = (Mean, Variance, Max, Histogram)


def masked(values, dtype=torch.float64):
    """Values with every third masked, and the mask."""
    mask = torch.arange(len(values)) % 3 != 2
    return torch.tensor(values, dtype=dtype), mask


def test_by_hand():
    values, mask = torch.tensor([1.0, 100.0, 2.0, 6.0]), torch.tensor([True, False, True, True])
    assert Mean.of(values, mask).compute() == 3.0
    assert Variance.of(values, mask).compute() == pytest.approx(14 / 3)  # deviations -2, -1, 3
    assert Max.of(values, mask).compute() == 6.0
    lag = Histogram.of(torch.tensor([0, 7, 2, 0]), mask)
    assert lag.compute() == {0: 2, 2: 1}
    assert Mean.of(values > 1.5, mask).compute() == pytest.approx(2 / 3)


@pytest.mark.parametrize("kind", [Mean, Variance, Max])
def test_nothing_counted_is_none_and_changes_nothing(kind):
    nothing = kind.of(torch.zeros(0), torch.zeros(0, dtype=torch.bool))
    assert nothing.compute() is None
    assert nothing.merge(nothing).compute() is None
    something = kind.of(torch.tensor([-2.0, -4.0]), torch.tensor([True, True]))
    assert nothing.merge(something) == something == something.merge(nothing)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(-50, 50), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=5),
    seed=st.integers(0, 1000),
)
def test_every_split_in_any_order_gives_the_whole(values, cuts, seed):
    tensor, mask = masked(values, torch.int64)
    edges = sorted(min(c, len(values)) for c in [0, *cuts, len(values)])
    parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
    np.random.default_rng(seed).shuffle(parts)
    for kind in KINDS:
        whole, merged = kind.of(tensor, mask), kind.of(tensor[:0], mask[:0])
        for part in parts:
            merged = merged.merge(kind.of(tensor[part], mask[part]))
        assert merged.compute() == pytest.approx(whole.compute(), rel=1e-12, abs=1e-12)


def test_variance_does_not_cancel_on_a_large_mean():
    values, mask = torch.tensor([1e9 + 1, 1e9 + 2, 1e9 + 3, 1e9 + 4], dtype=torch.float64), torch.ones(4) > 0
    halves = Variance.of(values[:1], mask[:1]).merge(Variance.of(values[1:], mask[1:]))
    assert halves.compute() == pytest.approx(1.25)


def test_quantiles_of_a_histogram():
    lag = Histogram.of(torch.tensor([0] * 5 + [3] * 4 + [8]), torch.ones(10) > 0)
    assert [lag.quantile(q) for q in (0.5, 0.51, 0.9, 1.0)] == [0, 3, 3, 8]
    assert Histogram.of(torch.zeros(0), torch.zeros(0) > 0).quantile(0.5) is None


def test_a_collection_merges_name_by_name():
    metrics = Metrics()
    metrics.update({"a": Mean(1.0, 1), "b": Max(2.0)})
    metrics.update({"a": Mean(5.0, 2)})
    assert metrics.compute() == {"a": 2.0, "b": 2.0}
