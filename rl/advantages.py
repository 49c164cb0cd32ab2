"""Advantages and the zero-variance filter, over the whole batch, in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

MIN_STD = 1e-3  # below it A = 0: tiny differences are not blown up (arXiv 2510.01555, App. J)


def has_variance(rewards: np.ndarray, prompt: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """bool [P]: whether the valid completions of each prompt have more than one final reward.

    rewards: [n]; prompt: int [n] in 0..P-1; valid: bool [n], completions with an unmasked token."""
    return _by_prompt(lambda r: len(r) > 0 and float(np.ptp(r)) > 0, rewards, prompt, valid).astype(bool)


def advantages(rewards: np.ndarray, prompt: np.ndarray, valid: np.ndarray, norm: str) -> np.ndarray:
    """A_i = r_i - mean of its prompt's valid rewards, float64 [n]; 0 where not valid.

    `prompt`: divided by the std of that prompt's valid rewards (GRPO, arXiv 2402.03300). `batch`: divided by the std of
    A over all valid completions, one number a completion, without a second centring (ScaleRL, 3.2). `none`: as is
    (arXiv 2503.20783). Population stds. Pass as valid only what survives filtering.

    By hand: rewards (1, -1, -1, -1) -> A = (1.5, -0.5, -0.5, -0.5); std sqrt(0.75), so `prompt` gives
    (sqrt(3), -1/sqrt(3), ...)."""
    means = _by_prompt(np.mean, rewards, prompt, valid)
    centred = np.where(valid, rewards - means[prompt], 0.0)
    if norm == "none" or not valid.any():
        return centred
    if norm == "batch":
        std = np.full(len(rewards), np.std(centred[valid]))
    else:
        std = _by_prompt(np.std, rewards, prompt, valid)[prompt]
    return np.where(std < MIN_STD, 0.0, centred / np.maximum(std, MIN_STD))


def _by_prompt(
    reduce: Callable[[np.ndarray], float], values: np.ndarray, prompt: np.ndarray, valid: np.ndarray
) -> np.ndarray:
    """reduce over each prompt's valid values; 0 for a prompt without any."""
    n = int(prompt.max()) + 1 if len(prompt) else 0
    chosen = [values[(prompt == p) & valid] for p in range(n)]
    return np.array([reduce(v) if len(v) else 0.0 for v in chosen])
