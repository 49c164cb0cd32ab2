"""Drawing tokens from logits: truncation, inverse CDF, log-probabilities, and the streams of uniforms behind them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from scalerl.rl.types import Sampling

TOKEN_STREAM, AUX_STREAM = 0, 1
TILE = 2**20  # logits that a CPU draws from at a time, so that the passes over them stay in its cache
BLOCK = 256  # tokens of the vocabulary whose probabilities are added up before a draw looks at each of them


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
    rows, vocab = logits.shape
    size = max(1, TILE // vocab) if logits.device.type == "cpu" else rows
    parts = []
    for rows_of_tile in (slice(start, start + size) for start in range(0, rows, size)):
        aux = None if aux_uniform is None else aux_uniform[rows_of_tile]
        parts.append(_draw(logits[rows_of_tile], uniform[rows_of_tile], sampling, aux))
    if len(parts) == 1:
        return parts[0]
    joined: list[Any] = [None if of[0] is None else torch.cat(of) for of in zip(*parts, strict=True)]
    return Drawn(*joined)


def _draw(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling, aux_uniform: torch.Tensor | None) -> Drawn:
    full = (logits / sampling.temperature).log_softmax(-1)
    drawn_from, kept = full, None
    if sampling.top_p < 1 or sampling.top_k or sampling.return_kept:
        kept = kept_mask(full, sampling.top_p, sampling.top_k)
        drawn_from = full.masked_fill(~kept, -torch.inf).log_softmax(-1)
    probs = drawn_from.exp()
    size = min(BLOCK, probs.shape[-1])
    blocks = F.pad(probs, (0, -probs.shape[-1] % size)).unflatten(-1, (-1, size))
    mass = blocks.sum(-1)
    if not torch.isfinite(mass).all():
        raise FloatingPointError("the policy's logits are not finite: training has diverged")
    tokens = _invert(blocks, mass, uniform)
    reported = drawn_from if sampling.return_kept else full
    return Drawn(
        tokens=tokens,
        logprobs=reported.gather(-1, tokens[:, None]).squeeze(-1),
        entropy=-torch.linalg.vecdot(probs, drawn_from.clamp_(min=torch.finfo(drawn_from.dtype).min)),
        aux=None if aux_uniform is None else _invert(blocks, mass, aux_uniform),
        kept=kept if sampling.return_kept else None,
    )


def _invert(blocks: torch.Tensor, mass: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first token whose cdf exceeds the uniform, found by its block, so that the slow float64 sums are over few.

    blocks: [n, blocks, size], probabilities; mass: [n, blocks], their sums; uniform: float64 [n]. Returns int64 [n]."""
    block = _first_above(mass, uniform)
    before = (mass.cumsum(-1, dtype=torch.float64) - mass).gather(-1, block[:, None]).squeeze(-1)
    inside = blocks[torch.arange(len(blocks), device=blocks.device), block]
    return block * blocks.shape[-1] + _first_above(inside, (uniform - before).clamp(min=0))


def _first_above(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Where the running sum of probs [n, k] first exceeds the uniform; the last one with positive probability where
    rounding left the whole sum at or below it."""
    cdf = probs.cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(cdf, uniform[:, None], right=True).squeeze(-1)
    if (found == cdf.shape[-1]).any():
        last = cdf.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(-1)
        found = torch.minimum(found, last)
    return found
