"""Every pair of axis values trains a step or is refused when the configuration is read, with the reason."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from scalerl.cli.compose import compose
from scalerl.rl import recipe as recipes
from scalerl.rl.config import RunConfig
from scalerl.rl.engines.decoder import load_decoder
from scalerl.rl.engines.torch_engine import TorchEngine
from scalerl.rl.errors import UserError
from scalerl.rl.losses import LOSSES
from scalerl.rl.models.tokenizer import load_tokenizer
from scalerl.rl.recipe import Recipe
from scalerl.rl.requests import Requests, build_sampling
from scalerl.rl.tasks import build_task
from scalerl.rl.trainer import Trainer
from scalerl.rl.types import CompletedGroup, Prompt, ScoredGroup

TRUNCATED = {"temperature": 1.0, "top_p": 0.8, "top_k": 0}
CORRECTIONS = [f"{kind}_{level}" for kind in ("tis", "mis") for level in ("token", "sequence", "geometric")]
KL_FORMS = ("k1_in_reward", "k2_as_loss", "k3_as_loss", "mse")


def _kl(form: str, weighted: bool) -> dict[str, Any]:
    params = {"beta": 0.1, "beta_by_task": {}, "importance_weighted": weighted, "reset_ref_every": None}
    return {"kl": form, "kl_params": params}


# axis -> name of a value -> its fields. A value that makes sense in company only brings it along in NEEDS.
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "off_policy": {
        "pipeline": {"off_policy": "pipeline", "k": 8},
        "pipeline, k=0": {"off_policy": "pipeline", "k": 0},
        "ppo": {"off_policy": "ppo", "k": 8},
        "ppo, k=0": {"off_policy": "ppo", "k": 0},
    },
    "loss": {name: {"loss": name} for name in LOSSES},
    "loss_aggregation": {value: {"loss_aggregation": value} for value in ("prompt", "sample", "token")},
    "advantage_norm": {value: {"advantage_norm": value} for value in ("batch", "prompt", "none")},
    "logits_precision": {value: {"logits_precision": value} for value in ("fp32", "model")},
    "zero_variance": {value: {"zero_variance": value} for value in ("drop", "keep")},
    "resample_positive": {str(value): {"resample_positive": value} for value in (False, True)},
    "length_control": {value: {"length_control": value} for value in ("interrupt", "penalty", "none")},
    "truncation": {value: {"truncation": value} for value in ("mask", "score")},
    "ratio": {value: {"ratio": value} for value in ("generator", "trainer_old")},
    "mismatch_correction": {value: {"mismatch_correction": value} for value in ("none", *CORRECTIONS)},
    "offpolicy_sequence_mask": {str(value): {"offpolicy_sequence_mask": value} for value in ("off", 0.01)},
    "kl": {
        "none": {"kl": "none"},
        "k1_as_loss": {"kl": "k1_as_loss"},
        **{f"{form}, weighted={w}": _kl(form, w) for form in KL_FORMS for w in (False, True)},
    },
    "entropy_control": {value: {"entropy_control": value} for value in ("none", "clip_cov", "kl_cov", "bonus")},
    "sampling_mask": {
        "off": {"sampling_mask": "off"},
        "off, top_p<1": {"sampling_mask": "off", "sampling": TRUNCATED},
        "keep": {"sampling_mask": "keep", "sampling": TRUNCATED},
        "aux_token": {"sampling_mask": "aux_token", "sampling": TRUNCATED},
    },
    "router_replay": {value: {"router_replay": value} for value in ("off", "r3")},
    "updates_per_batch": {str(value): {"updates_per_batch": value} for value in (1, 2)},
    "group_size": {str(value): {"group_size": value} for value in (4, 2)},
    "prompts_per_batch": {str(value): {"prompts_per_batch": value} for value in (3, 2)},
    "generation_budget": {str(value): {"generation_budget": value} for value in (64, 8)},
}
VALUES = [(axis, name) for axis, values in AXES.items() for name in values]
NEEDS: dict[tuple[str, str], dict[str, Any]] = {
    **{("mismatch_correction", name): {"ratio": "trainer_old"} for name in CORRECTIONS},
    ("sampling_mask", "aux_token"): {"loss": "reinforce", "off_policy": "pipeline", "k": 0},
    ("generation_budget", "8"): {"length_control": "none"},
}


def _other(axis: str, *allowed: str) -> list[tuple[str, str]]:
    return [(axis, name) for name in AXES[axis] if name not in allowed]


# What is refused, and a part of the reason: a value alone, whatever it is paired with, or a pair.
REFUSED: dict[frozenset[tuple[str, str]], str] = {
    frozenset({("off_policy", "ppo, k=0")}): "k must be at least 1",
    frozenset({("kl", "k1_as_loss")}): "expected on-policy gradient is zero",
    frozenset({("sampling_mask", "off, top_p<1")}): "different distributions",
    frozenset({("generation_budget", "8"), ("length_control", "interrupt")}): "do not fit into generation_budget=8",
    frozenset({("generation_budget", "8"), ("length_control", "penalty")}): "takes nothing off before 20 tokens",
    **{frozenset({("mismatch_correction", name), ("ratio", "generator")}): "corrects twice" for name in CORRECTIONS},
    **{
        frozenset({("sampling_mask", "aux_token"), other}): "on-policy REINFORCE"
        for other in [
            *_other("off_policy", "pipeline, k=0"),
            *_other("loss", "reinforce"),
            *_other("updates_per_batch", "1"),
        ]
    },
    **{
        frozenset({("sampling_mask", "aux_token"), other}): "needs log-probabilities"
        for other in [
            *_other("kl", "none"),
            *_other("mismatch_correction", "none"),
            *_other("offpolicy_sequence_mask", "off"),
            *_other("entropy_control", "none"),
        ]
    },
}
BASE = {
    "group_size": 4,
    "prompts_per_batch": 3,
    "generation_budget": 64,
    "interrupt": {"budget_low": 10, "budget_high": 16, "answer_budget": 20, "phrase": "</think>"},
    "penalty": {"max_length": 60, "cache_length": 40},
}


def test_every_field_of_the_recipe_is_an_axis_or_belongs_to_one() -> None:
    parameters = {"name", "loss_params", "positive_threshold", "interrupt", "penalty", "mismatch_cap"} | {
        "kl_params",
        "clip_cov",
        "kl_cov",
        "bonus",
        "sampling",
        "k",
    }
    assert set(AXES) | parameters == set(Recipe.model_fields)


def test_every_pair_trains_or_is_refused(
    make_recipe: Callable[..., Recipe], run_config: RunConfig, moe_folder: Path, batches: Batches
) -> None:
    wrong, trained = [], set()  # pairs with a default among them come down to the same recipe: it trains once
    for first, second in _pairs():
        fields = BASE | NEEDS.get(first, {}) | NEEDS.get(second, {})
        fields |= AXES[first[0]][first[1]] | AXES[second[0]][second[1]]
        reasons = [reason for refused, reason in REFUSED.items() if refused <= {first, second}]
        try:
            recipe = make_recipe(**fields)
        except ValidationError as error:
            if not any(reason in str(error) for reason in reasons):
                wrong.append(f"{first} x {second} is refused: {error}")
            continue
        if reasons:
            wrong.append(f"{first} x {second} is not refused, {reasons}")
        elif (key := recipe.model_dump_json()) not in trained:
            trained.add(key)
            if problem := _step(recipe, run_config, moe_folder, batches):
                wrong.append(f"{first} x {second}: {problem}")
    assert not wrong, "\n".join(wrong)
    assert len(trained) > 500


def _pairs() -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    return ((a, b) for a, b in itertools.combinations(VALUES, 2) if a[0] != b[0])


def _step(recipe: Recipe, config: RunConfig, folder: Path, batches: Batches) -> str | None:
    """Train one batch as a run does; what is wrong with it, or None."""
    config = config.model_copy(update={"recipe": recipe})
    trainer = Trainer(config, folder)
    before = trainer.model.lm_head.weight.detach().clone()
    prepared = trainer.prepare(batches(recipe), version=1)
    for _ in range(recipe.updates_per_batch):
        metrics = trainer.update(prepared, step=0)
    finite = [metrics["objective"], metrics["grad_norm"], metrics["mismatch_k3"]]
    if not all(math.isfinite(value) for value in finite):
        return f"not finite: {finite}"
    if metrics["grad_norm"] <= 0 or torch.equal(before, trainer.model.lm_head.weight):
        return "the weights did not move"
    return None


Batches = Callable[[Recipe], list[ScoredGroup]]


@pytest.fixture(scope="module")
def run_config(moe_folder: Path) -> RunConfig:
    overrides = ["model=hf", f"model.path={moe_folder}", "model.dtype=float32", "trainer.warmup_steps=0"]
    return compose([*overrides, "trainer.lr=1e-3"], run_dir="unused").config


@pytest.fixture(scope="module")
def batches(run_config: RunConfig, moe_folder: Path, make_recipe: Callable[..., Recipe]) -> Batches:
    """The engine's completions for each kind of sampling mask, under version 0 and then 1, with verdicts by hand."""
    masks: dict[str, dict[str, Any]] = {
        "off": {},
        "keep": {"sampling_mask": "keep", "sampling": TRUNCATED},
        "aux_token": NEEDS["sampling_mask", "aux_token"] | AXES["sampling_mask"]["aux_token"],
    }
    made = {
        mask: _generate(make_recipe(**(BASE | fields), router_replay="r3"), run_config, moe_folder)
        for mask, fields in masks.items()
    }

    def batch(recipe: Recipe) -> list[ScoredGroup]:
        n = recipe.group_size
        return [
            replace(
                group,
                completions=group.completions[:n],
                correct=group.correct[:n],
                verifier_error=group.verifier_error[:n],
                unparsed=group.unparsed[:n],
                masked=group.masked[:n],
                shaping=group.shaping[:n],
            )
            for group in made[recipe.sampling_mask][: recipe.prompts_per_batch]
        ]

    return batch


def _generate(recipe: Recipe, config: RunConfig, folder: Path) -> list[ScoredGroup]:
    config = config.model_copy(update={"recipe": recipe})
    tokenizer, task = load_tokenizer(folder), build_task(config.task)
    decoder = load_decoder(folder, dtype=torch.float32, head_dtype=torch.float32, device="cpu")
    engine = TorchEngine(decoder, slots=12, sampling=build_sampling(config, tokenizer))
    requests, prompts = Requests(config, tokenizer), task.train_prompts()[:3]
    engine.submit([requests.training(group, prompt) for group, prompt in enumerate(prompts)])
    completed = [group for _ in range(6) for group in engine.tick()]
    weights = Trainer(config, folder).weights()
    noise = torch.Generator().manual_seed(0)
    engine.update_weights(
        {name: w + 0.02 * torch.randn(w.shape, generator=noise) for name, w in weights.items()}, version=1
    )
    while not engine.idle:
        completed += engine.tick()
    assert len(completed) == 3
    return [
        _judged(group, prompt, requests)
        for group, prompt in zip(sorted(completed, key=lambda group: group.group), prompts, strict=True)
    ]


def _judged(group: CompletedGroup, prompt: Prompt, requests: Requests) -> ScoredGroup:
    """Right, wrong, truncated and, in the first group, one whose verifier failed; the last has no variance. Ends are
    by hand too: a random model seldom ends by itself."""
    ends = ("stop", "stop", "length", "stop")
    return ScoredGroup(
        group=group.group,
        epoch=0,
        prompt=prompt,
        prompt_ids=requests.encode(prompt),
        completions=tuple(replace(c, finish=end) for c, end in zip(group.completions, ends, strict=True)),
        correct=np.array([group.group < 2, False, False, False]),
        verifier_error=np.array([False, False, False, group.group == 0]),
        unparsed=np.zeros(4, dtype=bool),
        masked=np.zeros(4, dtype=bool),
        shaping=np.zeros(4),
    )


def test_the_batch_has_all_that_a_mask_must_keep_out(batches: Batches, make_recipe: Callable[..., Recipe]) -> None:
    for mask in ("off", "keep"):
        fields = BASE | AXES["sampling_mask"][mask]
        completions = [c for group in batches(make_recipe(**fields)) for c in group.completions]
        assert any(c.injected.any() for c in completions) and any(c.truncated for c in completions)
        assert len({len(c.tokens) for c in completions}) > 3
        assert {0, 1} == {int(v) for c in completions for v in c.versions}


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "_refuse_k1_as_loss": ({"kl": "k1_as_loss"}, "kl=k1_as_loss: its expected on-policy gradient is zero"),
    "_refuse_ppo_without_k": ({"off_policy": "ppo", "k": 0}, "k=0: off_policy=ppo trains k batches a round"),
    "_refuse_double_correction": ({"mismatch_correction": "tis_token"}, "set ratio=trainer_old or loss=reinforce"),
    "_refuse_unmasked_truncated_sampling": ({"sampling": {"top_k": 5}}, "set sampling_mask=keep, or top_p=1 and top_k"),
    "_refuse_off_policy_aux_token": ({"sampling_mask": "aux_token"}, "needs off_policy=pipeline, k=0"),
    "_refuse_aux_token_with_logprobs": (
        {"sampling_mask": "aux_token", "k": 0, "loss": "reinforce", "kl": "k2_as_loss"},
        "set kl=none or sampling_mask=keep",
    ),
    "_refuse_empty_cov_band": (
        {"entropy_control": "clip_cov", "clip_cov": {"cov_low": 6.0}},
        "clip_cov.cov_low=6.0 is above clip_cov.cov_high=5.0",
    ),
    "_refuse_tight_interrupt": ({"interrupt": {"budget_low": 13000}}, "budget_low=13000 is above"),
    "_refuse_idle_penalty": (
        {"length_control": "penalty", "generation_budget": 40, "penalty": {"max_length": 50, "cache_length": 10}},
        "takes nothing off before 40 tokens",
    ),
}


def test_every_refusal_has_its_case() -> None:
    assert [check.__name__ for check in recipes._REFUSALS] == list(REFUSALS)


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name: str, make_recipe: Callable[..., Recipe]) -> None:
    fields, reason = REFUSALS[name]
    with pytest.raises(ValidationError) as caught:
        make_recipe(**fields)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["recipe.sampling.top_p=0.9"], "different distributions; set sampling_mask=keep"),
        (["recipe.kl=k1_as_loss"], "its expected on-policy gradient is zero"),
        (["engine.logits_precision=model"], "with fp32 on one side only the two disagree"),
        (["recipe.generation_budget=20"], "do not fit into generation_budget=20"),
        (["recipe.loss=cispoo"], "cispo"),
        (["recipe.loss_params.dapo.eps_lo=0.1"], "eps_low"),
    ],
)
def test_refused_on_the_command_line(overrides: list[str], reason: str) -> None:
    with pytest.raises(UserError, match=r"^[^\n]+$") as caught:
        compose(overrides)
    assert reason in str(caught.value)


def test_interrupt_without_thinking_tokens_is_refused(run_config: RunConfig) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    plain = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<end>": 0, "a": 1}, unk_token="a")), eos_token="<end>"
    )
    with pytest.raises(UserError, match="needs a tokenizer with thinking tokens"):
        build_sampling(run_config, plain)
    without = run_config.recipe.model_copy(update={"length_control": "none"})
    assert build_sampling(run_config.model_copy(update={"recipe": without}), plain).interrupt is None
