"""Trainer against engine on one model."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from scalerl.cli.compose import compose
from scalerl.rl.align import Agreement, align
from scalerl.rl.config import RunConfig


def configure(model: Path, run_dir: Path, *changed: str) -> RunConfig:
    overrides = ["model=hf", f"model.path={model}", "engine.process=inline", "engine.slots=8", "model.dtype=float32"]
    return compose([*overrides, *changed], run_dir=str(run_dir)).config


def test_agreement_by_hand():
    """Ratios 1, 3 and 0.8: k3 = (0 + (3 - 1 - ln 3) + (0.8 - 1 - ln 0.8)) / 3; one of three is beyond 2."""
    found = Agreement.of(np.log([1.0, 3.0, 0.8]))
    assert found.n == 3 and math.isclose(found.largest, math.log(3))
    assert math.isclose(found.mean, (math.log(3) - math.log(0.8)) / 3)
    assert math.isclose(found.k3, (2 - math.log(3) - 0.2 - math.log(0.8)) / 3)
    assert math.isclose(found.extreme, 1 / 3)


def test_the_embedded_engine_and_the_trainer_are_one_function(llama_folder, tmp_path):
    found = align(configure(llama_folder, tmp_path), n_prompts=3, n_samples=2)
    assert found.completions == 6 and found.decode.n > found.prefill.n > 6
    for part in (found.decode, found.prefill):
        assert part.largest < 1e-4 and abs(part.k3) < 1e-8 and part.extreme == 0
    assert len(found.worst) == 5
    assert abs(found.worst[0].engine - found.worst[0].trainer) == pytest.approx(found.decode.largest)


def test_truncated_sampling_and_temperature_are_those_of_the_recipe(llama_folder, tmp_path):
    """As decoded over the kept sets at the recipe's temperature; the prefill's are over the whole vocabulary at 1."""
    keep = ("recipe.sampling_mask=keep", "recipe.sampling.top_p=0.5", "recipe.sampling.temperature=0.6")
    found = align(configure(llama_folder, tmp_path, *keep), n_prompts=2, n_samples=2)
    assert found.decode.largest < 1e-4 and found.prefill.largest < 1e-4
    assert all(token.engine > math.log(1 / 30) for token in found.worst)  # of about half of 49 nearly even tokens


def test_a_mixture_of_experts_goes_the_engines_way(moe_folder, tmp_path):
    found = align(configure(moe_folder, tmp_path, "recipe.router_replay=r3"), n_prompts=2, n_samples=2)
    assert found.decode.largest < 1e-3
