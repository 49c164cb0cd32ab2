"""The built-in model: a small Llama, saved as an ordinary Hugging Face folder that any engine loads."""

from __future__ import annotations

from typing import Any

import torch

from scalerl.rl.config import Architecture


def build_model(architecture: Architecture, tokenizer: Any, seed: int) -> Any:
    """A randomly initialised LlamaForCausalLM in fp32 with tied embeddings, for the tokenizer's vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.intermediate_size,
        num_hidden_layers=architecture.layers,
        num_attention_heads=architecture.heads,
        num_key_value_heads=architecture.kv_heads,
        max_position_embeddings=architecture.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": architecture.rope_theta},
        initializer_range=architecture.initializer_range,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):  # a cached model and a new one leave the caller's generator alike
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
