"""Router replay on a small Qwen3-MoE with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig
from transformers import Qwen3MoeForCausalLM as Qwen3Moe

from scalerl.rl.errors import UserError
from scalerl.rl.models.router_replay import gates, replay, replayable_routers

SHAPE: dict[str, Any] = dict(
    vocab_size=23,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
)
IDS = torch.arange(12).view(2, 6) % 23


def moe(*, normalise: bool = True, **changed: Any) -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SHAPE,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        norm_topk_prob=normalise,
        initializer_range=0.3,
        **changed,
    )
    return Qwen3Moe(config)


def own_choice(model: Any) -> Tensor:
    """[n, S, layers, K]: what the routers choose by themselves on IDS."""
    chosen: list[Tensor] = []
    hooks = [r.register_forward_hook(lambda *call: chosen.append(call[2][2])) for r in replayable_routers(model)]
    logits(model)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).unflatten(0, IDS.shape)


def logits(model: Any) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def test_worked_example() -> None:
    s = torch.tensor([[1.3, 0.1, 2.5, 1.9]], dtype=torch.float64, requires_grad=True)
    g = gates(s, torch.tensor([[0, 2]]), normalise=True)
    expected = torch.tensor([[0.2315, 0.7685]], dtype=torch.float64)
    torch.testing.assert_close(g, expected, rtol=0, atol=5e-5)
    assert torch.autograd.gradcheck(lambda x: gates(x, torch.tensor([[0, 2]]), normalise=True), (s,))
    (gradient,) = torch.autograd.grad(g[0, 0], s)
    torch.testing.assert_close(gradient[0, [0, 2]], (g[0, 0] * g[0, 1] * torch.tensor([1, -1])).detach())
    torch.testing.assert_close(gradient[0, [1, 3]], torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-15)


def test_without_norm_topk_prob_the_sum_runs_over_all_experts() -> None:
    s = torch.tensor([[1.3, 0.1, 2.5, 1.9]])
    g = gates(s, torch.tensor([[0, 2]]), normalise=False)
    torch.testing.assert_close(g, s.softmax(-1)[:, [0, 2]])
    assert g.sum() < 0.9


@pytest.mark.parametrize("normalise", [True, False])
def test_replaying_its_own_choice_changes_nothing(normalise: bool) -> None:
    model = moe(normalise=normalise)
    before, experts = logits(model), own_choice(model)
    with replay(model, experts.int()):
        assert torch.equal(logits(model), before)
    with replay(model, torch.full_like(experts, -1)):
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("normalise", [True, False])
def test_another_choice_is_followed_and_its_gradient_reaches_the_router(normalise: bool) -> None:
    """Against a block written out with I as a dense 0/1 mask."""
    model = moe(normalise=normalise)
    own = own_choice(model)
    experts = (own + 1) % 5
    block = model.model.layers[0].mlp
    x = torch.randn(*IDS.shape, 16)
    chosen = torch.zeros(*IDS.shape, 5).scatter(-1, experts[:, :, 0], 1.0)
    powers = (x @ block.gate.weight.mT).exp()
    normaliser = ((chosen if normalise else 1) * powers).sum(-1, keepdim=True)
    everything = torch.stack([_expert(block.experts, e, x) for e in range(5)], dim=-1)
    expected = (everything * (chosen * powers / normaliser)[:, :, None]).sum(-1)
    with replay(model, experts):
        found = block(x)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, block(x), atol=1e-3)
    seed = torch.randn_like(found)
    wanted = torch.autograd.grad(expected, block.gate.weight, seed)[0]
    torch.testing.assert_close(torch.autograd.grad(found, block.gate.weight, seed)[0], wanted, atol=1e-4, rtol=1e-4)
    with replay(model, experts):
        logits(model).square().sum().backward()
    assert all(router.weight.grad.abs().max() > 0 for router in replayable_routers(model))


def _expert(experts: Any, number: int, x: Tensor) -> Tensor:
    gate, up = (x @ experts.gate_up_proj[number].mT).chunk(2, dim=-1)
    return (experts.act_fn(gate) * up) @ experts.down_proj[number].mT


def test_layers_without_a_router_are_not_counted() -> None:
    model = moe(mlp_only_layers=[1])
    experts = own_choice(model)
    assert experts.shape == (2, 6, 2, 2)
    with replay(model, experts):
        logits(model)


def test_the_model_is_itself_again_after_an_error() -> None:
    model = moe()
    before, experts = logits(model), own_choice(model)
    with pytest.raises(ZeroDivisionError), replay(model, (experts + 1) % 5):
        raise ZeroDivisionError
    assert torch.equal(logits(model), before)


def test_a_wrong_number_of_layers_is_an_error() -> None:
    model = moe()
    with pytest.raises(ValueError, match="model has"), replay(model, own_choice(model)[:, :, :2]):
        pass


def test_models_that_cannot_be_replayed_are_refused() -> None:
    with pytest.raises(UserError, match=r"llama has no top-k router: set recipe\.router_replay=off"):
        replayable_routers(LlamaForCausalLM(LlamaConfig(**SHAPE)))
    mixtral = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2))
    with pytest.raises(UserError, match="MixtralTopKRouter"):
        replayable_routers(mixtral)
