"""Log-probabilities and entropies of chosen tokens straight from hidden states and head weights.

No [T, V] tensor is ever in memory: logits are made a chunk of tokens at a time, and made again in the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scalerl.kernels.head import head_logits


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    head_dtype: torch.dtype = torch.float32,
    kept: Tensor | None = None,
    chunk: int = 4096,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature) of the targets, and the distribution's entropy in nats where asked for.

    hidden: [T, H]; weight: [V, H]; targets: int64 [T]. kept: int64 [T, K] padded with -1, the kept set of top-p/top-k
    sampling, over which the log-probability is renormalised; the target must be in it. The entropy is always that of
    the full vocabulary. The product runs in `head_dtype` and accumulates in fp32; float64 inputs stay float64
    throughout. Returns ([T], [T] or None), both differentiable with respect to hidden and weight."""
    if hidden.dtype == torch.float64:
        head_dtype = torch.float64
    if len(targets) == 0:
        nothing = hidden.sum(-1).to(head_dtype if head_dtype == torch.float64 else torch.float32)
        return nothing, (nothing if with_entropy else None)
    logp, entropy = _TokenLogprobs.apply(hidden, weight, targets, temperature, head_dtype, kept, chunk, with_entropy)
    return logp, (entropy if with_entropy else None)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        head_dtype: torch.dtype,
        kept: Tensor | None,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, targets, *(() if kept is None else (kept,)))
        ctx.settings = (temperature, head_dtype, chunk, with_entropy)
        cast = weight.to(head_dtype)
        parts = []
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            z = head_logits(hidden[rows], cast, head_dtype) / temperature
            kept_rows = None if kept is None else kept[rows]
            parts.append(_values(z, targets[rows], kept_rows, with_entropy))
        logp, entropy = (torch.cat(p) for p in zip(*parts, strict=True))
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, *rest = ctx.saved_tensors
        temperature, head_dtype, chunk, with_entropy = ctx.settings
        d_logp, d_entropy = gradients
        cast = weight.to(head_dtype)
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            z = head_logits(hidden[rows], cast, head_dtype) / temperature
            kept_rows = rest[0][rows] if rest else None
            d_z = _gradient(z, targets[rows], kept_rows, d_logp[rows], d_entropy[rows] if with_entropy else None)
            d_z = (d_z / temperature).to(head_dtype)
            d_hidden[rows] = (d_z @ cast).to(hidden.dtype)
            d_weight += (d_z.mT @ hidden[rows].to(head_dtype)).to(d_weight.dtype)
        return d_hidden, d_weight.to(weight.dtype), None, None, None, None, None, None


def _values(z: Tensor, targets: Tensor, kept: Tensor | None, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """(logp, entropy) of one chunk; z: scaled logits [t, V]."""
    chosen = z.gather(-1, targets[:, None]).squeeze(-1)
    normaliser = z.logsumexp(-1) if kept is None else _kept_logits(z, kept).logsumexp(-1)
    if not with_entropy:
        return chosen - normaliser, chosen.new_zeros(len(chosen))
    log_p = z.log_softmax(-1)
    return chosen - normaliser, -(log_p.exp() * log_p).sum(-1)


def _gradient(z: Tensor, targets: Tensor, kept: Tensor | None, d_logp: Tensor, d_entropy: Tensor | None) -> Tensor:
    """d(logp, entropy)/dz of one chunk, [t, V]: onehot - softmax over the (kept) set, and -p (log p + H)."""
    if kept is None:
        d_z = z.softmax(-1).mul_(-d_logp[:, None])
    else:
        share = _kept_logits(z, kept).softmax(-1) * -d_logp[:, None]
        d_z = torch.zeros_like(z).scatter_add_(-1, kept.clamp(min=0), share.masked_fill(kept < 0, 0))
    d_z.scatter_add_(-1, targets[:, None], d_logp[:, None])
    if d_entropy is not None:
        log_p = z.log_softmax(-1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1, keepdim=True)
        d_z -= d_entropy[:, None] * p * (log_p + entropy)
    return d_z


def _kept_logits(z: Tensor, kept: Tensor) -> Tensor:
    return z.gather(-1, kept.clamp(min=0)).masked_fill(kept < 0, -torch.inf)


def token_logits(hidden: Tensor, weight: Tensor, ids: Tensor, *, head_dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of K chosen tokens a position, without the others.

    hidden: [T, H]; weight: [V, H]; ids: int64 [T, K]; returns [T, K].

    Log-probability differences at one position need no normaliser: log p(a) - log p(u) = (z_a - z_u) / temperature."""
    dtype = torch.float64 if hidden.dtype == torch.float64 else head_dtype
    chosen = torch.nn.functional.embedding(ids, weight).to(dtype)
    z = torch.einsum("th,tkh->tk", hidden.to(dtype), chosen)
    return z if dtype == torch.float64 else z.float()
