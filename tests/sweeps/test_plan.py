"""Plans: which arms, and that each differs from the base in what its name says and nothing else."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from scalerl.cli.compose import compose
from scalerl.fitting.errors import InputError
from scalerl.rl.ledger import Ledger
from scalerl.rl.runlog import create_run_dir
from scalerl.sweeps.axes import FORWARD, LEAVE_ONE_OUT, RECIPES
from scalerl.sweeps.plan import COMPUTE, Plan, make_plan, read_plan, write_plan


def plan(kind: str, *overrides: str, **choices: Any) -> Plan:
    defaults: dict[str, Any] = {"x": "flops", "seeds": [0], "command": "scalerl sweep"}
    return make_plan(
        kind, "study", overrides, lambda texts: compose(texts, run_dir="unused").config, **defaults | choices
    )


def test_leave_one_out_arms_differ_in_their_axis_alone():
    arms = plan("loo").arms
    assert [arm.name for arm in arms] == ["base", *(f"{axis}={value}" for axis, value in LEAVE_ONE_OUT.items())]
    for arm in arms[1:]:
        assert list(arm.difference) == [f"recipe.{arm.axis}"], arm.name
    base, loss = arms[0], arms[2]
    assert base.difference == {} and loss.difference == {"recipe.loss": ("cispo", "dapo")}


@pytest.mark.parametrize("engine", [[], ["engine=sglang", "model.dtype=bfloat16"]], ids=["torch", "sglang"])
def test_the_config_json_of_every_arm_differs_from_the_bases_in_the_plans_keys(tmp_path: Path, engine: list[str]):
    made = plan("loo", *engine)
    written = {}
    for arm in made.arms:
        composed = compose(made.run_overrides(arm, 0), run_dir=str(tmp_path / made.run_folder(arm, 0)))
        folder = create_run_dir(composed.config, composed.sources)
        content = json.loads((folder / "config.json").read_text())
        sources = content.pop("sources")
        written[arm.name] = flat(content)
        assert all(sources[key] == "command line" for key in arm.difference)
    for arm in made.arms[1:]:
        base, own = written["base"], written[arm.name]
        changed = {key: (base.get(key), own.get(key)) for key in base | own if base.get(key) != own.get(key)}
        assert changed == {key: (base[key], own[key]) for key in arm.difference} and len(changed) == 1


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    items = [(prefix + key, value) for key, value in tree.items()]
    return {
        k: v
        for key, value in items
        for k, v in (flat(value, f"{key}.") if isinstance(value, dict) else {key: value}).items()
    }


def test_arms_that_are_the_base_by_construction_say_why():
    arms = {arm.name: arm for arm in plan("loo").arms}
    assert all(arm.identical is None for arm in arms.values())  # the demo's `model` head is bf16
    arms = {arm.name: arm for arm in plan("loo", "model.head_dtype=float32", "steps=100").arms}
    assert "fp32" in str(arms["logits_precision=model"].identical)
    assert "100 steps see no prompt twice" in str(arms["resample_positive=true"].identical)
    assert sum(arm.identical is not None for arm in arms.values()) == 2


def test_an_axis_that_the_base_has_reverted_already_has_no_arm():
    made = plan("loo", "recipe.loss=dapo")
    assert len(made.arms) == 8 and list(made.skipped) == ["loss=dapo"]


def test_only_the_axes_that_are_named():
    assert [arm.name for arm in plan("loo", axes=["zero_variance", "loss"]).arms] == [
        "base",
        "loss=dapo",
        "zero_variance=keep",
    ]
    with pytest.raises(InputError, match="--axes los: one of off_policy, loss"):
        plan("loo", axes=["los"])


def test_forward_adds_one_axis_at_a_time_and_keeps_it():
    arms = plan("forward").arms
    assert [arm.axis for arm in arms[1:]] == list(FORWARD)
    for before, after in itertools.pairwise(arms[1:]):
        assert set(before.difference) < set(after.difference)
        assert set(after.difference) - set(before.difference) == {f"recipe.{after.axis}"}
    scalerl = compose([], run_dir="unused").config.recipe
    last = compose(plan("forward").run_overrides(arms[-1], 0), run_dir="unused").config.recipe
    assert last.model_copy(update={"name": "scalerl"}) == scalerl


def test_recipes_are_those_of_the_papers_figure():
    made = plan("recipes")
    assert [arm.name for arm in made.arms] == ["base", *(f"recipe={name}" for name in RECIPES if name != "scalerl")]
    assert "recipe.loss" in made.arms[1].difference
    assert [arm.name for arm in plan("recipes", recipes=["magistral"]).arms] == ["base", "recipe=magistral"]


def test_a_swept_number_may_keep_the_total_batch():
    made = plan("axis", swept=("recipe.group_size", ["8", "16", "32"]), fixed_total_batch=True)
    assert [arm.name for arm in made.arms] == ["base", "recipe.group_size=8", "recipe.group_size=32"]
    assert made.skipped == {"recipe.group_size=16": "the base has these values already"}
    assert made.arms[1].difference == {"recipe.group_size": (16, 8), "recipe.prompts_per_batch": (32, 64)}
    with pytest.raises(InputError, match="isn't divisible"):
        plan("axis", swept=("recipe.group_size", ["7"]), fixed_total_batch=True)
    with pytest.raises(InputError, match="goes with"):
        plan("axis", swept=("trainer.lr", ["1e-4"]), fixed_total_batch=True)


def test_no_arm_is_another_once_more():
    with pytest.raises(InputError, match=r"arm recipe\.group_size=08 is arm recipe\.group_size=8 once more"):
        plan("axis", swept=("recipe.group_size", ["8", "08"]))
    with pytest.raises(InputError, match="arm recipe=minimax is arm recipe=minimax once more"):
        plan("recipes", recipes=["minimax", "minimax"])
    assert len(plan("forward", "recipe.truncation=score").arms) > 2


def test_a_seed_is_no_axis_and_compute_is_a_column_of_the_ledger():
    with pytest.raises(InputError, match="seed is no axis"):
        plan("axis", swept=("seed", ["1", "2"]))
    with pytest.raises(InputError, match="--x walltime: one of step, "):
        plan("loo", x="walltime")
    assert set(COMPUTE) <= set(Ledger(devices=1).axes())


def test_a_refused_arm_is_named():
    with pytest.raises(InputError, match=r"arm recipe.loss=nonsense: .*loss"):
        plan("axis", swept=("recipe.loss", ["nonsense"]))


def test_the_cost_is_that_of_a_run():
    made = plan("seeds", "steps=10", "eval.every=4", "eval.n_prompts=3", "eval.n_samples=2", seeds=[0, 1, 2])
    assert made.completions == 10 * 32 * 16
    assert made.tokens == (10 * 32 * 16 + 4 * 3 * 2) * 56  # evaluations at steps 0, 4, 8 and 10
    assert [arm.name for arm in made.arms] == ["base"] and made.seeds == (0, 1, 2)


def test_a_plan_is_read_as_it_was_written_and_never_overwritten(tmp_path: Path):
    made = plan("loo", "model.head_dtype=float32")
    write_plan(tmp_path / "study", made)
    assert read_plan(tmp_path / "study") == read_plan(tmp_path / "study")
    read = read_plan(tmp_path / "study")
    assert (read.arms[2], read.seeds, read.overrides) == (made.arms[2], made.seeds, made.overrides)
    with pytest.raises(InputError, match="exists already; go on with --resume"):
        write_plan(tmp_path / "study", made)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "is no study"), ("{", "is no plan"), ("{}", "is no plan"), ("[1]", "is no plan")]
)
def test_a_folder_without_a_plan_is_refused_in_one_line(tmp_path: Path, content: str | None, message: str):
    if content is not None:
        (tmp_path / "plan.json").write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        read_plan(tmp_path)
    assert "\n" not in str(caught.value)
