"""The tiles of `kernels/logprob.py` in plain torch: what runs wherever Triton doesn't."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from scalerl.kernels.head import head_logits

VOCABULARY_TILE = 1024  # weights of another dtype than the head's are cast this many rows at a time, never as a whole


def operand_dtype(hidden: Tensor, weight: Tensor, head_dtype: torch.dtype) -> torch.dtype:
    """What the products multiply."""
    return head_dtype


def readable_sets(kept: Tensor, vocabulary: int) -> Tensor:
    """Kept sets [T, K] as `statistics` and `logit_gradient` read them: as they are."""
    return kept


def statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    kept: Tensor | None,
    *,
    temperature: float,
    head_dtype: torch.dtype,
    chunk: int,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the logits z [T, V]: (z of the targets, logsumexp over the kept set, logsumexp over all, mean of z under the
    softmax), [T] each; without `with_entropy` the last two are placeholders. kept: from `readable_sets`, or None."""
    chosen, mean_z = hidden.new_zeros(2, len(targets), dtype=wide(head_dtype))
    log_sum = torch.full_like(chosen, -torch.inf)  # over the kept set
    log_sum_all = torch.full_like(chosen, -torch.inf) if with_entropy else log_sum
    for columns in slices(len(weight), VOCABULARY_TILE):
        w = weight[columns].to(head_dtype)
        for rows in slices(len(targets), chunk):
            z = head_logits(hidden[rows], w, head_dtype).div_(temperature)
            local, inside = _local(targets[rows], columns)
            chosen[rows] += z.gather(-1, local[:, None]).squeeze(-1).where(inside, 0)
            if with_entropy:
                tile = z.logsumexp(-1)
                total = torch.logaddexp(log_sum_all[rows], tile)
                tile_mean = (z - tile[:, None]).exp_().mul_(z).sum(-1)
                old, new = (log_sum_all[rows] - total).exp(), (tile - total).exp()
                mean_z[rows] = old * mean_z[rows] + new * tile_mean
                log_sum_all[rows] = total
            if kept is not None:
                z.masked_fill_(~allowed(kept[rows], columns), -torch.inf)
            log_sum[rows] = torch.logaddexp(log_sum[rows], z.logsumexp(-1))
    return chosen, log_sum, log_sum_all, mean_z


def logit_gradient(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    kept: Tensor | None,
    columns: slice,
    log_sum: Tensor,
    d_logp: Tensor,
    of_entropy: tuple[Tensor, Tensor, Tensor] | None,
    *,
    temperature: float,
    head_dtype: torch.dtype,
) -> Tensor:
    """The gradient to the logits z [T, v] of `columns`, whose weights are `weight` [v, H]: d_logp (onehot - softmax
    over the kept set), and of the entropy -p (log p + H) d_entropy. In the operands' dtype, as hidden and weight are.

    of_entropy: (logsumexp over all, H, d_entropy), [T] each, or None."""
    z = head_logits(hidden, weight, head_dtype).div_(temperature)
    entropy_part = None
    if of_entropy is not None:
        log_sum_all, entropy, d_entropy = (x[:, None] for x in of_entropy)
        log_p = z - log_sum_all
        entropy_part = (log_p + entropy).mul_(log_p.exp_()).mul_(-d_entropy)
    if kept is not None:
        z.masked_fill_(~allowed(kept, columns), -torch.inf)
    d_z = softmax_gradient(z, targets, columns, log_sum, d_logp)
    if entropy_part is not None:
        d_z += entropy_part
    return d_z.to(head_dtype)


def softmax_gradient(z: Tensor, targets: Tensor, columns: slice, log_sum: Tensor, d_logp: Tensor) -> Tensor:
    """d logp/dz = onehot - softmax, times d_logp, of one tile; overwrites z. -inf in z: outside the kept set."""
    d_z = z.sub_(log_sum[:, None]).exp_().mul_(-d_logp[:, None])
    local, inside = _local(targets, columns)
    return d_z.scatter_add_(-1, local[:, None], d_logp.where(inside, 0)[:, None])


def allowed(kept: Tensor, columns: slice) -> Tensor:
    """The kept sets [t, K] as a 0/1 mask over the tile's columns, bool [t, v]."""
    width = columns.stop - columns.start
    inside = (kept >= columns.start) & (kept < columns.stop)
    mask = torch.zeros(len(kept), width + 1, dtype=torch.bool, device=kept.device)
    return mask.scatter_(-1, (kept - columns.start).where(inside, width), True)[:, :width]


def slices(total: int, size: int) -> Iterator[slice]:
    """0..total in parts of `size`, the last one shorter."""
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over products in `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def _local(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Targets as positions within the tile (0 for those outside), and which are inside."""
    inside = (targets >= columns.start) & (targets < columns.stop)
    return (targets - columns.start).where(inside, 0), inside
