"""The gradient made with the logits, chunk by chunk, is the objective's, for every recipe that is said to allow it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scalerl.rl import policy as module
from scalerl.rl.batch import assemble
from scalerl.rl.micro_batches import MicroBatch, micro_batch
from scalerl.rl.objective import is_tokenwise, objective, objective_gradient
from scalerl.rl.policy import Policy

RECIPES: dict[str, tuple[bool, dict[str, Any]]] = {
    "cispo": (True, {"loss_params": {"cispo": {"eps_max": 1.2}}}),
    "dapo": (True, {"loss": "dapo"}),
    "reinforce, tis_token": (True, {"loss": "reinforce", "mismatch_correction": "tis_token", "mismatch_cap": 1.2}),
    "grpo, trainer_old": (True, {"loss": "grpo", "ratio": "trainer_old"}),
    "weighted k3": (True, {"kl": "k3_as_loss", "kl_params": {"beta": 0.3, "importance_weighted": True}}),
    "clip_cov": (True, {"entropy_control": "clip_cov"}),
    "kl_cov": (True, {"entropy_control": "kl_cov"}),
    "gspo": (False, {"loss": "gspo", "loss_params": {"gspo": {"eps_low": 0.05, "eps_high": 0.1}}}),
    "sequence mask": (False, {"offpolicy_sequence_mask": 0.1}),
    "tis_sequence": (False, {"loss": "reinforce", "mismatch_correction": "tis_sequence"}),
    "mis_geometric": (False, {"loss": "reinforce", "mismatch_correction": "mis_geometric", "mismatch_cap": 1.1}),
}


class Bigram(nn.Module):
    """Hidden states that depend on the token alone: a causal LM without its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)

    def base_model(self, input_ids: Tensor, position_ids: Tensor | None, use_cache: bool) -> Any:
        return SimpleNamespace(last_hidden_state=self.embed(input_ids))

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


@pytest.fixture
def problem(make_completion: Callable[..., Any], make_group: Callable[..., Any], make_recipe: Callable[..., Any]):
    def make(changed: dict[str, Any]) -> tuple[Any, Bigram, MicroBatch]:
        recipe = make_recipe(**changed)
        completions = [make_completion(n, seed=n, injected=(1,) if n == 9 else ()) for n in (9, 6, 4, 3)]
        rows = assemble([make_group(completions, [True, False, False, True])], recipe).rows
        torch.manual_seed(0)
        model, micro = Bigram(), micro_batch([[row] for row in rows], recipe, torch.device("cpu"), "padded")
        n = len(micro.targets)
        micro.tokens = replace(
            micro.tokens,
            logp_gen=micro.tokens.logp_gen - 1.5,
            logp_old=micro.tokens.logp_gen - 1.5 + 0.3 * torch.randn(n),
            logp_ref=micro.tokens.logp_gen - 1.5 + 0.5 * torch.randn(n),
            policy_keep=torch.rand(n) < 0.7 if recipe.entropy_control == "clip_cov" else None,
            kl_cov=torch.rand(n) < 0.3 if recipe.entropy_control == "kl_cov" else None,
        )
        return recipe, model, micro

    return make


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_the_objectives_gradient_where_each_token_stands_for_itself(
    name: str, problem: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LEAST_ROWS", 1)
    monkeypatch.setattr(module, "VOCABULARY_TILE", 36)  # three tokens of twelve logits
    allowed, changed = RECIPES[name]
    recipe, model, micro = problem(changed)
    assert is_tokenwise(recipe) == allowed
    policy = Policy(model, recipe, dtype=torch.float32, head_dtype=torch.float32, chunk=1)
    scores = policy(micro)
    value, _ = objective(scores.score, None, micro.tokens, recipe)
    right = torch.autograd.grad(value, tuple(model.parameters()))
    one = policy(micro, coefficient=objective_gradient(micro.tokens, recipe))
    assert one.weighted is not None
    torch.testing.assert_close(one.logp, scores.logp.detach(), rtol=0, atol=1e-6)
    found = torch.autograd.grad(one.weighted, tuple(model.parameters()))
    assert all(g.norm() > 1e-3 for g in right)
    same = all((ours - wanted).norm() <= 1e-5 * wanted.norm() for ours, wanted in zip(found, right, strict=True))
    assert same == allowed


def test_a_bonus_and_auxiliary_tokens_need_two_passes(make_recipe: Callable[..., Any]) -> None:
    assert not is_tokenwise(make_recipe(entropy_control="bonus"))
    auxiliary = {"sampling_mask": "aux_token", "k": 0, "loss": "reinforce", "sampling": {"top_p": 0.9}}
    assert not is_tokenwise(make_recipe(**auxiliary))
