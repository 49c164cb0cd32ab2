"""A study's plan: which runs, what each changes, what they cost. Written before anything runs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scalerl.fitting.errors import InputError
from scalerl.rl.config import RunConfig, flat
from scalerl.rl.errors import UserError
from scalerl.sweeps.axes import FORWARD, LEAVE_ONE_OUT, RECIPES

# Of the ledger's columns, those that grow with the compute of training.
COMPUTE = ("step", "optimizer_steps", "samples", "train_tokens", "generated_tokens", "flops", "device_hours")
PLAN = "plan.json"
Compose = Callable[[Sequence[str]], RunConfig]  # Hydra overrides -> a validated configuration; raises UserError


@dataclass(frozen=True)
class Arm:
    """name: `base`, `loss=dapo`, ...; axis: what it reverts, adds or sweeps, None for the base. overrides: beyond the
    study's own. difference: every key of `config.json` that is not the base's -> (the base's value, this arm's).
    identical: why it must come out as the base although a key differs; None where it may differ."""

    name: str
    axis: str | None
    overrides: tuple[str, ...]
    difference: dict[str, tuple[Any, Any]]
    identical: str | None


@dataclass(frozen=True)
class Plan:
    """kind: loo, forward, recipes, seeds or axis. x: the compute axis of the report. overrides: those of all arms;
    arms: the base first. skipped: axis -> why it has no arm. steps, completions, tokens: of one run of the base;
    generated tokens at most, its evaluations included."""

    kind: str
    name: str
    x: str
    overrides: tuple[str, ...]
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    command: str
    skipped: dict[str, str]
    steps: int
    completions: int
    tokens: int

    def run_folder(self, arm: Arm, seed: int) -> str:
        """Of one run, relative to the study."""
        return f"runs/{re.sub(r'[^A-Za-z0-9._=-]', '_', arm.name)}-seed{seed}"

    def run_overrides(self, arm: Arm, seed: int) -> list[str]:
        """Everything that `scalerl train` is told for one run."""
        return [*self.overrides, *arm.overrides, f"seed={seed}"]


def make_plan(
    kind: str,
    name: str,
    overrides: Sequence[str],
    compose: Compose,
    *,
    x: str,
    seeds: Sequence[int],
    command: str,
    axes: Sequence[str] | None = None,
    recipes: Sequence[str] = RECIPES,
    swept: tuple[str, Sequence[str]] | None = None,
    fixed_total_batch: bool = False,
) -> Plan:
    """Expand a study into its arms and validate each one's configuration.

    axes: those of a leave-one-out or forward study, default all. swept: (key, values) of kind `axis`. Raises InputError
    for an axis that there isn't, and for an arm whose configuration is refused."""
    if x not in COMPUTE:
        raise InputError(f"--x {x}: one of {', '.join(COMPUTE)}")
    if kind == "forward":
        overrides = ["recipe=base", *overrides]
    base_config = compose(overrides)
    named, skipped = _arms(kind, base_config, axes, recipes, swept, fixed_total_batch)
    arms = [Arm("base", None, (), {}, None)]
    for arm_name, axis, changes in named:
        try:
            config = compose([*overrides, *changes])
        except UserError as error:
            raise InputError(f"arm {arm_name}: {error}") from None
        if difference := _difference(base_config, config):
            # A step of a forward study may well change nothing more.
            twin = next((arm.name for arm in arms if arm.difference == difference), None)
            if twin is not None and kind != "forward":
                raise InputError(f"arm {arm_name} is arm {twin} once more; give each value once")
            arms.append(Arm(arm_name, axis, tuple(changes), difference, _identical(difference, config)))
        else:
            skipped[arm_name] = "the base has these values already"
    completions, tokens = _cost(base_config)
    return Plan(
        kind=kind,
        name=name,
        x=x,
        overrides=tuple(overrides),
        arms=tuple(arms),
        seeds=tuple(seeds),
        command=command,
        skipped=skipped,
        steps=base_config.steps,
        completions=completions,
        tokens=tokens,
    )


def write_plan(study: Path, plan: Plan) -> None:
    """Make the study's folder with its `plan.json`. Raises InputError where it holds anything or can't be made."""
    try:
        study.mkdir(parents=True, exist_ok=True)
        if any(study.iterdir()):
            raise InputError(f"study {study} exists already; go on with --resume {study}, or choose another folder")
        beside = study / f"{PLAN}.tmp"
        beside.write_text(json.dumps(asdict(plan), indent=2) + "\n")
        os.replace(beside, study / PLAN)
    except OSError as error:
        raise InputError(f"study {study} can't be made ({error.strerror}); choose another folder") from None


def read_plan(study: Path) -> Plan:
    """The plan of the study in `study`. Raises InputError where there is none."""
    file = study / PLAN
    try:
        content = json.loads(file.read_text())
        arms = tuple(
            Arm(
                arm["name"],
                arm["axis"],
                tuple(arm["overrides"]),
                {key: (old, new) for key, (old, new) in arm["difference"].items()},
                arm["identical"],
            )
            for arm in content.pop("arms")
        )
        overrides, seeds = tuple(content.pop("overrides")), tuple(content.pop("seeds"))
        return Plan(**content, arms=arms, overrides=overrides, seeds=seeds)
    except OSError:
        raise InputError(f"{study} is no study: it has no {PLAN}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is no plan of a study ({error})") from None


def _arms(
    kind: str,
    base: RunConfig,
    axes: Sequence[str] | None,
    recipes: Sequence[str],
    swept: tuple[str, Sequence[str]] | None,
    fixed_total_batch: bool,
) -> tuple[list[tuple[str, str | None, list[str]]], dict[str, str]]:
    """((name, axis, overrides) of each arm but the base, what was skipped and why)."""
    if kind == "seeds":
        return [], {}
    if kind == "recipes":
        own = base.recipe.name
        return [(f"recipe={name}", "recipe", [f"recipe={name}"]) for name in recipes if name != own], {}
    if kind == "axis":
        assert swept is not None
        key, values = swept
        if key in ("seed", "run_dir"):
            raise InputError(f"{key} is no axis: scalerl sweep seeds --seeds 0,1,2 has several seeds")
        return [(f"{key}={v}", key, _swept(key, v, base, fixed_total_batch)) for v in values], {}
    table = LEAVE_ONE_OUT if kind == "loo" else FORWARD
    if unknown := [axis for axis in axes or () if axis not in table]:
        raise InputError(f"--axes {unknown[0]}: one of {', '.join(table)}")
    chosen = [axis for axis in table if axes is None or axis in axes]
    changes = {axis: f"recipe.{axis}={table[axis]}" for axis in chosen}
    if kind == "loo":
        return [(f"{axis}={table[axis]}", axis, [changes[axis]]) for axis in chosen], {}
    added = [list(changes.values())[: i + 1] for i in range(len(chosen))]
    return [(f"+{axis}={table[axis]}", axis, own) for axis, own in zip(chosen, added, strict=True)], {}


def _swept(key: str, value: str, base: RunConfig, fixed_total_batch: bool) -> list[str]:
    if not fixed_total_batch:
        return [f"{key}={value}"]
    recipe = base.recipe
    total = recipe.prompts_per_batch * recipe.group_size
    other = {"recipe.group_size": "prompts_per_batch", "recipe.prompts_per_batch": "group_size"}.get(key)
    if other is None:
        raise InputError("--fixed-total-batch goes with recipe.group_size or recipe.prompts_per_batch")
    if not value.isdigit() or not int(value) or total % int(value):
        raise InputError(f"{key}={value}: the total batch of {total} completions isn't divisible by it")
    return [f"{key}={value}", f"recipe.{other}={total // int(value)}"]


def _difference(base: RunConfig, arm: RunConfig) -> dict[str, tuple[Any, Any]]:
    old, new = (flat(config.model_dump(mode="json", exclude={"run_dir"})) for config in (base, arm))
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


def _identical(difference: Mapping[str, Any], arm: RunConfig) -> str | None:
    """Why a run with only this difference is the base's run, where it is so by construction."""
    keys, prompts = set(difference), getattr(arm.task, "n_train", None)
    if keys == {"recipe.logits_precision"} and arm.model.head_dtype == "float32":
        return "the head's own precision is fp32 (model.head_dtype=float32)"
    if keys == {"recipe.resample_positive"} and prompts and arm.steps * arm.recipe.prompts_per_batch <= prompts:
        return f"{arm.steps} steps see no prompt twice ({prompts} prompts), so none is left out"
    return None


def _cost(config: RunConfig) -> tuple[int, int]:
    """(training completions, generated tokens at most) of one run."""
    evaluations = config.steps // config.eval.every + 1 + bool(config.steps % config.eval.every)
    evaluated = evaluations * (1 + len(config.eval.extra)) * config.eval.n_prompts * config.eval.n_samples
    completions = config.steps * config.recipe.prompts_per_batch * config.recipe.group_size
    return completions, (completions + evaluated) * config.recipe.generation_budget
