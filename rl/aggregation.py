"""Aggregation of token terms as one weight a token, divided by global counts: the sum over all is the objective.

Weights are computed over the whole batch before it is split, so no micro-batch or rank can have a mean of its own."""

from __future__ import annotations

import numpy as np


def token_weights(n_tokens: np.ndarray, prompt: np.ndarray, how: str) -> np.ndarray:
    """float64 [n]: the weight of each unmasked token of completion i; 0 for a completion without any.

    n_tokens: int [n], unmasked tokens of each surviving completion (0: it does not survive). prompt: int [n].
    `prompt`: (1/P') sum over prompts of the prompt's token mean (DAPO's inside a prompt; ScaleRL, 3.2). `sample`: mean
    over completions of the completion's token mean (GRPO). `token`: mean over all tokens (DAPO, arXiv 2503.14476).
    P' counts prompts with an unmasked token.

    By hand: one prompt with completions of 1 and 3 tokens, another with one of 4. `prompt`: 1/(2*4) each;
    `sample`: 1/3, 1/9, 1/12; `token`: 1/8 each."""
    present = n_tokens > 0
    if not present.any():
        return np.zeros(len(n_tokens))
    tokens_of_prompt = np.bincount(prompt, weights=n_tokens)
    if how == "prompt":
        weight = 1.0 / (np.count_nonzero(tokens_of_prompt) * np.maximum(tokens_of_prompt[prompt], 1))
    elif how == "sample":
        weight = 1.0 / (np.count_nonzero(present) * np.maximum(n_tokens, 1))
    else:
        weight = np.full(len(n_tokens), 1.0 / n_tokens.sum())
    return np.where(present, weight, 0.0)
