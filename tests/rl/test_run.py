"""Whole runs of a small model: the same to the bit whatever the process layout, and after a kill."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from scalerl.cli.compose import compose
from scalerl.rl.engines.generator import BesideGenerator
from scalerl.rl.errors import RunEnded, UserError
from scalerl.rl.ledger import Ledger
from scalerl.rl.run import Run, resume_run, start_run

torch.set_num_threads(1)
SMALL = [
    "model.architecture.hidden_size=32",
    "model.architecture.layers=2",
    "model.architecture.intermediate_size=32",
    "model.warm_start.steps=400",
    "model.warm_start.batch_size=16",
    "task.demonstrations.slip=0.3",
    "task.min_digits=1",
    "task.max_digits=1",
    "task.n_train=40",
    "recipe.prompts_per_batch=4",
    "recipe.group_size=4",
    "recipe.k=3",
    "recipe.generation_budget=32",
    "recipe.interrupt.budget_low=7",
    "recipe.interrupt.budget_high=10",
    "engine.slots=24",
    "engine.ticks_per_step=5",
    "eval.n_prompts=6",
    "eval.n_samples=2",
    "eval.every=4",
    "trainer.save_every=5",
    "steps=12",
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def config_for(cache, run_dir, *overrides):
    return compose([*SMALL, f"model.cache_dir={cache}", *overrides], run_dir=str(run_dir)).config


def train(cache, run_dir, *overrides) -> Path:
    return start_run(config_for(cache, run_dir, *overrides), {})


def rows(path, name, *, clock=False):
    drop = () if clock else (*Ledger.CLOCK_FIELDS, "seconds", "tokens_per_second")
    lines = (path / name).read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in drop} for line in lines]


def test_a_run_leaves_its_files_and_grows_monotonically(cache, tmp_path):
    path = train(cache, tmp_path / "run")
    evaluations, metrics = rows(path, "eval.jsonl", clock=True), rows(path, "metrics.jsonl", clock=True)
    assert [r["step"] for r in evaluations] == [0, 4, 8, 12]
    assert [r["step"] for r in metrics] == list(range(1, 13))
    for axis in ("samples", "train_tokens", "generated_tokens", "flops", "device_hours", "eval_device_hours"):
        values = [r[axis] for r in evaluations]
        assert values == sorted(values), axis
        assert values[-1] > 0, axis
    assert metrics[-1]["samples"] == 12 * 4 * 4
    assert {p.name for p in (path / "checkpoints").iterdir()} == {"step_10", "step_12"}
    assert all(set(r["lag_histogram"]) <= {"0", "1", "2", "3"} for r in metrics if "lag_histogram" in r)
    assert any(r["mismatch_k3"] > 0 for r in metrics if "mismatch_k3" in r)


def test_the_last_step_is_evaluated_once_off_the_schedule_too(cache, tmp_path):
    path = train(cache, tmp_path / "run", "steps=6")
    assert [r["step"] for r in rows(path, "eval.jsonl")] == [0, 4, 6]


@pytest.mark.parametrize("schedule", ["pipeline", "ppo"])
def test_inline_and_beside_give_the_same_run_to_the_bit(cache, tmp_path, schedule):
    one = train(cache, tmp_path / "a", "engine.process=inline", f"recipe.off_policy={schedule}")
    two = train(cache, tmp_path / "b", "engine.process=beside", f"recipe.off_policy={schedule}")
    assert rows(one, "eval.jsonl") == rows(two, "eval.jsonl")
    assert rows(one, "metrics.jsonl") == rows(two, "metrics.jsonl")


def test_another_seed_gives_another_run(cache, tmp_path):
    assert rows(train(cache, tmp_path / "a"), "metrics.jsonl") != rows(
        train(cache, tmp_path / "b", "seed=1"), "metrics.jsonl"
    )


class Killed(BaseException):
    pass


@pytest.mark.parametrize("stop", ["before the first checkpoint", "after one", "in an evaluation"])
@pytest.mark.parametrize("schedule", ["pipeline", "ppo"])
def test_a_resumed_run_equals_an_uninterrupted_one(cache, tmp_path, monkeypatch, stop, schedule):
    overrides = ["engine.process=inline", f"recipe.off_policy={schedule}"]
    whole = train(cache, tmp_path / "whole", *overrides)
    step = {"before the first checkpoint": 2, "after one": 7, "in an evaluation": 8}[stop]
    original = Run._evaluate if stop == "in an evaluation" else Run._update

    def kill(self, *args, **kwargs):
        if self.ledger.step == step:
            raise Killed
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Run, original.__name__, kill)
        with pytest.raises(Killed):
            train(cache, tmp_path / "killed", *overrides)
    resume_run(tmp_path / "killed")
    assert rows(tmp_path / "killed", "eval.jsonl") == rows(whole, "eval.jsonl")
    assert rows(tmp_path / "killed", "metrics.jsonl") == rows(whole, "metrics.jsonl")
    assert rows(tmp_path / "killed", "eval.jsonl", clock=True)[-1]["wasted_device_hours"] > 0


def test_a_run_that_is_refused_leaves_its_neighbours_alone(cache, tmp_path, monkeypatch):
    """The folder of runs is new when one begins, and holds another by the time that it is refused."""
    neighbour = tmp_path / "runs" / "neighbour" / "eval.jsonl"

    def refuse(*args):
        neighbour.parent.mkdir()
        neighbour.write_text("{}")
        raise UserError("refused")

    monkeypatch.setattr("scalerl.rl.run.build_generator", refuse)
    with pytest.raises(UserError, match="refused"):
        train(cache, tmp_path / "runs" / "mine", "engine.process=inline")
    assert neighbour.exists() and not (tmp_path / "runs" / "mine").exists()


def test_a_generator_that_dies_ends_the_run_with_the_way_on(cache, tmp_path):
    run = Run(config_for(cache, tmp_path, "steps=6", "engine.process=beside"), tmp_path)
    assert isinstance(run.generator, BesideGenerator)
    run.generator._process.kill()
    with pytest.raises(RunEnded, match=r"generator's process died with exit code -9 .*--resume"):
        run.train()


def test_a_complete_run_is_left_alone(cache, tmp_path, capsys):
    path = train(cache, tmp_path / "run", "steps=2", "engine.process=inline")
    before = (path / "eval.jsonl").read_text()
    resume_run(path)
    assert "is complete at step 2" in capsys.readouterr().out
    assert (path / "eval.jsonl").read_text() == before


def test_versions_change_inside_a_completion_when_weights_move(cache, tmp_path):
    run = Run(config_for(cache, tmp_path, "engine.process=inline", "steps=6"), tmp_path)
    spans = []
    collect = run._collect

    def watch(outcome):
        spans.extend(np.unique(c.versions).size for g in outcome.groups for c in g.completions)
        collect(outcome)

    run._collect = watch
    run.train()
    assert max(spans) > 1


def test_prompts_that_run_out_end_the_run_with_a_complete_log(cache, tmp_path, monkeypatch):
    monkeypatch.setattr("scalerl.rl.tasks.addition.Addition.verify", lambda self, prompt, text: True)
    overrides = ["engine.process=inline", "task.n_train=12", "recipe.interrupt.budget_low=1", "recipe.truncation=score"]
    overrides += ["recipe.positive_threshold=0.01"]
    with pytest.raises(RunEnded, match="nothing is left to train on"):
        train(cache, tmp_path / "run", *overrides)
    evaluations, metrics = rows(tmp_path / "run", "eval.jsonl"), rows(tmp_path / "run", "metrics.jsonl")
    assert 0 < metrics[-1]["step"] < 12
    assert evaluations[-1]["step"] == metrics[-1]["step"]


def test_a_step_in_which_nothing_survives_is_counted_and_moves_no_version(cache, tmp_path, monkeypatch):
    monkeypatch.setattr("scalerl.rl.tasks.addition.Addition.verify", lambda self, prompt, text: False)
    path = train(cache, tmp_path / "run", "engine.process=inline", "steps=3")
    last = rows(path, "metrics.jsonl")[-1]
    assert (last["step"], last["version"], last["skipped_steps"]) == (3, 0, 3)
    assert last["skipped"] == "nothing survives the zero-variance filter"


def test_a_verifier_that_raises_is_counted_and_never_a_wrong_answer(cache, tmp_path, monkeypatch):
    def verify(self, prompt, text):
        if text.count("1") % 2:
            raise OSError("no verdict")
        return True

    monkeypatch.setattr("scalerl.rl.tasks.addition.Addition.verify", verify)
    path = train(cache, tmp_path / "run", "engine.process=inline", "steps=2", "recipe.truncation=score")
    last = rows(path, "metrics.jsonl")[-1]
    assert last["verifier_errors"] > 0
    evaluation = rows(path, "eval.jsonl")[-1]
    assert evaluation["pass_rate"] == pytest.approx(1 - evaluation["truncation_rate"], abs=0.35)


def test_bad_input_leaves_no_folder(cache, tmp_path):
    with pytest.raises(UserError, match=r"eval\.n_prompts=99999 but the set 'held_out' has"):
        train(cache, tmp_path / "run", "eval.n_prompts=99999")
    assert not (tmp_path / "run").exists()


def test_a_ppo_run_without_prompts_ends_again_when_it_is_lengthened(cache, tmp_path):
    few = ("recipe.off_policy=ppo", "task.n_train=18", "recipe.positive_threshold=0.01", "eval.every=40", "steps=40")
    with pytest.raises(RunEnded, match="all 18 training prompts"):
        train(cache, tmp_path / "run", *few)
    trained = rows(tmp_path / "run", "metrics.jsonl")
    with pytest.raises(RunEnded, match="all 18 training prompts"):
        resume_run(tmp_path / "run", config_for(cache, tmp_path / "run", *few, "steps=60"))
    assert rows(tmp_path / "run", "metrics.jsonl") == trained and len(trained) % 3  # in the middle of a round
