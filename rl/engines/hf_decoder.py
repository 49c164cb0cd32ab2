"""The decoder for every other architecture: the library's own forward pass over the engine's KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from scalerl.kernels.head import head_logits
from scalerl.rl.engines.base import ContextLimit, Forward, copy_weights
from scalerl.rl.engines.kv_cache import KVCache, LayerShape
from scalerl.rl.errors import UserError
from scalerl.rl.models.load import cache_argument


class _Probe(Cache):
    """Records what each layer would store."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, LayerShape] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes[layer_idx] = LayerShape(key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class _RaggedView(Cache):
    """Lets the library's attention write one step of ragged rows into a `KVCache` and read them up to the longest."""

    def __init__(self, cache: KVCache, positions: torch.Tensor, longest: int) -> None:
        super().__init__(layers=[])
        self._cache = cache
        self._rows = torch.arange(positions.shape[0], device=positions.device)[:, None]
        self._positions = positions  # [rows, tokens]
        self._longest = longest

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        read = []
        for stored, new in zip(self._cache.layers[layer_idx], (key_states, value_states), strict=True):
            stored[self._rows, :, self._positions] = new.transpose(1, 2)
            read.append(stored[: len(self._rows), :, : self._longest])
        return read[0], read[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._longest - self._positions.shape[1]


class HFDecoder:
    """Any causal LM whose layers all keep plain keys and values and whose head is one linear map; owns the model.

    Raises UserError for a model with other state (linear attention, state-space layers), without explicit positions
    (ALiBi) or with another head (logit scaling or capping), found by running it on a few tokens.
    """

    def __init__(
        self, model: PreTrainedModel, *, dtype: torch.dtype, head_dtype: torch.dtype, device: torch.device
    ) -> None:
        self.device = device
        self.limit = ContextLimit.of(model.config)
        self._model: Any = model  # pyright takes the library's decorated methods for functions
        self._model.to(device).eval().requires_grad_(False)
        for parameter in self._model.parameters():  # not `model.to`, which would round the rotary frequencies too
            parameter.data = parameter.data.to(dtype)
        self._body = self._model.base_model
        self._cache_argument = cache_argument(self._body)
        self._dtype = dtype
        self._head_dtype = head_dtype
        self._lm_head: torch.Tensor = self._model.get_output_embeddings().weight
        self._head = self._lm_head.to(head_dtype)
        self._routing: list[torch.Tensor] | None = None
        try:
            with torch.inference_mode():
                self._shapes = self._store_shapes()
                self._check()
        except Exception as error:  # whatever the library's code raises on a cache and a mask that it does not expect
            kind = model.config.model_type
            raise UserError(
                f"model.path: the torch engine can't run {kind} ({type(error).__name__}: {error}); it needs plain keys "
                "and values, explicit positions and a linear head"
            ) from error

    def _store_shapes(self) -> list[LayerShape]:
        """What each layer keeps of a token; raises ValueError unless that is a key and a value in every layer."""
        probe, layers = _Probe(), self._model.config.num_hidden_layers
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self._body(input_ids=ids, use_cache=True, **{self._cache_argument: probe})
        if sorted(probe.shapes) != list(range(layers)):
            raise ValueError(f"keys and values are kept in {len(probe.shapes)} of {layers} layers")
        return [probe.shapes[i] for i in range(layers)]

    def _check(self) -> None:
        """Two ragged rows, prefilled and decoded, must get the logits of plain forward passes; raises ValueError."""
        # Found by name: capping bends large logits only, which a few tokens need not have.
        if getattr(self._model.config, "final_logit_softcapping", None) is not None:
            raise ValueError("it caps its logits")
        vocab = self._model.config.vocab_size
        ids = (torch.arange(1, 13, device=self.device) % vocab).view(2, 6)
        lengths = torch.tensor([5, 2], device=self.device)
        cache = self.new_cache(2, 6)
        self.prefill(ids[:, :5], lengths, cache)
        following = ids.gather(1, lengths[:, None])[:, 0]
        found = self.decode(following, lengths, 6, cache).logits
        plain = [
            self._model(input_ids=ids[r : r + 1, : n + 1], use_cache=False).logits[0, -1] for r, n in enumerate((5, 2))
        ]
        expected = torch.stack(plain).float()
        gap = float((found - expected).norm() / expected.norm())
        tolerance = 1e-3 if self._dtype == self._head_dtype == torch.float32 else 0.2
        if not gap < tolerance:
            raise ValueError(f"ragged decoding is off from a plain forward pass by {gap:.2g} of the logits")

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        return KVCache(self._shapes, rows, capacity, dtype=self._dtype, device=self.device)

    def record_experts(self) -> None:
        """Records what routers that return their indices choose (Qwen3-MoE, Mixtral and their kin)."""
        routers = [m for m in self._model.modules() if type(m).__name__.endswith("TopKRouter")]
        if not routers:
            raise UserError(
                f"router_replay: {self._model.config.model_type} has no top-k router that the torch engine knows; set "
                "recipe.router_replay=off"
            )
        if self._routing is not None:
            return
        self._routing = []
        for router in routers:
            router.register_forward_hook(self._record)

    def _record(self, module: torch.nn.Module, inputs: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        assert self._routing is not None
        self._routing += [tensor for tensor in outputs if not tensor.is_floating_point()]

    @torch.inference_mode()
    def load_weights(self, state: Mapping[str, torch.Tensor]) -> None:
        copy_weights(self._model.state_dict(), dict(self._model.named_parameters()), state)
        if self._head is not self._lm_head:
            self._head.copy_(self._lm_head)

    def prefill(self, ids: torch.Tensor, lengths: torch.Tensor, cache: KVCache) -> Forward:
        rows, longest = ids.shape
        positions = torch.arange(longest, device=self.device).expand(rows, longest)
        hidden, experts = self._forward(ids, positions, longest, cache)
        last = hidden[torch.arange(rows, device=self.device), lengths - 1]
        return Forward(head_logits(last, self._head, self._head_dtype), experts)

    def decode(self, ids: torch.Tensor, positions: torch.Tensor, longest: int, cache: KVCache) -> Forward:
        hidden, experts = self._forward(ids[:, None], positions[:, None], longest, cache)
        logits = head_logits(hidden[:, 0], self._head, self._head_dtype)
        return Forward(logits, None if experts is None else experts[:, 0])

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, longest: int, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """ids, positions: [rows, tokens] -> hidden [rows, tokens, d], experts [rows, tokens, layers, top_k] or None."""
        beyond = torch.arange(longest, device=self.device) > positions[:, None, :, None]  # [rows, 1, tokens, longest]
        mask = torch.zeros(beyond.shape, dtype=self._dtype, device=self.device)
        mask.masked_fill_(beyond, torch.finfo(self._dtype).min)
        if self._routing is not None:
            self._routing.clear()
        output = self._body(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            **{self._cache_argument: _RaggedView(cache, positions, longest)},
        )
        experts = None
        if self._routing is not None:
            experts = torch.stack(self._routing, dim=1).unflatten(0, ids.shape).int()
        return output.last_hidden_state, experts
