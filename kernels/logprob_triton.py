"""`token_logprobs` on a GPU: tiles of logits live in registers, and only the backward pass writes any.

The forward kernel goes over the vocabulary with a running maximum, as softmax is computed online (Milakov and
Gimelshein, arXiv 1805.02867). The backward kernel makes a tile of logits again and writes the objective's gradient to
them; the products with it are the library's. Operands are bf16 wherever nothing is lost by it: the product of two
bf16 numbers is exact in fp32, and sums are fp32, so an fp32 head on bf16 tensors needs no fp32 copy of them. Only the
gradient to the logits is rounded to bf16 then, as its products are."""

# Calls of kernels take plain values for their constants, which Triton's types don't tell.
# pyright: reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

VOCABULARY_TILE = 8192  # logits a row that the backward pass writes at once
SPLIT = 8192  # columns that a program of the forward pass goes over
BLOCK = (64, 128, 64)  # rows, columns and hidden units that are multiplied at once
INTERPRETED = tl.constexpr(knobs.runtime.interpret)
TINY = tl.constexpr(1e-37)  # where no column of a split is in a row's kept set, log_sum is -inf all the same
_WIDTHS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


def operand_dtype(hidden: Tensor, weight: Tensor, head_dtype: torch.dtype) -> torch.dtype:
    """What the products multiply: bf16 for a bf16 head, and where both tensors are bf16 anyway."""
    both = hidden.dtype == weight.dtype == torch.bfloat16
    return torch.bfloat16 if both else head_dtype


def readable_sets(kept: Tensor, vocabulary: int) -> Tensor:
    """Kept sets [T, K] as the kernels read them: rising, the padding beyond every id."""
    return kept.where(kept >= 0, vocabulary).sort(dim=-1).values


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
    """As `logprob_torch.statistics`, whatever the chunk: no logits are written."""
    n, width = hidden.shape
    starts = torch.arange(0, len(weight), SPLIT, device=hidden.device)
    found = torch.zeros(4, len(starts), n, device=hidden.device)
    rows, block, depth = BLOCK
    if n:
        _statistics[triton.cdiv(n, rows), len(starts)](
            hidden.contiguous(),
            weight.contiguous(),
            targets,
            *_walk(kept, starts, targets),
            found,
            n,
            len(weight),
            width,
            temperature,
            SPLIT=SPLIT,
            ENTROPY=with_entropy,
            KEPT=kept is not None,
            OPERAND=_WIDTHS[operand_dtype(hidden, weight, head_dtype)],
            ROUNDED=head_dtype == torch.bfloat16,
            ROWS=rows,
            COLUMNS=block,
            DEPTH=depth,
        )
    chosen, log_sum, log_sum_all, mean_z = found
    total = log_sum_all.logsumexp(0)
    return chosen.sum(0), log_sum.logsumexp(0), total, ((log_sum_all - total).exp() * mean_z).sum(0)


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
    """As `logprob_torch.logit_gradient`."""
    n, width = hidden.shape
    rows, block, depth = BLOCK
    starts = torch.arange(columns.start, columns.stop, block, device=hidden.device)
    operand = operand_dtype(hidden, weight, head_dtype)
    d_z = torch.empty(n, len(weight), dtype=operand, device=hidden.device)
    log_sum_all, entropy, d_entropy = of_entropy or (log_sum, log_sum, log_sum)
    if n:
        _logit_gradient[triton.cdiv(n, rows), len(starts)](
            hidden.contiguous(),
            weight.contiguous(),
            targets,
            *_walk(kept, starts, targets),
            log_sum,
            d_logp,
            log_sum_all,
            entropy,
            d_entropy,
            d_z,
            n,
            len(weight),
            width,
            columns.start,
            temperature,
            ENTROPY=of_entropy is not None,
            KEPT=kept is not None,
            OPERAND=_WIDTHS[operand],
            ROUNDED=head_dtype == torch.bfloat16,
            ROWS=rows,
            COLUMNS=block,
            DEPTH=depth,
        )
    return d_z


def _walk(kept: Tensor | None, starts: Tensor, unused: Tensor) -> tuple[Tensor, Tensor, int]:
    """The sorted kept sets, where in each the ids from each of `starts` on begin [T, n], and their width K."""
    if kept is None:
        return unused, unused, 0
    return kept, torch.searchsorted(kept, starts.expand(len(kept), -1).contiguous()), kept.shape[1]


@triton.jit
def _logits(
    hidden,
    weight,
    row,
    column,
    n,
    vocabulary,
    width,
    temperature,
    OPERAND: tl.constexpr,
    ROUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A tile of logits over the temperature, fp32; -inf beyond the vocabulary. row, column: int64."""
    z = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, width, DEPTH):
        k = start + tl.arange(0, DEPTH)
        inside = (row[:, None] < n) & (k[None, :] < width)
        h = tl.load(hidden + row[:, None] * width + k[None, :], inside, 0.0)
        inside = (column[None, :] < vocabulary) & (k[:, None] < width)
        w = tl.load(weight + column[None, :] * width + k[:, None], inside, 0.0)
        h = h.to(OPERAND)
        w = w.to(OPERAND)
        if INTERPRETED:  # the interpreter's products of bf16 numbers are wrong, and those in fp32 are the same
            h = h.to(tl.float32)
            w = w.to(tl.float32)
        z = tl.dot(h, w, z, input_precision="ieee")
    if ROUNDED:  # as a bf16 head's logits are
        z = z.to(tl.bfloat16).to(tl.float32)
    return tl.where(column[None, :] < vocabulary, z / temperature, -float("inf"))


@triton.jit
def _in_kept_set(
    kept, position, n_kept, row, present, column, end, vocabulary, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Which of the tile's columns (the last is before `end`) are in their row's kept set, and the positions [ROWS] in
    the sets after them."""
    allowed = tl.zeros((ROWS, COLUMNS), tl.int1)
    id_ = tl.load(kept + row * n_kept + position, present & (position < n_kept), vocabulary)
    while tl.min(id_, 0) < end:
        allowed = allowed | (id_[:, None] == column[None, :])
        position += (id_ < end).to(tl.int64)
        id_ = tl.load(kept + row * n_kept + position, present & (position < n_kept), vocabulary)
    return allowed, position


@triton.jit
def _fold(maximum, total, z):
    """A tile's logits taken into the running (maximum, sum of exp(z - maximum)); returns the new ones, the factor that
    the old sums shrank by, and exp(z - maximum)."""
    new = tl.maximum(maximum, tl.max(z, 1))
    base = tl.where(new == -float("inf"), 0.0, new)
    shrink, e = tl.exp(maximum - base), tl.exp(z - base[:, None])
    return new, total * shrink + tl.sum(e, 1), shrink, e


@triton.jit
def _statistics(
    hidden,
    weight,
    targets,
    kept,
    begins,
    n_kept,
    found,
    n,
    vocabulary,
    width,
    temperature,
    SPLIT: tl.constexpr,
    ENTROPY: tl.constexpr,
    KEPT: tl.constexpr,
    OPERAND: tl.constexpr,
    ROUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """found: [4, splits, n], of one split: z of the target (0 where it is in another), logsumexp over the kept set and
    over all, mean of z."""
    split, splits = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < n
    target = tl.load(targets + row, present, -1)
    position = tl.zeros((ROWS,), tl.int64)
    if KEPT:
        position = tl.load(begins + row * splits + split, present, n_kept)
    chosen = tl.zeros((ROWS,), tl.float32)
    maximum = tl.full((ROWS,), -float("inf"), tl.float32)
    maximum_all = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    total_all = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS,), tl.float32)
    for start in range(split * SPLIT, min((split + 1) * SPLIT, vocabulary), COLUMNS):
        column = start + tl.arange(0, COLUMNS).to(tl.int64)
        z = _logits(
            hidden, weight, row, column, n, vocabulary, width, temperature, OPERAND, ROUNDED, ROWS, COLUMNS, DEPTH
        )
        chosen += tl.sum(tl.where(column[None, :] == target[:, None], z, 0.0), 1)
        if ENTROPY:
            maximum_all, total_all, shrink, e = _fold(maximum_all, total_all, z)
            weighted = weighted * shrink + tl.sum(e * tl.where(column[None, :] < vocabulary, z, 0.0), 1)
        if KEPT:
            end = min(start + COLUMNS, vocabulary)
            allowed, position = _in_kept_set(
                kept, position, n_kept, row, present, column, end, vocabulary, ROWS, COLUMNS
            )
            z = tl.where(allowed, z, -float("inf"))
        maximum, total, _, _ = _fold(maximum, total, z)
    place = found + split * n + row
    tl.store(place, chosen, present)
    tl.store(place + splits * n, maximum + tl.log(tl.maximum(total, TINY)), present)
    if ENTROPY:
        tl.store(place + 2 * splits * n, maximum_all + tl.log(total_all), present)
        tl.store(place + 3 * splits * n, weighted / total_all, present)


@triton.jit
def _logit_gradient(
    hidden,
    weight,
    targets,
    kept,
    begins,
    n_kept,
    log_sums,
    d_logps,
    log_sums_all,
    entropies,
    d_entropies,
    d_zs,
    n,
    n_columns,
    width,
    first,
    temperature,
    ENTROPY: tl.constexpr,
    KEPT: tl.constexpr,
    OPERAND: tl.constexpr,
    ROUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    block, blocks = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < n
    column = block * COLUMNS + tl.arange(0, COLUMNS).to(tl.int64)
    z = _logits(hidden, weight, row, column, n, n_columns, width, temperature, OPERAND, ROUNDED, ROWS, COLUMNS, DEPTH)
    log_sum, d_logp = tl.load(log_sums + row, present, 0.0), tl.load(d_logps + row, present, 0.0)
    p = tl.exp(z - log_sum[:, None])
    if KEPT:
        position = tl.load(begins + row * blocks + block, present, n_kept)
        end = first + min((block + 1) * COLUMNS, n_columns)
        beyond = first + n_columns
        allowed, position = _in_kept_set(
            kept, position, n_kept, row, present, first + column, end, beyond, ROWS, COLUMNS
        )
        p = tl.where(allowed, p, 0.0)
    target = tl.load(targets + row, present, -1)
    d_z = d_logp[:, None] * ((first + column[None, :] == target[:, None]).to(tl.float32) - p)
    if ENTROPY:
        log_p = tl.where(column[None, :] < n_columns, z, 0.0) - tl.load(log_sums_all + row, present, 0.0)[:, None]
        entropy, d_entropy = tl.load(entropies + row, present, 0.0), tl.load(d_entropies + row, present, 0.0)
        d_z -= d_entropy[:, None] * tl.exp(log_p) * (log_p + entropy[:, None])
    inside = present[:, None] & (column[None, :] < n_columns)
    tl.store(d_zs + row[:, None] * n_columns + column[None, :], d_z.to(OPERAND), inside)
