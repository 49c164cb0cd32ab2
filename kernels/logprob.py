"""Log-probabilities and entropies of chosen tokens straight from hidden states and head weights.

No [T, V] tensor is ever in memory. `token_logprobs` makes logits a tile of tokens x vocabulary at a time, and makes
them again in the backward pass; `weighted_logprob_sum` is told the loss's coefficients, and needs no second pass."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from scalerl.kernels import logprob_torch
from scalerl.kernels.head import head_logits
from scalerl.kernels.linear import add_product
from scalerl.kernels.logprob_torch import VOCABULARY_TILE, allowed, slices, softmax_gradient, wide


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
    the full vocabulary. chunk: tokens of a tile, chunk x VOCABULARY_TILE logits. The product runs in `head_dtype`; sums
    over the vocabulary and the gradients' sums over tiles are fp32, and float64 inputs stay float64 throughout. Returns
    ([T], [T] or None), both differentiable once with respect to hidden and weight."""
    if hidden.dtype == torch.float64:
        head_dtype = torch.float64
    logp, entropy = _TokenLogprobs.apply(hidden, weight, targets, temperature, head_dtype, kept, chunk, with_entropy)
    return logp, (entropy if with_entropy else None)


def token_logprobs_reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    head_dtype: torch.dtype = torch.float32,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `token_logprobs` computes, written plainly over a [T, V] tensor: (logp [T], entropy [T])."""
    z = head_logits(hidden, weight, torch.float64 if hidden.dtype == torch.float64 else head_dtype) / temperature
    log_p = z.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    if kept is not None:
        beyond = z.shape[-1]  # where the padding goes
        allowed = torch.zeros(len(z), beyond + 1, dtype=torch.bool, device=z.device)
        allowed = allowed.scatter(-1, kept.where(kept >= 0, beyond), True)[:, :beyond]
        log_p = z.masked_fill(~allowed, -torch.inf).log_softmax(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), entropy


def weighted_logprob_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    coefficient: Callable[[Tensor, slice], Tensor],
    *,
    temperature: float = 1.0,
    head_dtype: torch.dtype = torch.float32,
    kept: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """(sum_t c_t logp_t, logp [T] without gradient), its gradient made in the forward pass: three products, not four.

    coefficient: (logp of a chunk [t], its rows) -> c [t], held constant in the gradient, such as CISPO's
    sg(min(rho, eps_max)) A; it may depend on a token's own log-probability, not on other tokens'. chunk: tokens whose
    logits over the whole vocabulary are in memory at once. Other arguments as in `token_logprobs`. A second backward
    pass raises RuntimeError."""
    if hidden.dtype == torch.float64:
        head_dtype = torch.float64
    return _WeightedLogprobSum.apply(hidden, weight, targets, coefficient, temperature, head_dtype, kept, chunk)


def token_logits(hidden: Tensor, weight: Tensor, ids: Tensor, *, head_dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of K chosen tokens a position, without the others.

    hidden: [T, H]; weight: [V, H]; ids: int64 [T, K]; returns [T, K].

    Log-probability differences at one position need no normaliser: log p(a) - log p(u) = (z_a - z_u) / temperature."""
    dtype = torch.float64 if hidden.dtype == torch.float64 else head_dtype
    chosen = F.embedding(ids, weight).to(dtype)
    z = torch.einsum("th,tkh->tk", hidden.to(dtype), chosen)
    return z if dtype == torch.float64 else z.float()


def _tiles(hidden: Tensor) -> Any:
    """The module whose `statistics` and `logit_gradient` go over the tiles: Triton's on a GPU, else torch's."""
    if hidden.is_cuda and hidden.dtype != torch.float64 and find_spec("triton"):
        from scalerl.kernels import logprob_triton

        return logprob_triton
    return logprob_torch


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
        tiles = _tiles(hidden)
        if kept is not None:
            kept = tiles.readable_sets(kept, len(weight))
        head = {"temperature": temperature, "head_dtype": head_dtype}
        chosen, log_sum, log_sum_all, mean_z = tiles.statistics(
            hidden, weight, targets, kept, chunk=chunk, with_entropy=with_entropy, **head
        )
        entropy = log_sum_all - mean_z
        ctx.save_for_backward(hidden, weight, targets, kept, log_sum, log_sum_all, entropy)
        ctx.settings = (tiles, head, chunk, with_entropy)
        return chosen - log_sum, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, kept, log_sum, log_sum_all, entropy = ctx.saved_tensors
        tiles, head, chunk, with_entropy = ctx.settings
        d_logp, d_entropy = (g / head["temperature"] for g in gradients)
        operand, sums = tiles.operand_dtype(hidden, weight, head["head_dtype"]), wide(head["head_dtype"])
        d_hidden = torch.zeros_like(hidden, dtype=sums)
        d_weight = torch.empty_like(weight)
        for columns in slices(len(weight), tiles.VOCABULARY_TILE):
            w = weight[columns].to(operand)
            d_w = torch.zeros_like(w, dtype=sums)
            for rows in slices(len(targets), chunk):
                h = hidden[rows].to(operand)
                d_z = tiles.logit_gradient(
                    h,
                    w,
                    targets[rows],
                    None if kept is None else kept[rows],
                    columns,
                    log_sum[rows],
                    d_logp[rows],
                    (log_sum_all[rows], entropy[rows], d_entropy[rows]) if with_entropy else None,
                    **head,
                )
                add_product(d_hidden[rows], d_z, w)
                add_product(d_w, d_z.mT, h)
            d_weight[columns] = d_w
        return d_hidden.to(hidden.dtype), d_weight, None, None, None, None, None, None


class _WeightedLogprobSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        coefficient: Callable[[Tensor, slice], Tensor],
        temperature: float,
        head_dtype: torch.dtype,
        kept: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        sums, vocabulary = wide(head_dtype), len(weight)
        everything = slice(0, vocabulary)
        d_hidden = torch.zeros_like(hidden, dtype=sums)
        d_weight = torch.zeros_like(weight, dtype=sums)
        logp = hidden.new_zeros(len(targets), dtype=sums)
        value = logp.new_zeros(())
        buffer = hidden.new_empty(min(chunk, len(targets)), vocabulary, dtype=sums)
        for rows in slices(len(targets), chunk):
            h = hidden[rows].to(head_dtype)
            z = buffer[: len(h)]
            for columns in slices(vocabulary, VOCABULARY_TILE):
                z[:, columns] = head_logits(h, weight[columns].to(head_dtype), head_dtype)
            z.div_(temperature)
            if kept is not None:
                z.masked_fill_(~allowed(kept[rows], everything), -torch.inf)
            chosen, log_sum = z.gather(-1, targets[rows, None]).squeeze(-1), _log_sum(z)
            logp[rows] = chosen - log_sum
            c = coefficient(logp[rows], rows)
            value += (c * logp[rows]).sum()
            d_z = softmax_gradient(z, targets[rows], everything, log_sum, c / temperature)
            for columns in slices(vocabulary, VOCABULARY_TILE):
                part = d_z[:, columns].to(head_dtype)
                add_product(d_hidden[rows], part, weight[columns].to(head_dtype))
                add_product(d_weight[columns], part.mT, h)
        ctx.gradients = (d_hidden.to(hidden.dtype), d_weight.to(weight.dtype))
        ctx.mark_non_differentiable(logp)
        return value, logp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled in place and handed over, since a second [V, H] would cost what the chunks save.
        if ctx.gradients is None:
            raise RuntimeError("weighted_logprob_sum keeps its gradient for one backward pass only")
        (d_hidden, d_weight), ctx.gradients = ctx.gradients, None
        return d_hidden.mul_(gradients[0]), d_weight.mul_(gradients[0]), None, None, None, None, None, None


def _log_sum(z: Tensor) -> Tensor:
    """logsumexp over the last dimension, tile by tile: the library's makes a second tensor of z's size."""
    parts = [z[:, columns].logsumexp(-1) for columns in slices(z.shape[-1], VOCABULARY_TILE)]
    return torch.stack(parts).logsumexp(0)
