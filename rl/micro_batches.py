"""From a batch's rows to what goes through the model at once: balanced over ranks, within a budget of tokens, and
with `trainer.packing` several of them in one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scalerl.rl.batch import Row, tokens_of
from scalerl.rl.recipe import Recipe
from scalerl.rl.tokens import Tokens

Lines = list[list[Row]]  # of one micro-batch: the rows that share each line


@dataclass
class MicroBatch:
    """Rows that go through the model at once in n lines, right-padded; T completion tokens in all. Without rows it is
    one token of padding, so that its rank takes part in the collectives of forward and backward.

    input_ids: int64 [n, S]. positions: int64 [n, S], 0 where a row begins, or None where no line has more than one.
    line, column: int64 [T], where the hidden state that predicts each completion token stands. targets: int64 [T].
    kept: int64 [T, K] padded with -1, or None. aux: int64 [T] or None. experts: int32 [n, S, layers, top_k], -1 where
    the generator fed nothing, or None."""

    rows: list[Row]
    input_ids: Tensor
    positions: Tensor | None
    line: Tensor
    column: Tensor
    targets: Tensor
    tokens: Tokens
    kept: Tensor | None
    aux: Tensor | None
    experts: Tensor | None


def balance(rows: Sequence[Row], ranks: int, budget: int, *, packing: bool) -> list[list[Lines]]:
    """For each rank its micro-batches. Ranks have nearly the same tokens and the same number of micro-batches, of which
    the last may be empty; each is within `budget` padded tokens (or of one row)."""
    shares: list[list[Row]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for row in sorted(rows, key=length, reverse=True):
        least = tokens.index(min(tokens))
        shares[least].append(row)
        tokens[least] += length(row)
    split = [list(_split(share, budget, packing)) for share in shares]
    most = max(map(len, split))
    return [[*parts, *([] for _ in range(most - len(parts)))] for parts in split]


def _split(rows: Sequence[Row], budget: int, packing: bool) -> Iterator[Lines]:
    """Micro-batches of like lengths, as wide as their longest row; the rows come longest first. Packed, a row goes into
    the first line that has room for it."""
    while rows:
        width = length(rows[0])
        lines: Lines = []
        room: list[int] = []
        left = []
        for row in rows:
            place = next((i for i, free in enumerate(room) if length(row) <= free), None) if packing else None
            if place is not None:
                lines[place].append(row)
                room[place] -= length(row)
            elif not lines or (len(lines) + 1) * width <= budget:
                lines.append([row])
                room.append(width - length(row))
            else:
                left.append(row)
        yield lines
        rows = left


def micro_batch(lines: Lines, recipe: Recipe, device: torch.device) -> MicroBatch:
    """The rows as tensors on `device`."""
    n, width = max(1, len(lines)), max((sum(map(length, line)) for line in lines), default=1)
    ids = torch.zeros(n, width, dtype=torch.int64)
    positions = torch.arange(width).repeat(n, 1)
    nothing = torch.zeros(0, dtype=torch.int64)
    line_index, columns, targets = [nothing], [nothing], [nothing]
    for i, start, row in _places(lines):
        first, n_tokens = start + len(row.prompt_ids), len(row.completion.tokens)
        sampled = torch.as_tensor(row.completion.tokens, dtype=torch.int64)
        ids[i, start:first] = torch.tensor(row.prompt_ids)
        ids[i, first : first + n_tokens] = sampled
        positions[i, start:] = torch.arange(width - start)  # padding counts as the last row's
        line_index.append(torch.full((n_tokens,), i))
        columns.append(torch.arange(first - 1, first - 1 + n_tokens))
        targets.append(sampled)
    rows = [row for line in lines for row in line]
    return MicroBatch(
        rows=rows,
        input_ids=ids.to(device),
        positions=positions.to(device) if len(rows) > len(lines) else None,
        line=torch.cat(line_index).to(device),
        column=torch.cat(columns).to(device),
        targets=torch.cat(targets).to(device),
        tokens=tokens_of(rows, trainer_ratio=recipe.ratio == "trainer_old", device=device, dtype=torch.float32),
        kept=_kept_sets(rows, device) if rows and recipe.sampling_mask == "keep" else None,
        aux=_aux_tokens(rows, device) if recipe.sampling_mask == "aux_token" else None,
        experts=_experts(lines, width, device) if rows and recipe.router_replay == "r3" else None,
    )


def _places(lines: Lines) -> Iterator[tuple[int, int, Row]]:
    """(line, column of its first token, row) of each row."""
    for i, line in enumerate(lines):
        start = 0
        for row in line:
            yield i, start, row
            start += length(row)


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


def _experts(lines: Lines, width: int, device: torch.device) -> Tensor:
    """[n, width, layers, top_k]; -1 on padding and on each row's last token, which the generator never fed."""
    layers_and_k = torch.as_tensor(lines[0][0].completion.experts).shape[1:]
    experts = torch.full((len(lines), width, *layers_and_k), -1, dtype=torch.int32)
    for i, start, row in _places(lines):
        chosen = torch.as_tensor(row.completion.experts, dtype=torch.int32)
        experts[i, start : start + len(chosen)] = chosen
    return experts.to(device)
