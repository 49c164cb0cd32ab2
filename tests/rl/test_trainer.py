"""The trainer's own bookkeeping: whatever the micro-batches, one step is the same step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scalerl.cli.compose import compose
from scalerl.rl.run import start_run

torch.set_num_threads(1)
SMALL = (
    "model.architecture.hidden_size=32",
    "model.architecture.layers=2",
    "model.architecture.intermediate_size=32",
    "model.warm_start.steps=400",
    "model.warm_start.batch_size=16",
    "task.min_digits=1",
    "task.max_digits=1",
    "task.n_train=40",
    "recipe.prompts_per_batch=6",
    "recipe.group_size=4",
    "recipe.k=0",
    "recipe.zero_variance=keep",
    "recipe.generation_budget=32",
    "recipe.interrupt.budget_low=7",
    "recipe.interrupt.budget_high=10",
    "engine.slots=24",
    "engine.process=inline",
    "eval.n_prompts=2",
    "eval.n_samples=2",
    "steps=2",
)
# Shares and bands so wide that tokens are chosen in a batch as small as this.
CONTROLS = {
    "none": (),
    "clip_cov": ("recipe.clip_cov.share=0.3", "recipe.clip_cov.cov_low=-100", "recipe.clip_cov.cov_high=100"),
    "kl_cov": ("recipe.kl_cov.share=0.3",),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def last_step(run: Path, cache: Path, *overrides: str) -> dict[str, Any]:
    config = compose([*SMALL, f"model.cache_dir={cache}", *overrides], run_dir=str(run)).config
    return json.loads((start_run(config, {}) / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize("control", CONTROLS)
def test_the_step_does_not_depend_on_the_micro_batches(control: str, cache: Path, tmp_path: Path):
    """Entropy control chooses among the tokens of all micro-batches, in an order that belongs to none of them. The
    second step is compared: at the first, on-policy, `kl_cov` sees a distance of zero, whose sign is rounding, and what
    that step did is still seen in the second."""
    tolerance = 2e-3 if control == "kl_cov" else 1e-4
    overrides = (f"recipe.entropy_control={control}", "recipe.off_policy=ppo", "recipe.k=2", *CONTROLS[control])
    splits = [("padded", 1), ("padded", 100), ("padded", 2048), ("packed", 200), ("shared", 1), ("shared", 200)]
    steps = [
        last_step(
            tmp_path / str(i), cache, *overrides, f"trainer.layout={layout}", f"trainer.micro_batch_tokens={tokens}"
        )
        for i, (layout, tokens) in enumerate(splits)
    ]
    for step in steps[1:]:
        for name in ("objective", "grad_norm", "mismatch_k3"):
            assert step[name] == pytest.approx(steps[0][name], rel=tolerance, abs=1e-6), name
    if control != "none":
        plain = last_step(tmp_path / "plain", cache, *overrides, "recipe.entropy_control=none")
        assert plain["grad_norm"] != pytest.approx(steps[0]["grad_norm"], rel=1e-2)
