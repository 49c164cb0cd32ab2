"""From a batch's rows to what goes through the model at once: balanced over ranks, within a budget of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scalerl.rl.batch import Row, tokens_of
from scalerl.rl.recipe import Recipe
from scalerl.rl.tokens import Tokens


@dataclass
class MicroBatch:
    """Rows that go through the model at once, right-padded; T completion tokens in all. Without rows it is one token of
    padding, so that its rank takes part in the collectives of forward and backward.

    input_ids: int64 [n, S]. row, column: int64 [T], where the hidden state that predicts each completion token stands.
    targets: int64 [T]. kept: int64 [T, K] padded with -1, or None. aux: int64 [T] or None. experts: int32
    [n, S, layers, top_k], -1 where the generator fed nothing, or None."""

    rows: list[Row]
    input_ids: Tensor
    row: Tensor
    column: Tensor
    targets: Tensor
    tokens: Tokens
    kept: Tensor | None
    aux: Tensor | None
    experts: Tensor | None


def balance(rows: Sequence[Row], ranks: int, budget: int) -> list[list[list[Row]]]:
    """For each rank its micro-batches' rows. Ranks have nearly the same tokens and the same number of micro-batches,
    of which the last may be empty; each is within `budget` padded tokens (or of one row)."""
    shares: list[list[Row]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for row in sorted(rows, key=length, reverse=True):
        least = tokens.index(min(tokens))
        shares[least].append(row)
        tokens[least] += length(row)
    split = [list(_split(share, budget)) for share in shares]
    most = max(map(len, split))
    return [[*parts, *([] for _ in range(most - len(parts)))] for parts in split]


def _split(rows: Sequence[Row], budget: int) -> Iterator[list[Row]]:
    """Micro-batches of like lengths; the rows come longest first."""
    current: list[Row] = []
    for row in rows:
        if current and (len(current) + 1) * length(current[0]) > budget:
            yield current
            current = []
        current.append(row)
    if current:
        yield current


def micro_batch(rows: list[Row], recipe: Recipe, device: torch.device) -> MicroBatch:
    """The rows as tensors on `device`."""
    ids = torch.zeros(max(1, len(rows)), max(map(length, rows), default=1), dtype=torch.int64)
    nothing = torch.zeros(0, dtype=torch.int64)
    row_index, columns, targets = [nothing], [nothing], [nothing]
    for i, row in enumerate(rows):
        p, sampled = len(row.prompt_ids), torch.as_tensor(row.completion.tokens, dtype=torch.int64)
        ids[i, :p] = torch.tensor(row.prompt_ids)
        ids[i, p : p + len(sampled)] = sampled
        row_index.append(torch.full((len(sampled),), i))
        columns.append(torch.arange(p - 1, p - 1 + len(sampled)))
        targets.append(sampled)
    return MicroBatch(
        rows=rows,
        input_ids=ids.to(device),
        row=torch.cat(row_index).to(device),
        column=torch.cat(columns).to(device),
        targets=torch.cat(targets).to(device),
        tokens=tokens_of(rows, trainer_ratio=recipe.ratio == "trainer_old", device=device, dtype=torch.float32),
        kept=_kept_sets(rows, device) if rows and recipe.sampling_mask == "keep" else None,
        aux=_aux_tokens(rows, device) if recipe.sampling_mask == "aux_token" else None,
        experts=_experts(rows, ids.shape[1], device) if rows and recipe.router_replay == "r3" else None,
    )


def length(row: Row) -> int:
    """Tokens of prompt and completion."""
    return len(row.prompt_ids) + len(row.completion.tokens)


def _kept_sets(rows: Sequence[Row], device: torch.device) -> Tensor:
    sets = [torch.as_tensor(ids, dtype=torch.int64) for row in rows for ids in row.completion.kept or ()]
    # An injected token has no kept set: its own id alone keeps the row valid, and its mask keeps it out of everything.
    targets = [int(t) for row in rows for t in row.completion.tokens]
    filled = [ids if len(ids) else torch.tensor([t]) for ids, t in zip(sets, targets, strict=True)]
    return nn.utils.rnn.pad_sequence(filled, batch_first=True, padding_value=-1).to(device)


def _aux_tokens(rows: Sequence[Row], device: torch.device) -> Tensor:
    parts = [torch.as_tensor(row.completion.aux_tokens, dtype=torch.int64) for row in rows]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *parts]).to(device)


def _experts(rows: Sequence[Row], longest: int, device: torch.device) -> Tensor:
    """[n, longest, layers, top_k]; -1 on padding and on the last token, which the generator never fed."""
    recorded = [torch.as_tensor(row.completion.experts, dtype=torch.int32) for row in rows]
    experts = torch.full((len(rows), longest, *recorded[0].shape[1:]), -1, dtype=torch.int32)
    for i, chosen in enumerate(recorded):
        experts[i, : len(chosen)] = chosen
    return experts.to(device)
