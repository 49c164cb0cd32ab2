"""The shipped recipes: complete, sourced, and apart from one another in exactly what their names say."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from scalerl.cli.compose import compose, options
from scalerl.rl.recipe import Recipe
from scalerl.rl.run import start_run

# What each recipe changes of `scalerl`. The comments in the YAML name the sources.
DIFFERENCES: dict[str, dict[str, Any]] = {
    "scalerl": {},
    "base": {
        "off_policy": "ppo",
        "loss": "dapo",
        "loss_aggregation": "sample",
        "advantage_norm": "prompt",
        "logits_precision": "model",
        "zero_variance": "keep",
        "resample_positive": True,
    },
    "deepseek_grpo": {
        "off_policy": "ppo",
        "loss": "grpo",
        "loss_aggregation": "sample",
        "advantage_norm": "prompt",
        "logits_precision": "model",
        "zero_variance": "keep",
        "resample_positive": True,
    },
    "qwen_dapo": {
        "off_policy": "ppo",
        "loss": "dapo",
        "advantage_norm": "prompt",
        "logits_precision": "model",
        "resample_positive": True,
        "prompts_per_batch": 80,
    },
    "magistral": {
        "loss": "dapo",
        "advantage_norm": "prompt",
        "logits_precision": "model",
        "resample_positive": True,
        "prompts_per_batch": 80,
    },
    "minimax": {
        "off_policy": "ppo",
        "advantage_norm": "prompt",
        "resample_positive": True,
        "prompts_per_batch": 80,
    },
    "deepseek_v32": {
        "off_policy": "ppo",
        "loss": "grpo",
        "loss_aggregation": "sample",
        "advantage_norm": "none",
        "logits_precision": "model",
        "zero_variance": "keep",
        "resample_positive": True,
        "offpolicy_sequence_mask": 0.1,
        "kl": "k3_as_loss",
        "kl_params.beta_by_task": dict.fromkeys(("addition", "countdown", "math", "sums"), 1e-4),
        "kl_params.importance_weighted": True,
        "sampling_mask": "keep",
        "sampling.top_p": 0.95,
    },
    "seq_mis": {
        "off_policy": "ppo",
        "loss": "grpo",
        "loss_aggregation": "sample",
        "advantage_norm": "prompt",
        "logits_precision": "model",
        "zero_variance": "keep",
        "resample_positive": True,
        "ratio": "trainer_old",
        "mismatch_correction": "mis_sequence",
    },
}
SMALL = [  # the task and the recipes' own filters are such that a few hundred warm-up steps give mixed groups
    "model.architecture.hidden_size=32",
    "model.architecture.layers=2",
    "model.architecture.intermediate_size=32",
    "model.warm_start.steps=300",
    "model.warm_start.batch_size=16",
    "task.demonstrations.slip=0.3",
    "task.min_digits=1",
    "task.max_digits=1",
    "task.n_train=40",
    "engine.process=inline",
    "engine.slots=64",
    "recipe.prompts_per_batch=4",
    "recipe.group_size=4",
    "recipe.generation_budget=32",
    "recipe.interrupt.budget_low=7",
    "recipe.interrupt.budget_high=10",
    "eval.n_prompts=4",
    "eval.n_samples=2",
    "steps=2",
]


def _text(name: str) -> str:
    return (files("scalerl.conf") / "recipe" / f"{name}.yaml").read_text(encoding="utf-8")


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, dict) and key != "beta_by_task"
        found |= _flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return found


def _fields(model: Any, prefix: str = "") -> set[str]:
    """Dotted names of every field of a pydantic model, through the models nested in it."""
    found: set[str] = set()
    for name, field in model.model_fields.items():
        nested = getattr(field.annotation, "model_fields", None)
        found |= _fields(field.annotation, f"{prefix}{name}.") if nested else {prefix + name}
    return found


def test_the_table_names_every_shipped_recipe() -> None:
    assert options("recipe") == sorted(DIFFERENCES)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_states_every_field_and_validates(name: str) -> None:
    recipe = Recipe(**yaml.safe_load(_text(name)))
    assert recipe.name == name
    stated = set(_flat(yaml.safe_load(_text(name))))
    assert {key for key in stated if not key.startswith("loss_params.")} == _fields(Recipe) - {"loss_params"}
    composed = compose([f"recipe={name}"])
    assert composed.config.recipe.loss == recipe.loss
    assert composed.sources["recipe.loss"] == f"recipe/{name}.yaml"


@pytest.mark.parametrize("name", DIFFERENCES)
def test_every_value_has_its_source(name: str) -> None:
    for line in _text(name).splitlines():
        if line.startswith("#") or line.endswith(":") or line.startswith("name:"):
            continue
        assert line.partition(" # ")[2].strip(), line


@pytest.mark.parametrize("name", DIFFERENCES)
def test_differs_from_scalerl_in_exactly_its_table(name: str) -> None:
    ours, theirs = _flat(yaml.safe_load(_text("scalerl"))), _flat(yaml.safe_load(_text(name)))
    assert theirs == ours | DIFFERENCES[name] | {"name": name}
    assert all(ours[key] != value for key, value in DIFFERENCES[name].items())


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("name", DIFFERENCES)
def test_trains_end_to_end(name: str, cache: Path, tmp_path: Path) -> None:
    rows, evaluations = _run([f"recipe={name}"], cache, tmp_path / name)
    assert [row["step"] for row in rows] == [1, 2]
    assert [row["step"] for row in evaluations] == [0, 2]
    recipe = compose([f"recipe={name}"]).config.recipe
    for row in rows:
        assert row["mismatch_k3"] >= 0 and row["grad_norm"] > 0
        assert row["lag_max"] <= recipe.k - (recipe.off_policy == "ppo")
        assert ("reference_k1" in row) == (recipe.kl != "none")
    assert rows[-1]["optimizer_steps"] == rows[-1]["version"] == 2


@pytest.mark.parametrize(
    "overrides",
    [
        ["recipe.off_policy=pipeline", "recipe.k=0"],
        ["recipe.off_policy=pipeline", "recipe.k=1", "recipe.ratio=trainer_old"],
        ["recipe.off_policy=ppo", "recipe.k=2", "recipe.ratio=trainer_old"],
    ],
)
def test_updates_per_batch(overrides: list[str], cache: Path, tmp_path: Path) -> None:
    """Two passes over each batch: version and lag count batches, `optimizer_steps` the updates."""
    rows, _ = _run([*overrides, "recipe.updates_per_batch=2", "recipe.zero_variance=keep"], cache, tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert (rows[-1]["optimizer_steps"], rows[-1]["version"]) == (4, 2)
    assert all(row["lag_max"] <= 1 for row in rows)


def _run(overrides: list[str], cache: Path, path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    composed = compose([*overrides, *SMALL, f"model.cache_dir={cache}"], run_dir=str(path))
    start_run(composed.config, composed.sources)
    metrics, evaluations = (
        [json.loads(line) for line in (path / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "eval.jsonl")
    )
    return metrics, evaluations
