"""Whether a model keeps sequences apart that share a line."""

from __future__ import annotations

from typing import Any

import torch

from scalerl.rl.errors import UserError


@torch.no_grad()
def require_packing(model: Any) -> None:
    """Raises UserError unless a sequence has the same hidden states behind another one in its line, told apart by its
    position ids alone, as it has by itself. Transformers masks attention so for most models; recurrent layers and
    convolutions see the neighbour all the same."""
    ids = torch.arange(2, 9, device=model.device)[None] % model.config.vocab_size
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]], device=model.device)
    alone = model.base_model(input_ids=ids[:, 3:], use_cache=False).last_hidden_state
    try:
        packed = model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[:, 3:]
    except TypeError:  # a model that knows no position ids
        packed = None
    if packed is None or (packed - alone).abs().max() > 1e-4 * alone.abs().max():
        kind = model.config.model_type
        raise UserError(
            f"trainer.layout=packed, but sequences in one line of {kind} see each other: set trainer.layout=padded"
        )
