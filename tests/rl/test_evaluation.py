"""Standard errors worked by hand."""

import math

import numpy as np
import pytest

from scalerl.rl.evaluation import standard_errors


def test_standard_errors_by_hand():
    # Two prompts, four samples each: rates 0.25 and 0.75, sd 0.5/sqrt(2).
    stderr, within = standard_errors(np.array([1, 3]), np.array([4, 4]))
    assert stderr == pytest.approx(0.25)
    # sum p(1-p)/(m-1) = 2 * 0.1875 / 3 = 0.125
    assert within == pytest.approx(math.sqrt(0.125) / 2)


def test_no_noise_within_when_every_prompt_is_certain():
    stderr, within = standard_errors(np.array([0, 4]), np.array([4, 4]))
    assert within == 0.0
    assert stderr > 0


def test_one_sample_a_prompt_has_no_error_within():
    assert standard_errors(np.array([0, 1, 1]), np.array([1, 1, 1]))[1] is None


def test_within_is_the_noise_of_repeated_evaluations():
    rng = np.random.default_rng(0)
    p, m = rng.uniform(0.1, 0.9, size=100), 8
    draws = rng.binomial(m, p, size=(4000, 100))
    measured = (draws / m).mean(axis=1).std()
    within = [standard_errors(d, np.full(100, m))[1] for d in draws[:200]]
    predicted = float(np.mean([w for w in within if w is not None]))
    assert predicted == pytest.approx(measured, rel=0.05)
