"""The difficulty filter: measured pass rates, and a file that the task reads again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scalerl.cli.compose import compose
from scalerl.rl.difficulty import filter_prompts
from scalerl.rl.errors import UserError
from scalerl.rl.tasks.prompt_files import read_prompt_file

MODULE = """
def prompts():
    return [{"prompt": f"{i}=", "answer": "yes" if i % 2 else "no"} for i in range(24)]

def verify(completion, answer):
    return answer == "yes"
"""


def config(tmp_path: Path, model: Path, *overrides: str):
    """A random model: what it is right on ends by chance, so half of the prompts pass sometimes, the others never."""
    (tmp_path / "task.py").write_text(MODULE)
    small = ["model=hf", f"model.path={model}", "model.dtype=float32", "task=python", "task.n_held_out=4"]
    small += ["recipe.length_control=none", "recipe.generation_budget=40", "engine.slots=32"]
    return compose([*small, f"task.module={tmp_path / 'task.py'}", "task.time_limit=60", *overrides]).config


def test_prompts_that_pass_sometimes_are_kept(tmp_path, llama_folder):
    out = tmp_path / "kept.jsonl"
    found = filter_prompts(config(tmp_path, llama_folder), out, low=0.1, high=0.9, n_samples=8, limit=None)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert found.kept == len(rows) > 0 and found.unjudged == 0
    assert found.kept + found.hard + found.easy == 20, "held-out prompts are not measured"
    assert all(0.1 <= row["pass_rate"] <= 0.9 and row["n_samples"] == 8 for row in rows)
    assert {row["answer"] for row in rows} == {"yes"}
    file = read_prompt_file(out, None, None)
    assert file.prompts.to_pylist() == [row["prompt"] for row in rows]


def test_prompts_without_room_are_left_out_and_the_others_measured(tmp_path, llama_folder, capsys):
    with_long = config(tmp_path, llama_folder)
    (tmp_path / "task.py").write_text(MODULE.replace('f"{i}="', 'f"{i}=" + "1" * 90 * (i % 6 == 0)'))
    found = filter_prompts(with_long, tmp_path / "a.jsonl", low=0, high=1, n_samples=2, limit=None)
    texts = [json.loads(line)["prompt"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert 16 <= found.kept == len(texts) < 20 and max(map(len, texts)) < 10
    assert f"{20 - found.kept} of 20 training prompts left out" in capsys.readouterr().err


def test_a_limit_measures_the_first_prompts_and_bad_input_is_one_line(tmp_path, llama_folder):
    one = config(tmp_path, llama_folder)
    found = filter_prompts(one, tmp_path / "a.jsonl", low=0, high=1, n_samples=2, limit=5)
    assert (found.kept, found.hard, found.easy) == (5, 0, 0)
    with pytest.raises(UserError, match=r"a\.jsonl exists already"):
        filter_prompts(one, tmp_path / "a.jsonl", low=0, high=1, n_samples=2, limit=5)
    (tmp_path / "empty").mkdir()
    without_model = config(tmp_path, tmp_path / "empty")
    with pytest.raises(UserError, match="empty"):
        filter_prompts(without_model, tmp_path / "b.jsonl", low=0, high=1, n_samples=2, limit=5)
    assert not list(tmp_path.glob("b.jsonl*")), "the corrected command must find its file free"
    with pytest.raises(UserError, match="must be pass rates"):
        filter_prompts(one, tmp_path / "b.jsonl", low=0.9, high=0.1, n_samples=2, limit=5)
    servers = one.model_copy(update={"engine": compose(["engine=sglang"]).config.engine})
    with pytest.raises(UserError, match="filter samples with the embedded engine; leave engine=torch"):
        filter_prompts(servers, tmp_path / "b.jsonl", low=0, high=1, n_samples=2, limit=5)
    with pytest.raises(UserError, match="the task addition has no file of prompts"):
        filter_prompts(compose([]).config, tmp_path / "b.jsonl", low=0, high=1, n_samples=2, limit=5)
