"""What the engine asks of a model: the `Decoder` protocol, with what its two implementations share."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch

from scalerl.rl.engines.kv_cache import KVCache
from scalerl.rl.errors import UserError


class Forward(NamedTuple):
    """logits: float32 [rows, V] of each row's next token. experts: of each token fed, int32 [rows, layers, top_k] when
    decoding and [rows, P, layers, top_k] in a prefill; None unless recorded."""

    logits: torch.Tensor
    experts: torch.Tensor | None


class ContextLimit(NamedTuple):
    """Longest prompt plus completion that full attention is right for, and the configuration entry that sets it."""

    tokens: int
    reason: str

    @classmethod
    def of(cls, config: Any, *, windows: bool = True) -> ContextLimit:
        """From a model configuration: its positions, if bounded, or its attention window where that is shorter. The
        embedded engine attends to every earlier token, so longer contexts are refused rather than attended to
        differently; windows: False for an engine that has them."""
        positions = getattr(config, "max_position_embeddings", None)
        limits = [NO_LIMIT if positions is None else cls(positions, "max_position_embeddings")]
        types = getattr(config, "layer_types", None)
        for key, kind in (("sliding_window", "sliding_attention"), ("attention_chunk_size", "chunked_attention")):
            window = getattr(config, key, None) if windows else None
            if window is not None and (types is None or kind in types):
                limits.append(cls(window, key))
        return min(limits)

    def check(self, prompt: int, completion: int) -> None:
        """Raises UserError if a prompt and a completion of so many tokens do not fit."""
        if prompt + completion > self.tokens:
            raise UserError(
                f"a prompt of {prompt} tokens and a completion of {completion} exceed the model's {self.reason}="
                f"{self.tokens}; lower recipe.generation_budget or take a model with a longer context"
            )


NO_LIMIT = ContextLimit(sys.maxsize, "")


class Decoder(Protocol):
    """A causal language model that prefills prompts and decodes single tokens against a KV cache it does not own.

    Several engines may share a decoder, each with caches of its own; they share its weights."""

    device: torch.device
    limit: ContextLimit

    def new_cache(self, rows: int, capacity: int) -> KVCache: ...

    def record_experts(self) -> None:
        """From now on `Forward.experts` is filled. Raises UserError where the model has no routers."""
        ...

    def prefill(self, ids: torch.Tensor, lengths: torch.Tensor, cache: KVCache) -> Forward:
        """Runs right-padded prompts from position 0 and writes their keys and values into the cache's first rows.

        ids: int64 [rows, P]; lengths: int64 [rows], at least 1; cache: capacity at least P."""
        ...

    def decode(self, ids: torch.Tensor, positions: torch.Tensor, longest: int, cache: KVCache) -> Forward:
        """Feeds one token to each of the cache's first rows and writes its keys and values.

        ids, positions: int64 [rows]; longest: max(positions) + 1, known to the caller without asking the device."""
        ...

    def load_weights(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copies parameters, named as in the Hugging Face model, in place, casting to the model's dtype. A tied head
        may be given under either name or both. Raises ValueError for unknown or missing names."""
        ...


def copy_weights(
    targets: Mapping[str, torch.Tensor], required: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
) -> None:
    """Copies `state` into `targets` by name; raises ValueError if a name is unknown, a shape differs, or a required
    tensor is given under none of its names."""
    if unknown := sorted(set(state) - set(targets)):
        raise ValueError(f"weights: the model has no parameter '{unknown[0]}' ({len(unknown)} unknown in all)")
    given = {targets[name].data_ptr() for name in state}
    if missing := sorted(name for name, tensor in required.items() if tensor.data_ptr() not in given):
        raise ValueError(f"weights: parameter '{missing[0]}' is missing ({len(missing)} in all)")
    for name, tensor in state.items():
        if targets[name].shape != tensor.shape:
            raise ValueError(f"weights: '{name}' is {tuple(tensor.shape)}, the model's {tuple(targets[name].shape)}")
        targets[name].copy_(tensor)
