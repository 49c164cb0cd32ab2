"""Loading a decoder, and the fast one: our own forward pass for the dense Llama, Qwen2 and Qwen3 families."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from scalerl.kernels.head import head_logits
from scalerl.rl.engines.base import ContextLimit, Decoder, Forward, copy_weights
from scalerl.rl.engines.hf_decoder import HFDecoder
from scalerl.rl.engines.kv_cache import KVCache, LayerShape
from scalerl.rl.errors import UserError
from scalerl.rl.models.load import load_model

DENSE_FAMILIES = ("llama", "qwen2", "qwen3")
# Rotary embeddings that depend on the position alone; the others also depend on the length of the sequence.
STATIC_ROPE = ("default", "linear", "llama3", "yarn")


def load_decoder(
    model_or_path: PreTrainedModel | str | Path,
    *,
    dtype: torch.dtype,
    head_dtype: torch.dtype,
    device: torch.device | str,
) -> Decoder:
    """A decoder for a Hugging Face causal LM, given as a folder or as a model (whose weights are copied, never shared).

    dtype: of weights, activations and KV cache; head_dtype: of the head's product. Dense Llama, Qwen2 and Qwen3 models
    get the fast `DenseDecoder`, any other model `HFDecoder`. Raises UserError for a folder without a model that loads.
    """
    device = torch.device(device)
    if isinstance(model_or_path, PreTrainedModel):
        model = model_or_path
    elif (Path(model_or_path) / "config.json").is_file():
        model = load_model(Path(model_or_path), dtype)
    else:
        raise UserError(f"model.path={model_or_path}: no config.json there; give the folder of a Hugging Face model")
    if _is_dense(model):
        return DenseDecoder(model, dtype=dtype, head_dtype=head_dtype, device=device)
    if model is model_or_path:
        model = copy.deepcopy(model)
    return HFDecoder(model, dtype=dtype, head_dtype=head_dtype, device=device)


def _is_dense(model: PreTrainedModel) -> bool:
    config = model.config
    return config.model_type in DENSE_FAMILIES and config.rope_parameters["rope_type"] in STATIC_ROPE


@dataclass(frozen=True)
class _Linear:
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: _Linear
    qk_norm: torch.Tensor | None  # [2, head_dim]: the norm of a query head and that of a key head
    out: _Linear
    mlp_norm: torch.Tensor
    gate_up: _Linear
    down: _Linear


# (layer, queries [..., heads, dim], keys and values [..., kv_heads, dim]) -> [..., heads * dim]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class DenseDecoder:
    """Llama, Qwen2 and Qwen3 with fused projections and grouped-query attention that never repeats keys or values.

    Log-probabilities equal the library's to rounding; cos and sin come from its own rotary module.
    """

    def __init__(
        self, model: PreTrainedModel, *, dtype: torch.dtype, head_dtype: torch.dtype, device: torch.device
    ) -> None:
        config = model.config
        self.device = device
        self.limit = ContextLimit.of(config)
        self._head_dtype = head_dtype
        self._dtype = dtype
        self._eps = config.rms_norm_eps
        self._act = ACT2FN[config.hidden_act]
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._qk_heads = torch.tensor([self._heads, self._kv_heads], device=device)
        self._targets: dict[str, torch.Tensor] = {}  # Hugging Face name: our tensor, or its part of a fused one

        source = dict(model.named_parameters(remove_duplicate=False))
        self._embed = self._hold("model.embed_tokens.weight", source)
        if config.tie_word_embeddings:
            self._targets["lm_head.weight"] = self._lm_head = self._embed
        else:
            self._lm_head = self._hold("lm_head.weight", source)
        # Converted once a weight update rather than once a tick; the same tensor where the dtypes agree.
        self._head = self._lm_head.to(head_dtype)
        self._norm = self._hold("model.norm.weight", source)
        self._layers = [self._layer(f"model.layers.{i}.", source) for i in range(config.num_hidden_layers)]
        positions = torch.arange(self.limit.tokens, device=model.device)[None]
        cos, sin = model.model.rotary_emb(torch.empty(0, dtype=dtype, device=model.device), positions)
        self._cos, self._sin = (table[0, :, None].to(device) for table in (cos, sin))  # [positions, 1, head_dim]
        self._head_dim = self._cos.shape[-1]
        self.load_weights(source)

    def _hold(self, name: str, source: Mapping[str, torch.Tensor]) -> torch.Tensor:
        tensor = torch.empty(source[name].shape, dtype=self._dtype, device=self.device)
        self._targets[name] = tensor
        return tensor

    def _fuse(self, prefix: str, names: tuple[str, ...], source: Mapping[str, torch.Tensor]) -> _Linear:
        """One linear map in place of several that read the same input."""

        def stack(kind: str) -> torch.Tensor:
            parts = [source[f"{prefix}{name}.{kind}"] for name in names]
            fused = torch.empty(sum(len(p) for p in parts), *parts[0].shape[1:], dtype=self._dtype, device=self.device)
            views = fused.split([len(p) for p in parts])
            self._targets.update({f"{prefix}{name}.{kind}": view for name, view in zip(names, views, strict=True)})
            return fused

        return _Linear(stack("weight"), stack("bias") if f"{prefix}{names[0]}.bias" in source else None)

    def _layer(self, prefix: str, source: Mapping[str, torch.Tensor]) -> _Layer:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return _Layer(
            attention_norm=self._hold(f"{prefix}input_layernorm.weight", source),
            qkv=self._fuse(attention, ("q_proj", "k_proj", "v_proj"), source),
            qk_norm=self._qk_norm(attention, source),
            out=self._fuse(attention, ("o_proj",), source),
            mlp_norm=self._hold(f"{prefix}post_attention_layernorm.weight", source),
            gate_up=self._fuse(mlp, ("gate_proj", "up_proj"), source),
            down=self._fuse(mlp, ("down_proj",), source),
        )

    def _qk_norm(self, prefix: str, source: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        if f"{prefix}q_norm.weight" not in source:
            return None
        norm = torch.empty(2, source[f"{prefix}q_norm.weight"].shape[0], dtype=self._dtype, device=self.device)
        self._targets[f"{prefix}q_norm.weight"], self._targets[f"{prefix}k_norm.weight"] = norm
        return norm

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        shape = LayerShape(self._kv_heads, self._head_dim, self._head_dim)
        return KVCache([shape] * len(self._layers), rows, capacity, dtype=self._dtype, device=self.device)

    def record_experts(self) -> None:
        raise UserError(
            "router_replay needs a mixture-of-experts model; this one is dense: set recipe.router_replay=off"
        )

    @torch.inference_mode()
    def load_weights(self, state: Mapping[str, torch.Tensor]) -> None:
        copy_weights(self._targets, self._targets, state)
        if self._head is not self._lm_head:
            self._head.copy_(self._lm_head)

    def prefill(self, ids: torch.Tensor, lengths: torch.Tensor, cache: KVCache) -> Forward:
        rows, longest = ids.shape

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            keys, values = cache.layers[layer]
            keys[:rows, :, :longest] = k
            values[:rows, :, :longest] = v
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).flatten(-2)

        hidden = self._forward(ids, self._cos[:longest], self._sin[:longest], attend)
        last = hidden[torch.arange(rows, device=self.device), lengths - 1]
        return Forward(head_logits(last, self._head, self._head_dtype), None)

    def decode(self, ids: torch.Tensor, positions: torch.Tensor, longest: int, cache: KVCache) -> Forward:
        rows = len(ids)
        index = torch.arange(rows, device=self.device)
        beyond = torch.arange(longest, device=self.device) > positions[:, None]
        bias = torch.zeros(rows, longest, dtype=self._dtype, device=self.device).masked_fill_(beyond, -torch.inf)
        bias = bias[:, None, None]
        scale = self._head_dim**-0.5

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = cache.layers[layer]
            keys[index, :, positions] = k
            values[index, :, positions] = v
            grouped = (q * scale).unflatten(1, (self._kv_heads, -1))  # [rows, kv_heads, heads per kv head, dim]
            scores = grouped @ keys[:rows, :, :longest].mT
            weights = scores.add_(bias).softmax(-1, dtype=torch.float32).to(self._dtype)
            return (weights @ values[:rows, :, :longest]).flatten(1)

        hidden = self._forward(ids, self._cos[positions], self._sin[positions], attend)
        return Forward(head_logits(hidden, self._head, self._head_dtype), None)

    def _forward(self, ids: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """ids: [...] -> final hidden states [..., d]; cos, sin broadcast over [..., heads, head_dim]."""
        x = F.embedding(ids, self._embed)
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv(self._rms(x, layer.attention_norm)).unflatten(-1, (-1, self._head_dim))
            qk, v = qkv.split([self._heads + self._kv_heads, self._kv_heads], dim=-2)
            if layer.qk_norm is not None:
                qk = self._rms(qk, layer.qk_norm.repeat_interleave(self._qk_heads, dim=0))
            q, k = _rotate(qk, cos, sin).split([self._heads, self._kv_heads], dim=-2)
            x = x + layer.out(attend(i, q, k, v))
            gate, up = layer.gate_up(self._rms(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(self._act(gate).mul_(up))
        return self._rms(x, self._norm)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)).to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
