"""Micro-batches in which a prompt is computed once for all of its completions (`trainer.layout=shared`).

Its keys and values go to each of them, and the gradients of all come back through them: the step is that of whole
sequences, to rounding, without the prompt's n - 1 repetitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from scalerl.rl.batch import Row
from scalerl.rl.errors import UserError
from scalerl.rl.models.load import cache_argument

Piece = list[Row]  # completions of one prompt


@dataclass
class Prompts:
    """The m prompts of a micro-batch of n lines. ids: int64 [m, P]; lengths: int64 [m]; of: int64 [n], the prompt of
    each line. Padding is on the left, so that a completion follows its prompt at once: attention with a window counts
    columns, not positions."""

    ids: Tensor
    lengths: Tensor
    of: Tensor

    def to(self, device: torch.device) -> Prompts:
        return Prompts(self.ids.to(device), self.lengths.to(device), self.of.to(device))


def pieces(rows: Iterable[Row], budget: int) -> list[Piece]:
    """Each prompt's rows, longest first; several pieces where they would exceed `budget` padded tokens."""
    by_prompt: dict[tuple[int, ...], Piece] = {}
    for row in sorted(rows, key=lambda row: row.length, reverse=True):
        by_prompt.setdefault(row.prompt_ids, []).append(row)
    found = []
    for prompt, left in by_prompt.items():
        while left:
            at_once = max(1, (budget - len(prompt)) // len(left[0].completion.tokens))
            found.append(left[:at_once])
            left = left[at_once:]
    return found


def fill(share: Iterable[Piece], budget: int) -> Iterator[list[list[Row]]]:
    """Micro-batches, a row in each line, of pieces with completions of like lengths: within `budget` padded tokens (or
    of one piece)."""
    held: list[Piece] = []
    for piece in sorted(share, key=lambda piece: len(piece[0].completion.tokens), reverse=True):
        if held and _padded([*held, piece]) > budget:
            yield [[row] for one in held for row in one]
            held = []
        held.append(piece)
    if held:
        yield [[row] for one in held for row in one]


def _padded(held: Sequence[Piece]) -> int:
    completions = sum(map(len, held)) * max(len(piece[0].completion.tokens) for piece in held)
    return completions + len(held) * max(len(piece[0].prompt_ids) for piece in held)


def tensors(rows: Sequence[Row]) -> tuple[Tensor, Prompts]:
    """(completions without their last tokens, int64 [n, S], right-padded; their prompts). Without rows both are one
    token of padding, and S is at least 1."""
    number = {prompt: i for i, prompt in enumerate(dict.fromkeys(row.prompt_ids for row in rows) or [(0,)])}
    longest = max(map(len, number))
    ids = torch.tensor([[*[0] * (longest - len(prompt)), *prompt] for prompt in number])
    lengths = np.array([len(row.completion.tokens) - 1 for row in rows] or [0])
    fed = np.zeros((len(lengths), max(1, lengths.max())), dtype=np.int64)
    parts = [row.completion.tokens[:-1] for row in rows]
    fed[np.arange(fed.shape[1]) < lengths[:, None]] = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
    of = [number[row.prompt_ids] for row in rows] or [0]
    return torch.from_numpy(fed), Prompts(ids, torch.tensor([len(prompt) for prompt in number]), torch.tensor(of))


def hidden_states(body: Any, fed: Tensor, prompts: Prompts) -> Tensor:
    """The model's last hidden states [n, 1 + S, H] behind each completion's prompt: its last token's, and those of the
    tokens `fed` (int64 [n, S])."""
    from transformers import DynamicCache

    cache, width = DynamicCache(), prompts.ids.shape[1]
    argument = {cache_argument(body): cache}
    columns = torch.arange(width, device=fed.device)
    real = columns >= (width - prompts.lengths)[:, None]  # [m, P]
    positions = (columns - (width - prompts.lengths)[:, None]).clamp(min=0)
    first = body(input_ids=prompts.ids, attention_mask=real.long(), position_ids=positions, use_cache=True, **argument)
    cache.reorder_cache(cast(torch.LongTensor, prompts.of))  # one row a line; gradients go through it
    mask = torch.cat([real[prompts.of], torch.ones_like(fed, dtype=torch.bool)], dim=1)
    positions = prompts.lengths[prompts.of, None] + torch.arange(fed.shape[1], device=fed.device)
    behind = body(input_ids=fed, attention_mask=mask.long(), position_ids=positions, use_cache=True, **argument)
    return torch.cat([first.last_hidden_state[prompts.of, -1:], behind.last_hidden_state], dim=1)


@torch.no_grad()
def require_shared_prompts(model: Any) -> None:
    """Raises UserError unless completions behind prompts of two lengths have the hidden states that they have in whole
    sequences: plain keys and values do, other state (recurrent layers, convolutions) doesn't."""
    ids = torch.arange(2, 14, device=model.device).view(2, 6) % model.config.vocab_size
    lengths = torch.tensor([4, 2], device=model.device)
    given = torch.stack([ids[0, :4], ids[1, :4].roll(2)])
    fed = torch.stack([ids[0, 4:], ids[1, 2:4]])
    try:
        found = hidden_states(model.base_model, fed, Prompts(given, lengths, torch.arange(2, device=model.device)))
    except Exception as error:  # whatever the library's code raises on a cache and a mask that it does not expect
        gap, reason = torch.inf, f" ({type(error).__name__})"
    else:
        whole = [model.base_model(input_ids=ids[i : i + 1, : n + 2], use_cache=False) for i, n in enumerate((4, 2))]
        expected = torch.stack([output.last_hidden_state[0, -3:] for output in whole])
        gap, reason = float((found - expected).abs().max() / expected.abs().max()), ""
    if not gap < 1e-4:
        kind = model.config.model_type
        raise UserError(
            f"trainer.layout=shared, but {kind} can't go on from the keys and values of a prompt{reason}: set "
            "trainer.layout=padded"
        )
