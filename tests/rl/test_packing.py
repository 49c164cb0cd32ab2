"""Several sequences in one line: what padded lines give, to rounding, and nothing of the neighbour."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from scalerl.rl.batch import Row, assemble
from scalerl.rl.errors import UserError
from scalerl.rl.micro_batches import MicroBatch, balance, micro_batch
from scalerl.rl.models.packing import require_packing
from scalerl.rl.models.router_replay import replay
from scalerl.rl.policy import Policy

SHAPE: dict[str, Any] = {
    "vocab_size": 12,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
CPU = torch.device("cpu")


def build(kind: str, attention: str = "sdpa") -> Any:
    shape = {**SHAPE, "attn_implementation": attention}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "llama":
            return LlamaForCausalLM(LlamaConfig(**shape)).eval()
        if kind == "moe":
            experts = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts)).eval()
        window = {
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention"],
        }
        return Qwen3ForCausalLM(Qwen3Config(**shape, **(window if kind == "sliding" else {}))).eval()


@pytest.fixture
def rows(make_completion: Callable[..., Any], make_group: Callable[..., Any], make_recipe: Callable[..., Any]):
    """Seven completions of 1 to 17 tokens, each with the experts that a generator would have recorded."""
    completions = [make_completion(n, seed=n) for n in (17, 9, 5, 5, 3, 2, 1)]
    rng = np.random.default_rng(0)
    recorded = [
        replace(
            c, experts=np.stack([rng.permuted(np.tile(np.arange(4), (len(c.tokens) + 1, 2, 1)), axis=-1)])[0, ..., :2]
        )
        for c in completions
    ]
    groups = [make_group(recorded, [True, False, True, False, True, False, True])]
    return assemble(groups, make_recipe()).rows


def scores(model: Any, micro: MicroBatch, recipe: Any) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]:
    """(log-probabilities by row, the gradient of their weighted sum)."""
    policy = Policy(model, recipe, dtype=torch.float32, head_dtype=torch.float32, chunk=64)
    model.zero_grad()
    if micro.experts is not None:
        with replay(model, micro.experts):
            logp = policy(micro).logp
    else:
        logp = policy(micro).logp
    (logp * micro.tokens.advantage).sum().backward()
    parts = logp.detach().split([len(row.completion.tokens) for row in micro.rows])
    gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {row.order: part for row, part in zip(micro.rows, parts, strict=True)}, gradient


def packed_lines(rows: list[Row]) -> list[list[Row]]:
    (lines,) = balance(rows, 1, 60, "packed")[0]
    assert [len(line) for line in lines] != [1] * len(lines) and max(map(len, lines)) > 2
    return lines


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "sliding", "moe"])
def test_packed_lines_equal_padded_ones(kind: str, attention: str, rows: list[Row], make_recipe: Any) -> None:
    """Log-probabilities and gradients; of the mixture of experts under its router replay."""
    model, recipe = build(kind, attention), make_recipe(router_replay="r3" if kind == "moe" else "off")
    packed = micro_batch(packed_lines(rows), recipe, CPU, "packed")
    padded = micro_batch([[row] for row in rows], recipe, CPU, "padded")
    assert packed.positions is not None and padded.positions is None
    assert packed.input_ids.numel() < padded.input_ids.numel() / 2
    found, gradient = scores(model, packed, recipe)
    expected, wanted = scores(model, padded, recipe)
    assert found.keys() == expected.keys() == {row.order for row in rows}
    for order, logp in expected.items():
        torch.testing.assert_close(found[order], logp, rtol=0, atol=1e-6)
    for name, value in wanted.items():
        assert (gradient[name] - value).norm() <= 1e-6 * max(1.0, float(value.norm())), name


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "sliding", "moe"])
def test_a_sequence_sees_nothing_of_its_neighbours(kind: str, attention: str, rows: list[Row], make_recipe: Any):
    """Every other row of each line gets other tokens: the rest keep their log-probabilities to the bit."""
    model, recipe = build(kind, attention), make_recipe()
    lines = packed_lines(rows)
    micro = micro_batch(lines, recipe, CPU, "packed")
    before, _ = scores(model, micro, recipe)
    for parity in (0, 1):
        changed, kept = micro.input_ids.clone(), []
        for i, line in enumerate(lines):
            start = 0
            for number, row in enumerate(line):
                if number % 2 == parity:
                    changed[i, start : start + row.length] = (changed[i, start : start + row.length] + 3) % 12
                else:
                    kept.append(row.order)
                start += row.length
        after, _ = scores(model, replace(micro, input_ids=changed), recipe)
        assert kept
        for order in before:
            assert torch.equal(before[order], after[order]) == (order in kept)


def test_without_their_positions_they_would_see_them(rows: list[Row], make_recipe: Any) -> None:
    model, recipe = build("llama"), make_recipe()
    micro = micro_batch(packed_lines(rows), recipe, CPU, "packed")
    apart, _ = scores(model, micro, recipe)
    together, _ = scores(model, replace(micro, positions=None), recipe)
    assert max((apart[order] - together[order]).abs().max() for order in apart) > 1e-2


@pytest.mark.parametrize("kind", ["llama", "qwen3", "sliding", "moe"])
def test_models_that_can(kind: str) -> None:
    require_packing(build(kind))


def test_a_recurrent_model_is_refused() -> None:
    config = MambaConfig(vocab_size=12, hidden_size=16, state_size=4, num_hidden_layers=1, initializer_range=0.3)
    with pytest.raises(UserError, match=r"trainer\.layout=packed, but sequences in one line of mamba see each other"):
        require_packing(MambaForCausalLM(config).eval())
