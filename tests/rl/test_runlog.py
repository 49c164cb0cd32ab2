"""The files of a run, W&B among them."""

from __future__ import annotations

import json

import pytest

from scalerl.cli.compose import compose
from scalerl.rl.errors import UserError
from scalerl.rl.runlog import RunLog, create_run_dir, read_config, read_rows, strict


def a_config(run_dir, *overrides):
    return compose(["steps=3", *overrides], run_dir=str(run_dir)).config


def test_a_run_folder_holds_configuration_and_environment(tmp_path):
    path = create_run_dir(a_config(tmp_path / "a" / "run"), {"seed": "command line"})
    config = json.loads((path / "config.json").read_text())
    assert config["steps"] == 3
    assert config["sources"] == {"seed": "command line"}
    assert json.loads((path / "environment.json").read_text())["versions"]["torch"]


def test_what_has_a_like_name_is_left_alone(tmp_path):
    (tmp_path / "run.tmp").mkdir()
    (tmp_path / "run.tmp" / "thesis").touch()
    create_run_dir(a_config(tmp_path / "run"), {})
    assert (tmp_path / "run.tmp" / "thesis").exists() and len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_exists_is_refused_and_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match=r"exists already.*--resume"):
        create_run_dir(a_config(tmp_path / "run"), {})
    assert list((tmp_path / "run").iterdir()) == []


def test_an_unwritable_place_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't be made"):
        create_run_dir(a_config(tmp_path / "file" / "run"), {})


def rows(path, name):
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


def evaluation(step):
    return {"set": "held_out", "step": step, "pass_rate": 0.5}, [{"step": step, "set": "held_out", "prompt": "p"}]


def test_what_came_after_a_checkpoint_is_cut_with_the_half_line_of_a_kill(tmp_path):
    path = create_run_dir(a_config(tmp_path / "run"), {})
    log = RunLog(path, a_config(tmp_path / "run"))
    for step in (1, 2, 3):
        log.training_step({"step": step})
        log.evaluation(*evaluation(step))
    with (path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 4, "rew')
    again = RunLog(path, a_config(tmp_path / "run"))
    again.cut_after(2, 2)
    again.evaluation(*evaluation(3))
    assert [r["step"] for r in rows(path, "metrics.jsonl")] == [1, 2]
    assert [r["step"] for r in rows(path, "eval.jsonl")] == [1, 2, 3]
    import pandas as pd

    assert pd.read_parquet(path / "eval_prompts.parquet")["step"].tolist() == [1, 2, 3]


def test_a_broken_line_in_the_middle_is_told_and_nothing_after_it_is_lost(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl: line 2 is not valid JSON"):
        read_rows(file)


@pytest.mark.parametrize("line", ["5", "{}", '{"step": "three"}'])
def test_a_line_without_its_number_is_told(tmp_path, line):
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl: line 2 has no number 'step'"):
        read_rows(file, ("step",))


def test_damaged_prompts_of_evaluations_are_told(tmp_path):
    path = create_run_dir(a_config(tmp_path / "run"), {})
    (path / "eval_prompts.parquet").write_bytes(b"rubbish")
    with pytest.raises(UserError, match=r"eval_prompts\.parquet can't be read .*put it back, or remove it"):
        RunLog(path, a_config(tmp_path / "run"))


@pytest.mark.parametrize("content", [b"[1, 2]", b"\xff\xfe{", b"{"])
def test_a_damaged_configuration_is_one_line(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"config\.json is no"):
        read_config(tmp_path)


def test_numbers_that_are_not_finite_become_null():
    assert strict({"a": float("nan"), "b": [float("inf"), 1.5]}) == {"a": None, "b": [None, 1.5]}


def test_wandb_offline_mirrors_the_files(tmp_path):
    pytest.importorskip("wandb")
    config = a_config(tmp_path / "run", "log.wandb=offline")
    path = create_run_dir(config, {})
    log = RunLog(path, config)
    log.training_step({"step": 1, "reward_mean": 0.25})
    log.evaluation(*evaluation(1))
    log.close()
    assert list(path.glob("wandb/offline-run-*/run-*.wandb"))
