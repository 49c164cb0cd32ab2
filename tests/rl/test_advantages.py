"""Rewards, advantages and the zero-variance test, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scalerl.rl.advantages import advantages, has_variance
from scalerl.rl.rewards import rewards

# Three prompts of four: one right in four; three right in four; two right and one masked.
REWARDS = np.array([1, -1, -1, -1, 1, 1, 1, -1, 1, 1, -1, -1], dtype=float)
PROMPT = np.repeat(np.arange(3), 4)
VALID = np.array([True] * 11 + [False])
CENTRED = np.array([1.5, -0.5, -0.5, -0.5, 0.5, 0.5, 0.5, -1.5, 2 / 3, 2 / 3, -4 / 3, 0])


def test_none_only_centres_on_the_unmasked_mean():
    assert advantages(REWARDS, PROMPT, VALID, "none") == pytest.approx(CENTRED)


def test_prompt_divides_by_the_groups_population_std():
    """Variances of the three: 1 - 0.5^2 = 3/4, 3/4 and, over three rewards, 1 - (1/3)^2 = 8/9."""
    a = advantages(REWARDS, PROMPT, VALID, "prompt")
    assert a[:4] == pytest.approx([math.sqrt(3)] + [-1 / math.sqrt(3)] * 3)
    assert a[8:] == pytest.approx([1 / math.sqrt(2), 1 / math.sqrt(2), -math.sqrt(2), 0])


def test_batch_divides_by_the_std_of_a_over_the_surviving_completions():
    """sum A^2 = 3 + 3 + 24/9 over 11 completions: one number a completion, the masked one not counted."""
    std = math.sqrt((3 + 3 + 24 / 9) / 11)
    assert advantages(REWARDS, PROMPT, VALID, "batch") == pytest.approx(CENTRED / std)


def test_dropped_prompts_are_outside_the_batch_std_and_kept_ones_inside():
    """One prompt at (1, -1): A = +-1. A second, all right, has A = 0; kept it halves the variance."""
    reward, prompt = np.array([1.0, -1, 1, 1]), np.array([0, 0, 1, 1])
    dropped = advantages(reward, prompt, np.array([True, True, False, False]), "batch")
    kept = advantages(reward, prompt, np.ones(4, dtype=bool), "batch")
    assert dropped == pytest.approx([1, -1, 0, 0])
    assert kept == pytest.approx([math.sqrt(2), -math.sqrt(2), 0, 0])


@pytest.mark.parametrize("norm", ["prompt", "batch"])
def test_a_std_below_one_thousandth_gives_zero(norm):
    prompt, valid = np.zeros(2, dtype=int), np.ones(2, dtype=bool)
    assert advantages(np.array([1.0, 1 - 1.9e-3]), prompt, valid, norm).tolist() == [0, 0]  # std 0.95e-3
    assert advantages(np.array([1.0, 1 - 2.1e-3]), prompt, valid, norm) == pytest.approx([1, -1])  # std 1.05e-3


@pytest.mark.parametrize("norm", ["prompt", "batch", "none"])
def test_nothing_valid_gives_zeros(norm):
    assert advantages(REWARDS, PROMPT, np.zeros(12, dtype=bool), norm).tolist() == [0] * 12


def test_zero_variance_looks_at_unmasked_rewards_only():
    reward, prompt = np.array([1.0, 1, -1, 1, -1, 1, 1]), np.array([0, 0, 0, 1, 1, 2, 3])
    valid = np.array([True, True, False, True, True, True, False])
    assert has_variance(reward, prompt, valid).tolist() == [False, True, False, False]


def test_rewards_are_plus_and_minus_one(make_recipe):
    assert rewards(np.array([True, False]), np.array([5, 5]), make_recipe()).tolist() == [1, -1]


def test_the_penalty_touches_correct_completions_only(make_recipe):
    """L_max 100, L_cache 20: nothing up to 80, half at 90, all of it at 100 and beyond."""
    recipe = make_recipe(length_control="penalty", penalty={"max_length": 100, "cache_length": 20})
    lengths = np.array([10, 80, 90, 100, 200, 90])
    correct = np.array([True] * 5 + [False])
    assert rewards(correct, lengths, recipe).tolist() == [1, 1, 0.5, 0, 0, -1]
