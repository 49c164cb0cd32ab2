"""Router replay from the engine's record to the trainer's gates, on a tiny Qwen3-MoE."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scalerl.cli.compose import compose
from scalerl.rl.config import RunConfig
from scalerl.rl.errors import UserError
from scalerl.rl.models.load import load_model
from scalerl.rl.models.router_replay import replay, replayable_routers
from scalerl.rl.run import Run, start_run
from scalerl.rl.trainer import Trainer
from scalerl.rl.types import ScoredGroup

SMALL = [
    "model.dtype=float32",
    "model.head_dtype=float32",
    "task.max_digits=4",
    "task.n_train=64",
    "engine.process=inline",
    "engine.slots=8",
    "engine.ticks_per_step=10",
    "recipe.k=2",
    "recipe.prompts_per_batch=2",
    "recipe.group_size=3",
    "recipe.zero_variance=keep",
    "recipe.truncation=score",
    "recipe.entropy_control=bonus",  # a random model solves nothing: this is its gradient
    "recipe.router_replay=r3",
    "trainer.lr=1e-2",
    "trainer.warmup_steps=0",
    "eval.n_prompts=2",
    "eval.n_samples=2",
    "eval.every=100",
    "steps=3",
]


def configure(model: list[str], run_dir: Path, *changed: str) -> RunConfig:
    return compose([*model, *SMALL, *changed], run_dir=str(run_dir)).config


@pytest.fixture
def moe(moe_folder: Path) -> list[str]:
    return ["model=hf", f"model.path={moe_folder}"]


def test_a_run_on_a_mixture_of_experts(moe: list[str], tmp_path: Path) -> None:
    path = start_run(configure(moe, tmp_path / "run"), {})
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [row["optimizer_steps"] for row in rows] == [1, 2, 3]
    assert rows[0]["max_abs_log_ratio"] < 1e-4  # the same weights, and the same experts
    assert rows[2]["lag_max"] > 0
    assert rows[2]["mismatch_k3"] > 1e-6  # tokens of stale weights, through the experts that these chose


def test_the_policy_goes_through_the_recorded_experts(
    moe: list[str], moe_folder: Path, tmp_path: Path, make_group: Callable[..., ScoredGroup]
) -> None:
    """Other routers than the generator's: the trainer's log-probabilities are those of a pass under its experts."""
    config = configure(moe, tmp_path / "run", "recipe.ratio=trainer_old", "trainer.micro_batch_tokens=64")
    run = Run(config, tmp_path)
    (prompt,) = run.task.train_prompts()[:1]
    request = run.requests.training(0, prompt)
    run.generator.call("submit", [request])
    (completed,) = run.generator.call("run_until", [0]).groups
    run.log.close()
    group = replace(make_group(completed.completions, [True, False, False]), prompt_ids=request.prompt_ids)

    trainer = Trainer(config, moe_folder)
    for router in replayable_routers(trainer.model):
        router.weight.data += 0.5 * torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(1))
    prepared = trainer.prepare([group], version=0)
    assert len(prepared.micro_batches) > 1
    rows = [row for micro in prepared.micro_batches for row in micro.rows]
    found = torch.cat([m.tokens.logp_old for m in prepared.micro_batches if m.tokens.logp_old is not None])
    found = dict(zip([row.order for row in rows], found.split([len(r.completion.tokens) for r in rows]), strict=True))
    own_differs = False
    for order, completion in enumerate(completed.completions):
        ids = torch.tensor([[*request.prompt_ids, *completion.tokens.tolist()]])
        assert completion.experts is not None
        with torch.no_grad(), replay(trainer.model, torch.as_tensor(completion.experts)[None]):
            expected = _logprobs(trainer.model, ids, len(request.prompt_ids))
        torch.testing.assert_close(found[order], expected, rtol=0, atol=1e-4)
        own = _logprobs(trainer.model, ids, len(request.prompt_ids))
        own_differs |= bool((own - expected).abs().max() > 1e-2)
    assert own_differs
    trainer.update(prepared, step=0)
    assert all(router.weight.grad.abs().max() > 0 for router in replayable_routers(trainer.model))


def _logprobs(model: Any, ids: torch.Tensor, n_prompt: int) -> torch.Tensor:
    """Of the completion's tokens, without the last token's own (unfed) position."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0]
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[n_prompt - 1 :, 0]


def test_a_dense_model_is_refused_and_leaves_no_folder(tmp_path: Path) -> None:
    dense = [
        "model.architecture.hidden_size=32",
        "model.architecture.layers=1",
        "model.warm_start.steps=0",
        "trainer.layout=padded",
        f"model.cache_dir={tmp_path / 'cache'}",
    ]
    config = configure(dense, tmp_path / "run")
    with pytest.raises(UserError, match=r"router_replay.*mixture-of-experts.*set recipe\.router_replay=off"):
        start_run(config, {})
    assert not (tmp_path / "run").exists()


def test_flops_count_the_experts_that_a_token_goes_through(moe: list[str], moe_folder: Path, tmp_path: Path) -> None:
    trainer = Trainer(configure(moe, tmp_path / "run"), moe_folder)
    model = load_model(moe_folder)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    everything = sum(p.numel() for p in model.parameters()) - model.model.embed_tokens.weight.numel()
    assert trainer.flop_model.n_active == everything - experts // 2  # 2 of 4 experts, an untied head
