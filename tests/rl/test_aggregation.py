"""Aggregation weights against the three definitions, written out as loops."""

from __future__ import annotations

import numpy as np
import pytest

from scalerl.rl.aggregation import token_weights

HOW = ("prompt", "sample", "token")


def aggregate(terms, prompt, how):
    """The definition: terms[i] are the unmasked tokens' terms of completion i."""
    present = [i for i, t in enumerate(terms) if len(t)]
    if how == "sample":
        return np.mean([np.mean(terms[i]) for i in present])
    if how == "token":
        return np.mean(np.concatenate([terms[i] for i in present]))
    prompts = sorted({prompt[i] for i in present})
    return np.mean([np.mean(np.concatenate([terms[i] for i in present if prompt[i] == p])) for p in prompts])


def test_by_hand():
    """Prompt 0 has completions of 1 and 3 tokens, prompt 1 has one of 4 and one without any, prompt 2 has none."""
    n, prompt = np.array([1, 3, 4, 0, 0]), np.array([0, 0, 1, 1, 2])
    assert token_weights(n, prompt, "prompt") == pytest.approx([1 / 8, 1 / 8, 1 / 8, 0, 0])
    assert token_weights(n, prompt, "sample") == pytest.approx([1 / 3, 1 / 9, 1 / 12, 0, 0])
    assert token_weights(n, prompt, "token") == pytest.approx([1 / 8, 1 / 8, 1 / 8, 0, 0])
    uneven = np.array([1, 3, 8, 0, 0])
    assert token_weights(uneven, prompt, "prompt") == pytest.approx([1 / 8, 1 / 8, 1 / 16, 0, 0])
    assert token_weights(uneven, prompt, "token") == pytest.approx([1 / 12] * 3 + [0, 0])


@pytest.mark.parametrize("how", HOW)
def test_equals_the_definition_on_ragged_batches(how):
    rng = np.random.default_rng(0)
    for _ in range(30):
        n = rng.integers(0, 6, size=12) * rng.integers(0, 2, size=12)
        n[3] += 1  # something to train
        prompt = np.repeat(np.arange(4), 3)
        terms = [rng.normal(size=k) for k in n]
        weights = token_weights(n, prompt, how)
        found = sum(w * t.sum() for w, t in zip(weights, terms, strict=True))
        assert found == pytest.approx(aggregate(terms, prompt, how), abs=1e-12)
        assert (weights[n == 0] == 0).all()


@pytest.mark.parametrize("how", HOW)
def test_nothing_to_train_has_no_weight(how):
    assert token_weights(np.zeros(3, dtype=int), np.arange(3), how).tolist() == [0, 0, 0]
