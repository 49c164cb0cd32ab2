"""Tiny random models whose next-token distributions are far from uniform, and the plain ways to run and check them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from scalerl.rl.engines.decoder import load_decoder
from scalerl.rl.engines.torch_engine import TorchEngine
from scalerl.rl.types import Completion, Interrupt, Request, Sampling

VOCAB = 23
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.25,
)
ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
ROPE["original_max_position_embeddings"] = 16
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "llama_tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama3_rope": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=ROPE)),
    "llama_dynamic_rope": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
    "qwen3_tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    ),
}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_model() -> Callable[..., PreTrainedModel]:
    def make(name: str = "llama", seed: int = 0) -> PreTrainedModel:
        torch.manual_seed(seed)
        model = MODELS[name]().eval()
        for (
            key,
            parameter,
        ) in model.named_parameters():  # biases and norms start at 0 and 1: a swapped one would not show
            if parameter.ndim == 1:
                parameter.data += 0.3 * torch.randn_like(parameter) * (1 if "norm" in key or "bias" in key else 0)
        return model

    return make


@pytest.fixture
def make_engine() -> Callable[..., TorchEngine]:
    def make(
        model: PreTrainedModel,
        *,
        slots: int = 4,
        max_tokens: int = 12,
        stop_ids: tuple[int, ...] = (0, 1),
        temperature: float = 1.0,
        version: int = 0,
        dtype: torch.dtype = torch.float32,
        interrupt: Interrupt | None = None,
        **sampling: Any,
    ) -> TorchEngine:
        decoder = load_decoder(model, dtype=dtype, head_dtype=torch.float32, device="cpu")
        settings = Sampling(temperature, max_tokens, stop_ids, interrupt=interrupt, **sampling)
        return TorchEngine(decoder, slots=slots, sampling=settings, version=version)

    return make


def finish(engine: TorchEngine) -> dict[int, tuple[Completion, ...]]:
    groups: dict[int, tuple[Completion, ...]] = {}
    for _ in range(10_000):
        if engine.idle:
            return groups
        groups.update({group.group: group.completions for group in engine.tick()})
    raise AssertionError("the engine never became idle")


@pytest.fixture
def run() -> Callable[[TorchEngine, list[Request]], dict[int, tuple[Completion, ...]]]:
    """Submits requests, ticks until idle, and gives the completions of each group."""

    def submit_and_finish(engine: TorchEngine, requests: list[Request]) -> dict[int, tuple[Completion, ...]]:
        engine.submit(requests)
        return finish(engine)

    return submit_and_finish


@pytest.fixture
def full_forward() -> Callable[..., torch.Tensor]:
    """Log-probabilities [T, V] that a plain forward pass of the library's model gives a completion's positions."""

    @torch.inference_mode()
    def logprobs(
        model: PreTrainedModel, request: Request, completion: Completion, temperature: float = 1.0
    ) -> torch.Tensor:
        ids = torch.tensor([[*request.prompt_ids, *completion.tokens.tolist()]])
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
        return (logits[len(request.prompt_ids) - 1 : -1] / temperature).log_softmax(-1)

    return logprobs
