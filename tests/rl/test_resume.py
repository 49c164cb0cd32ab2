"""Resuming under another configuration, at an epoch's end, and what a resume books as lost."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from scalerl.cli.compose import compose, recompose
from scalerl.rl.checkpoint import load_last_checkpoint, tidy_checkpoints
from scalerl.rl.errors import RunEnded, UserError
from scalerl.rl.export import export_run
from scalerl.rl.resume import record_resume
from scalerl.rl.run import Run, resume_run, start_run
from scalerl.rl.runlog import read_config, read_rows
from tests.rl.small_run import SMALL, rows


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def stopped(cache, tmp_path_factory):
    """A run that ended at step 5 of 9, between two epochs, and the one that went on."""
    folder = tmp_path_factory.mktemp("runs")
    overrides = [*SMALL, f"model.cache_dir={cache}", "engine.process=inline", "trainer.save_every=5", "steps=9"]
    whole = start_run(compose(overrides, run_dir=str(folder / "whole")).config, {})
    path = folder / "stopped"
    shutil.copytree(whole, path)
    shutil.rmtree(path / "checkpoints" / "step_9")
    return path, whole


@pytest.fixture
def run(stopped, tmp_path):
    shutil.copytree(stopped[0], tmp_path / "run")
    return tmp_path / "run"


def wanted(run, *overrides):
    return recompose(read_config(run), overrides)


def test_a_resume_between_two_epochs_trains_on(run, stopped):
    checkpoint = load_last_checkpoint(run)
    assert checkpoint is not None
    assert len(checkpoint.state["sampler"]["order"]) == 0  # nothing is left of the epoch
    resume_run(run)
    for name in ("eval.jsonl", "metrics.jsonl"):
        assert rows(run, name) == rows(stopped[1], name)
    assert {row["epoch"] for row in rows(run, "metrics.jsonl")} == {0, 1}
    assert read_rows(run / "eval.jsonl")[-1]["wasted_device_hours"] > 0


def test_a_changed_configuration_is_refused_with_the_difference(run):
    before = (run / "config.json").read_text()
    with pytest.raises(UserError, match=r"trainer\.lr: was 0\.00012, is 0\.001; .*weight_decay: .*--allow-change"):
        resume_run(run, wanted(run, "trainer.lr=1e-3", "trainer.weight_decay=0.1"))
    assert (run / "config.json").read_text() == before


def test_an_edited_config_json_is_a_changed_configuration(run):
    content = json.loads((run / "config.json").read_text())
    content["trainer"]["clip_norm"] = 0.5
    (run / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"trainer\.clip_norm: was 1\.0, is 0\.5"):
        resume_run(run)


def test_an_allowed_change_is_taken_up_noted_and_needs_no_second_word(run, stopped, monkeypatch):
    update = Run._update

    def stop(self, prepared):
        raise RunEnded("enough")

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_update", stop)
        with pytest.raises(RunEnded, match="enough"):
            resume_run(run, wanted(run, "trainer.lr=1e-3"), allow_change=True)
    assert Run._update is update
    assert json.loads((run / "config.json").read_text())["sources"]["trainer.lr"] == "command line of a resume"
    assert read_rows(run / "resumes.jsonl")[0]["changes"] == {"trainer.lr": [1.2e-4, 1e-3]}
    resume_run(run)
    lrs = [row.get("lr") for row in rows(run, "metrics.jsonl")]  # none where a step was skipped
    assert lrs[:5] == [row.get("lr") for row in rows(stopped[1], "metrics.jsonl")][:5]
    assert {lr for lr in lrs[5:] if lr} == {1e-3 * min(1, updates / 6) for updates in _updates(run, after=5)}


def _updates(run, after):
    return [r["optimizer_steps"] for r in rows(run, "metrics.jsonl") if r["step"] > after and "lr" in r]


@pytest.mark.parametrize("change", ["recipe.group_size=8", "model.architecture.layers=1", "engine.slots=8"])
def test_what_a_checkpoint_depends_on_never_changes(run, change):
    with pytest.raises(UserError, match=rf"{change.split('=')[0]} can't change within a run"):
        resume_run(run, wanted(run, change), allow_change=True)


def test_more_steps_need_no_permission_and_fewer_do(run):
    with pytest.raises(UserError, match="steps: was 9, is 8"):
        resume_run(run, wanted(run, "steps=8"))
    with pytest.raises(UserError, match=r"steps=6, but the run has begun with the batches up to 8"):
        resume_run(run, wanted(run, "steps=6"), allow_change=True)
    resume_run(run, wanted(run, "steps=11"))
    assert [row["step"] for row in rows(run, "metrics.jsonl")] == list(range(1, 12))
    resume_run(run, wanted(run, "steps=12"))  # a finished run too
    assert [row["step"] for row in rows(run, "metrics.jsonl")] == list(range(1, 13))


@pytest.mark.parametrize("key", ["problem", "answer"])
@pytest.mark.parametrize("name", ["train", "held_out"])
def test_other_prompts_or_answers_are_refused(tmp_path, llama_folder, name, key):
    for part in ("train", "held_out"):
        rows = [{"problem": f"{part == 'train':d}{i}+", "answer": str(i)} for i in range(12)]
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        *("model=hf", f"model.path={llama_folder}", "task=math", "task.asking.template='{prompt}'"),
        *(f"task.data.{part}={tmp_path / part}.jsonl" for part in ("train", "held_out")),
        *("task.asking.chat=false", "recipe.length_control=none", "recipe.generation_budget=8", "recipe.k=1"),
        *("recipe.prompts_per_batch=2", "recipe.group_size=2", "engine.process=inline", "steps=1"),
        *("eval.n_prompts=4", "eval.n_samples=1"),
    ]
    path = start_run(compose(overrides, run_dir=str(tmp_path / "run")).config, {})
    file = tmp_path / f"{name}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row | {key: row[key] + "9"}) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"not those of the checkpoint: the task's files have changed"):
        resume_run(path, wanted(path, "steps=2"))


def test_a_diverged_policy_ends_the_run_in_one_line(cache, tmp_path):
    wild = [*SMALL, f"model.cache_dir={cache}", "trainer.lr=1e10", "trainer.warmup_steps=0", "steps=9"]
    for process in ("inline", "beside"):
        with pytest.raises(RunEnded, match=r"^[^\n]* not finite[^\n]*; lower trainer\.lr"):
            start_run(compose([*wild, f"engine.process={process}"], run_dir=str(tmp_path / process)).config, {})


def test_groups_and_unknown_keys_are_refused(run):
    with pytest.raises(UserError, match="replaces a whole group"):
        wanted(run, "recipe=base")
    with pytest.raises(UserError, match=r"no key 'trainer\.lrr'; did you mean"):
        wanted(run, "trainer.lrr=1")


@pytest.mark.parametrize("content", [b"", b"rubbish", b"\x80\x02K\x01.", b"cposix\nnone_such\n.", b"\x80\x02]K\x01R."])
def test_a_checkpoint_that_cannot_be_read_is_one_clear_line(run, content):
    (run / "checkpoints" / "step_5" / "state.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"step_5 can't be read .*remove it"):
        resume_run(run)


def test_half_written_checkpoints_go_and_a_replaced_one_returns(run):
    folder = run / "checkpoints"
    (folder / "step_7.tmp").mkdir()
    (folder / "step_5").rename(folder / "step_5.old")
    assert load_last_checkpoint(run) is None and len(list(folder.iterdir())) == 2  # looking changes nothing
    tidy_checkpoints(run)
    checkpoint = load_last_checkpoint(run)
    assert checkpoint is not None and checkpoint.folder == folder / "step_5"
    assert [p.name for p in folder.iterdir()] == ["step_5"]


def test_an_unwritable_checkpoint_ends_the_run_with_the_reason(cache, tmp_path, monkeypatch):
    def write(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scalerl.rl.trainer.write_tensors", write)
    overrides = [*SMALL, f"model.cache_dir={cache}", "engine.process=inline", "steps=5"]
    with pytest.raises(RunEnded, match=r"checkpoint of step 2 .*No space left on device.*goes on from the start"):
        start_run(compose(overrides, run_dir=str(tmp_path / "run")).config, {})


def test_losses_add_up_over_resumes_and_a_kill_before_the_cut_counts_once(tmp_path):
    row = {"device_hours": 3.0, "eval_device_hours": 0.5, "checkpoint_device_hours": 0.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n" + '{"device_hours": 9')
    assert record_resume(tmp_path, 5, 2.0, {}) == 1.5
    assert record_resume(tmp_path, 5, 2.0, {}) == 1.5  # killed before the log was cut
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row | {"device_hours": 2.5}) + "\n")
    assert record_resume(tmp_path, 5, 2.0, {}) == 2.5


def test_an_exported_policy_has_the_trainers_weights(run, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "policy.tmp").mkdir()  # somebody's
    resume_run(run)
    assert export_run(run, tmp_path / "policy") == 9
    config = read_config(run)
    path = tmp_path / "policy"
    again = Run(config, tmp_path)
    checkpoint = load_last_checkpoint(run)
    assert checkpoint is not None
    again.load(checkpoint)
    again.log.close()
    weights = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    expected = again.trainer.weights()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
    assert AutoTokenizer.from_pretrained(path).get_vocab() == again.tokenizer.get_vocab()
    with pytest.raises(UserError, match="exists already"):
        export_run(run, path)
