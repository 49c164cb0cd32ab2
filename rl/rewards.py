"""Rewards: +1 correct, -1 otherwise, less the length penalty where the recipe has one."""

from __future__ import annotations

import numpy as np

from scalerl.rl.recipe import Recipe


def rewards(correct: np.ndarray, lengths: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Final rewards, float64 [n], of completions with `lengths` tokens (injected ones included).

    Under `length_control=penalty` a correct completion's reward gets clip((L_max - |y|) / L_cache - 1, -1, 0) added
    (ScaleRL, arXiv 2510.13786, A.10; DAPO's soft overlong punishment)."""
    values = np.where(correct, 1.0, -1.0)
    if recipe.length_control == "penalty":
        slack = (recipe.penalty.max_length - lengths) / recipe.penalty.cache_length - 1
        values = values + np.where(correct, np.clip(slack, -1.0, 0.0), 0.0)
    return values
