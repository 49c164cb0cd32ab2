"""From a batch's rows to what goes through the model at once: balanced over ranks, within a budget of tokens, and laid
out by `trainer.layout`: `padded`, a sequence in each line; `packed`, several in a line; `shared`, the prompt once for
all of its completions (`rl/shared_prompts.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from scalerl.rl import shared_prompts
from scalerl.rl.batch import Row, tokens_of
from scalerl.rl.recipe import Recipe
from scalerl.rl.tokens import Tokens

Layout = Literal["padded", "packed", "shared"]
Lines = list[list[Row]]  # of one micro-batch: the rows that share each line


@dataclass
class MicroBatch:
    """Rows that go through the model at once in n lines, right-padded; T completion tokens in all. Without rows it is
    one token of padding, so that its rank takes part in the collectives of forward and backward.

    input_ids: int64 [n, S]. positions: int64 [n, S], 0 where a row begins, or None where no line has more than one.
    prompts: those before the lines, or None where the lines hold them. line, column: int64 [T], where the hidden state
    that predicts each completion token stands, of [n, S], or of [n, 1 + S] behind `prompts`. targets: int64 [T]. kept:
    int64 [T, K] padded with -1, or None. aux: int64 [T] or None. experts: int32 [n, S, layers, top_k], -1 where the
    generator fed nothing, or None."""

    rows: list[Row]
    input_ids: Tensor
    positions: Tensor | None
    prompts: shared_prompts.Prompts | None
    line: Tensor
    column: Tensor
    targets: Tensor
    tokens: Tokens
    kept: Tensor | None
    aux: Tensor | None
    experts: Tensor | None


def balance(rows: Sequence[Row], ranks: int, budget: int, layout: Layout) -> list[list[Lines]]:
    """For each rank its micro-batches. Ranks have nearly the same tokens and the same number of micro-batches, of which
    the last may be empty; each is within `budget` padded tokens (or of one row)."""
    pieces = shared_prompts.pieces(rows, budget) if layout == "shared" else [[row] for row in rows]
    shares: list[list[shared_prompts.Piece]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for piece in sorted(pieces, key=_tokens, reverse=True):
        least = tokens.index(min(tokens))
        shares[least].append(piece)
        tokens[least] += _tokens(piece)
    if layout == "shared":
        split = [list(shared_prompts.fill(share, budget)) for share in shares]
    else:
        split = [list(_split([row for (row,) in share], budget, layout == "packed")) for share in shares]
    most = max(map(len, split))
    return [[*parts, *([] for _ in range(most - len(parts)))] for parts in split]


def _tokens(piece: shared_prompts.Piece) -> int:
    return len(piece[0].prompt_ids) + sum(len(row.completion.tokens) for row in piece)


def _split(rows: Sequence[Row], budget: int, packing: bool) -> Iterator[Lines]:
    """Micro-batches of like lengths, as wide as their longest row; the rows come longest first. Packed, a row goes into
    the first line that has room for it."""
    while rows:
        width = rows[0].length
        lines: Lines = []
        room: list[int] = []
        left = []
        for row in rows:
            place = next((i for i, free in enumerate(room) if row.length <= free), None) if packing else None
            if place is not None:
                lines[place].append(row)
                room[place] -= row.length
            elif not lines or (len(lines) + 1) * width <= budget:
                lines.append([row])
                room.append(width - row.length)
            else:
                left.append(row)
        yield lines
        rows = left


def micro_batch(lines: Lines, recipe: Recipe, device: torch.device, layout: Layout) -> MicroBatch:
    """The rows as tensors on `device`."""
    rows = [row for line in lines for row in line]
    prompts = positions = None
    if layout == "shared":
        ids, prompts = shared_prompts.tensors(rows)
        starts = [(line, 0) for line in range(len(rows))]
    else:
        ids, positions = _whole(lines)
        starts = [(line, start + len(row.prompt_ids) - 1) for line, start, row in _places(lines)]
    lengths = np.array([len(row.completion.tokens) for row in rows], dtype=np.int64)
    line, first = np.array(starts, dtype=np.int64).reshape(-1, 2).T
    # Counts on from `first` within each row.
    column = np.arange(lengths.sum()) + np.repeat(first - (lengths.cumsum() - lengths), lengths)
    targets = np.concatenate([np.zeros(0, dtype=np.int64), *(row.completion.tokens for row in rows)])
    return MicroBatch(
        rows=rows,
        input_ids=ids.to(device),
        positions=positions.to(device) if positions is not None and len(rows) > len(lines) else None,
        prompts=prompts and prompts.to(device),
        line=torch.from_numpy(np.repeat(line, lengths)).to(device),
        column=torch.from_numpy(column).to(device),
        targets=torch.from_numpy(targets).to(device),
        tokens=tokens_of(rows, trainer_ratio=recipe.ratio == "trainer_old", device=device, dtype=torch.float32),
        kept=_kept_sets(rows, device) if rows and recipe.sampling_mask == "keep" else None,
        aux=_aux_tokens(rows, device) if recipe.sampling_mask == "aux_token" else None,
        experts=_experts(lines, ids.shape[1], device) if rows and recipe.router_replay == "r3" else None,
    )


def _whole(lines: Lines) -> tuple[Tensor, Tensor]:
    """Token ids and positions, int64 [n, S], of lines that hold prompts and completions."""
    n, width = max(1, len(lines)), max((sum(row.length for row in line) for line in lines), default=1)
    ids = torch.zeros(n, width, dtype=torch.int64)
    positions = torch.arange(width).repeat(n, 1)
    for i, start, row in _places(lines):
        ids[i, start : start + row.length] = torch.tensor([*row.prompt_ids, *row.completion.tokens])
        positions[i, start:] = torch.arange(width - start)  # padding counts as the last row's
    return ids, positions


def _places(lines: Lines) -> Iterator[tuple[int, int, Row]]:
    """(line, column of its first token, row) of each row."""
    for i, line in enumerate(lines):
        start = 0
        for row in line:
            yield i, start, row
            start += row.length


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
