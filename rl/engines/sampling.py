"""Drawing tokens from logits: truncation, inverse CDF, log-probabilities, and the streams of uniforms behind them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from scalerl.rl.types import Sampling

TOKEN_STREAM, AUX_STREAM = 0, 1


class Drawn(NamedTuple):
    """One draw a row. tokens: int64 [n]; logprobs, entropy (nats): float32 [n]; aux: int64 [n] or None;
    kept: bool [n, V] or None."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    entropy: torch.Tensor
    aux: torch.Tensor | None
    kept: torch.Tensor | None


def uniforms(stream: int, group: int, sample: int, size: int, purpose: int = TOKEN_STREAM) -> np.ndarray:
    """The first `size` uniforms in [0, 1) of one completion, float64: a Philox stream keyed by (stream, group) whose
    counter starts at (sample, purpose), so that no two completions overlap and none depends on another."""
    philox = np.random.Philox(key=[stream, group], counter=[0, 0, sample, purpose])
    return np.random.Generator(philox).random(size)


def kept_mask(logprobs: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """The tokens that sampling may take: those in both the `top_k` most probable (0: all) and the smallest set of most
    probable tokens with total probability >= `top_p`, both of the whole distribution. Ties go to the lower id.

    logprobs: [n, V], normalised; returns bool [n, V], at least one token a row.
    """
    ordered, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    probs = ordered.exp()
    before = probs.cumsum(-1, dtype=torch.float64) - probs
    keep = before < top_p
    keep[:, 0] = True
    if top_k:
        keep[:, top_k:] = False
    return torch.zeros_like(keep).scatter_(-1, ids, keep)


def draw(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling, aux_uniform: torch.Tensor | None) -> Drawn:
    """Draws a token a row by inverse CDF.

    Log-probabilities are of softmax(logits / temperature), renormalised over the kept set under
    `sampling.return_kept`; the entropy is always that of the distribution drawn from.

    logits: float32 [n, V]; uniform, aux_uniform: float64 [n] in [0, 1). Raises FloatingPointError where a row's logits
    give no distribution.
    """
    full = (logits / sampling.temperature).log_softmax(-1)
    drawn_from, kept = full, None
    if sampling.top_p < 1 or sampling.top_k or sampling.return_kept:
        kept = kept_mask(full, sampling.top_p, sampling.top_k)
        drawn_from = full.masked_fill(~kept, -torch.inf).log_softmax(-1)
    probs = drawn_from.exp()
    cdf = probs.cumsum(-1, dtype=torch.float64)
    if not torch.isfinite(cdf[:, -1]).all():
        raise FloatingPointError("the policy's logits are not finite: training has diverged")
    tokens = _invert(cdf, probs, uniform)
    reported = drawn_from if sampling.return_kept else full
    return Drawn(
        tokens=tokens,
        logprobs=reported.gather(-1, tokens[:, None]).squeeze(-1),
        entropy=torch.special.entr(probs).sum(-1),
        aux=None if aux_uniform is None else _invert(cdf, probs, aux_uniform),
        kept=kept if sampling.return_kept else None,
    )


def _invert(cdf: torch.Tensor, probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first token whose cdf exceeds the uniform; the last one with positive probability where rounding left the
    whole cdf at or below it."""
    tokens = torch.searchsorted(cdf, uniform[:, None], right=True).squeeze(-1)
    vocab = cdf.shape[-1]
    if (tokens == vocab).any():
        last = vocab - 1 - (probs > 0).flip(-1).int().argmax(-1)
        tokens = torch.minimum(tokens, last)
    return tokens
