"""Recipes, hand-made tokens and scored groups for the tests of the objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from scalerl.rl.models.tokenizer import character_tokenizer
from scalerl.rl.recipe import Recipe
from scalerl.rl.tokens import Tokens
from scalerl.rl.types import Completion, Prompt, ScoredGroup


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_recipe() -> Callable[..., Recipe]:
    """The recipe `scalerl` with whole fields replaced; `kl_params` and the like take the entries that change."""
    shipped = yaml.safe_load((files("scalerl.conf") / "recipe" / "scalerl.yaml").read_text(encoding="utf-8"))

    def make(**changed: Any) -> Recipe:
        values = dict(shipped)
        for name, value in changed.items():
            values[name] = shipped[name] | value if isinstance(value, dict) else value
        return Recipe(**values)

    return make


@pytest.fixture(scope="session")
def make_tokens() -> Callable[..., Tokens]:
    """Float64 tokens of one completion, unless told otherwise; numbers are given to every token."""

    def make(logp_gen: Sequence[float], **given: Any) -> Tokens:
        n = len(logp_gen)
        values: dict[str, Any] = {"advantage": 1.0, "weight": 1.0, "kl_beta": 0.0} | given
        for name, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                value = [float(value)] * n
            values[name] = torch.tensor(value, dtype=torch.float64) if isinstance(value, Sequence) else value
        for name, default, dtype in (
            ("mask", True, torch.bool),
            ("completion", 0, torch.int64),
            ("versions", 0, torch.int64),
        ):
            values[name] = torch.as_tensor(values.get(name, [default] * n)).to(dtype)
        return Tokens(
            logp_gen=torch.as_tensor(logp_gen, dtype=torch.float64),
            n_completions=int(values["completion"].max()) + 1 if n else 0,
            **values,
        )

    return make


@pytest.fixture(scope="session")
def make_completion() -> Callable[..., Completion]:
    """n tokens with ids and log-probabilities of their own."""

    def make(
        n: int,
        *,
        injected: Sequence[int] = (),
        truncated: bool = False,
        interrupted: bool = False,
        seed: int = 0,
        versions: Sequence[int] | None = None,
    ) -> Completion:
        rng = np.random.default_rng([n, seed])
        forced = np.isin(np.arange(n), injected)
        return Completion(
            tokens=rng.integers(0, 5, n).astype(np.int32),
            logprobs=np.where(forced, 0, np.log(rng.uniform(0.1, 0.9, n))).astype(np.float32),
            versions=np.array([0] * n if versions is None else versions, dtype=np.int32),
            injected=forced,
            finish="length" if truncated else "stop",
            interrupted=interrupted,
        )

    return make


@pytest.fixture(scope="session")
def make_group() -> Callable[..., ScoredGroup]:
    """A group of completions with their verdicts: True, False, or None for a verifier that failed."""

    def make(completions: Sequence[Completion], verdicts: Sequence[bool | None], *, group: int = 0, task: str = "t"):
        return ScoredGroup(
            group=group,
            epoch=0,
            prompt=Prompt(id=str(group), text="", answer="", task=task),
            prompt_ids=(1, 2 + group % 3),
            completions=tuple(completions),
            correct=np.array([v is True for v in verdicts]),
            verifier_error=np.array([v is None for v in verdicts]),
            unparsed=np.zeros(len(verdicts), dtype=bool),
            masked=np.zeros(len(verdicts), dtype=bool),
            shaping=np.zeros(len(verdicts)),
        )

    return make


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE with random weights, an ordinary Hugging Face folder with the character tokenizer."""
    path, tokenizer = tmp_path_factory.mktemp("moe"), character_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        initializer_range=0.3,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with the character tokenizer, an ordinary Hugging Face folder."""
    path, tokenizer = tmp_path_factory.mktemp("llama"), character_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
