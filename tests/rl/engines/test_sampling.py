"""Draws from known distributions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from scalerl.rl.engines.sampling import AUX_STREAM, draw, kept_mask, uniforms
from scalerl.rl.types import Sampling

PROBS = torch.tensor([0.05, 0.4, 0.0, 0.3, 0.25])


def sampling(**settings) -> Sampling:
    return Sampling(temperature=settings.pop("temperature", 1.0), max_tokens=1, stop_ids=(), **settings)


def draw_many(settings: Sampling, size: int = 20_000):
    u, aux = (torch.from_numpy(uniforms(3, 1, 0, size, purpose)) for purpose in (0, AUX_STREAM))
    return draw(PROBS.log().expand(size, -1), u, settings, aux)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.05, 0.4, 0, 0.3, 0.25]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.9}, [0, 0.4 / 0.95, 0, 0.3 / 0.95, 0.25 / 0.95]),
        ({"top_p": 0.5, "return_kept": True}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"temperature": 0.5}, [0.0025 / 0.315, 0.16 / 0.315, 0, 0.09 / 0.315, 0.0625 / 0.315]),
    ],
)
def test_tokens_and_aux_tokens_follow_the_distribution_independently(settings, expected):
    drawn = draw_many(sampling(**settings))
    positive = np.flatnonzero(expected)
    assert drawn.aux is not None
    tokens, aux = drawn.tokens.numpy(), drawn.aux.numpy()
    for taken in (tokens, aux):
        counts = np.bincount(taken, minlength=5)
        assert counts[np.array(expected) == 0].sum() == 0
        assert stats.chisquare(counts[positive], np.array(expected)[positive] * counts.sum()).pvalue > 1e-3
    table = np.histogram2d(tokens, aux, bins=[np.arange(6) - 0.5] * 2)[0][np.ix_(positive, positive)]
    independence: Any = stats.chi2_contingency(table)
    assert independence.pvalue > 1e-3
    entropy = float(stats.entropy(expected))
    torch.testing.assert_close(drawn.entropy, torch.full_like(drawn.entropy, entropy), rtol=0, atol=1e-6)


def test_logprobs_are_renormalised_only_with_kept_sets():
    for kept, normaliser in ((False, 1.0), (True, 0.7)):
        drawn = draw_many(sampling(top_k=2, return_kept=kept), size=100)
        torch.testing.assert_close(drawn.logprobs, (PROBS[drawn.tokens] / normaliser).log(), rtol=0, atol=1e-6)
        assert (drawn.kept is not None) == kept


def test_kept_mask_is_the_smallest_set_and_ties_go_to_the_lower_id():
    logprobs = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]]).log()
    assert kept_mask(logprobs, 0.5, 0).tolist() == [[True, True, False, False], [True, False, False, False]]
    assert kept_mask(logprobs, 1.0, 3).tolist() == [[True, True, True, False]] * 2
    assert kept_mask(logprobs, 1e-9, 0).sum(-1).tolist() == [1, 1]
    assert kept_mask(logprobs, 0.9, 2).sum(-1).tolist() == [2, 2]


@pytest.mark.parametrize("vocab", [31, 50_000])
def test_extreme_uniforms_take_tokens_of_positive_probability(vocab):
    """Rounding leaves a cdf below the largest uniform; the first and last tokens can't be drawn."""
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(0))
    logits[:, 0] = logits[:, -1] = -torch.inf
    for value in (0.0, np.nextafter(1.0, 0.0)):
        drawn = draw(logits, torch.full((8,), value, dtype=torch.float64), sampling(), None)
        assert torch.isfinite(drawn.logprobs).all()
        assert ((drawn.tokens > 0) & (drawn.tokens < vocab - 1)).all()


@pytest.mark.parametrize("vocab", [31, 256, 1000])
def test_draws_by_blocks_invert_the_whole_cdf(vocab):
    logits = torch.randn(500, vocab, generator=torch.Generator().manual_seed(0)) * 4
    u = torch.from_numpy(uniforms(3, 1, 0, 500))
    cdf = logits.double().softmax(-1).cumsum(-1)
    assert draw(logits, u, sampling(), None).tokens.tolist() == (cdf <= u[:, None]).sum(-1).tolist()


def test_tiles_of_rows_change_no_draw(monkeypatch):
    logits = torch.randn(10, 40, generator=torch.Generator().manual_seed(0))
    u, aux = (torch.from_numpy(uniforms(3, 1, 0, 10, purpose)) for purpose in (0, AUX_STREAM))
    settings = sampling(top_p=0.9, return_kept=True)
    whole = draw(logits, u, settings, aux)
    monkeypatch.setattr("scalerl.rl.engines.sampling.TILE", 3 * 40)
    for found, expected in zip(draw(logits, u, settings, aux), whole, strict=True):
        assert found is not None and expected is not None and torch.equal(found, expected)


def test_some_cdf_is_below_the_largest_uniform():
    """The case that the fallback is for does occur."""
    probs = torch.randn(64, 31, generator=torch.Generator().manual_seed(0)).softmax(-1)
    assert (probs.cumsum(-1, dtype=torch.float64)[:, -1] < np.nextafter(1.0, 0.0)).any()


def test_streams_depend_on_each_key_and_prefixes_agree():
    base = uniforms(5, 2, 1, 8)
    assert np.array_equal(base, uniforms(5, 2, 1, 8)) and np.array_equal(base[:3], uniforms(5, 2, 1, 3))
    others = [uniforms(6, 2, 1, 8), uniforms(5, 3, 1, 8), uniforms(5, 2, 2, 8), uniforms(5, 2, 1, 8, AUX_STREAM)]
    everything = np.concatenate([base, *others])
    assert len(np.unique(everything)) == everything.size and (everything >= 0).all() and (everything < 1).all()


def test_logits_without_a_distribution_are_refused():
    for bad in (torch.nan, torch.inf):
        with pytest.raises(FloatingPointError, match="not finite"):
            draw(torch.tensor([[0.0, bad]]), torch.tensor([0.5], dtype=torch.float64), sampling(), None)
