"""The user's own module: its prompts, its verifier in a process of its own, and a whole run on a mixture of two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scalerl.cli.compose import compose
from scalerl.fitting import read_runs
from scalerl.rl.config import Asking, RunConfig
from scalerl.rl.config import PythonTask as Config
from scalerl.rl.errors import UserError
from scalerl.rl.run import Run, resume_run, start_run
from scalerl.rl.tasks.python_task import PythonTask
from scalerl.rl.types import Prompt, Verdict

MODULE = """
import time

def prompts():
    for i in range(30):
        yield {"prompt": f"{i}+LETTER", "answer": str(i % 10)}

def verify(completion, answer):
    if "raise" in completion:
        raise OSError("no verdict")
    if "hang" in completion:
        time.sleep(1e6)
    if "none" in completion:
        return None
    return answer in completion
"""


def write(path: Path, text: str = MODULE) -> str:
    path.write_text(text)
    return str(path)


def make(module: str, time_limit: float = 30.0) -> PythonTask:
    asking = Asking(template="<{prompt}>", chat=True, system=None, prefill="")
    config = Config(
        kind="python", module=module, n_held_out=10, seed=0, asking=asking, workers=1, time_limit=time_limit
    )
    return PythonTask(config, "mine")


def test_prompts_and_verdicts_are_the_modules(tmp_path):
    task = make(write(tmp_path / "task.py"), time_limit=5.0)
    assert (len(task.train_prompts()), len(task.held_out_prompts())) == (20, 10)
    assert {p.text for p in [*task.train_prompts(), *task.held_out_prompts()]} == {f"<{i}+LETTER>" for i in range(30)}
    prompt = Prompt("id", "", "7", "mine")
    completions = ["it is 7", "it is 8", "raise", "none", "hang", "7"]
    error = Verdict(False, error=True)
    expected = [Verdict(True), Verdict(False), error, error, error, Verdict(True)]
    assert task.verify_batch([(prompt, text) for text in completions]) == expected


@pytest.mark.parametrize(
    "text,message",
    [
        ("def prompts(): return []", "has no function verify"),
        ("def prompts(): return []\ndef verify(completion, answer): return True", "has no rows"),
        (
            "def prompts(): return [{'prompt': 'p'}]\ndef verify(completion, answer): return True",
            "has no column 'answer'",
        ),
        ("import nothing_of_the_kind", r"it raised ModuleNotFoundError: No module named 'nothing_.*\(line 1\)"),
        ("def prompts(:", r"it raised SyntaxError: .*\(line 1\)"),
        ("\ndef prompts(): return [1 / 0]\nverify = prompts", r"prompts\(\) raised ZeroDivisionError: .*\(line 2\)"),
        ("def prompts(): return ['p']\nverify = prompts", r"row 1 of prompts\(\) is 'p', no dict"),
    ],
)
def test_a_module_that_lacks_something(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        make(write(tmp_path / "task.py", text))
    with pytest.raises(UserError, match="is no Python file"):
        make(str(tmp_path / "none.py"))


def mixture(tmp_path: Path, model: Path, run: str, *overrides: str):
    """Two python tasks in place of mathematics and code."""
    part = {
        "kind": "python",
        "n_held_out": 10,
        "seed": 0,
        "asking": {"template": "{prompt}", "chat": True, "system": None, "prefill": ""},
        "workers": 1,
        "time_limit": 30.0,
    }
    config = compose(
        [
            "model=hf",
            f"model.path={model}",
            "model.dtype=float32",
            "task=mixture",
            "task.tasks.math.data.train=unused",
            "task.tasks.code.data.train=unused",
            "recipe.length_control=none",
            "recipe.generation_budget=12",
            "recipe.truncation=score",
            "recipe.k=2",
            "recipe.prompts_per_batch=4",
            "recipe.group_size=4",
            "engine.process=inline",
            "engine.slots=16",
            "engine.ticks_per_step=4",
            "eval.n_prompts=5",
            "eval.n_samples=2",
            "eval.every=2",
            "trainer.save_every=2",
            "steps=6",
            *overrides,
        ],
        run_dir=str(tmp_path / run),
    ).config.model_dump(mode="json")
    modules = {name: write(tmp_path / f"{name}.py", MODULE.replace("LETTER", name)) for name in ("easy", "hard")}
    config["task"] = {
        "kind": "mixture",
        "tasks": {name: {**part, "module": module} for name, module in modules.items()},
        "weights": {"easy": 3.0, "hard": 1.0},
    }
    return RunConfig.model_validate(config)


def rows(path: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


def test_a_mixture_has_a_curve_of_each_task_and_of_all(tmp_path, llama_folder):
    path = start_run(mixture(tmp_path, llama_folder, "run"), {})
    evaluations = rows(path, "eval.jsonl")
    assert [r["set"] for r in evaluations] == ["held_out", "easy", "hard"] * 4
    for overall, easy, hard in zip(evaluations[::3], evaluations[1::3], evaluations[2::3], strict=True):
        assert (overall["n_prompts"], easy["n_prompts"], hard["n_prompts"]) == (10, 5, 5)
        assert overall["pass_rate"] == pytest.approx((easy["pass_rate"] + hard["pass_rate"]) / 2)
        assert overall["flops"] == easy["flops"] == hard["flops"]
    for name in ("held_out", "easy", "hard"):
        (run,) = read_runs([str(path)], eval_set=name)
        assert len(run.pass_rate) == 4


class Killed(BaseException):
    pass


def test_a_mixture_goes_on_as_if_it_had_not_been_stopped(tmp_path, llama_folder, monkeypatch):
    whole = start_run(mixture(tmp_path, llama_folder, "whole"), {})
    update = Run._update

    def kill(self, prepared):
        if self.ledger.step == 3:
            raise Killed
        return update(self, prepared)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_update", kill)
        with pytest.raises(Killed):
            start_run(mixture(tmp_path, llama_folder, "part"), {})
    resume_run(tmp_path / "part")
    kept = ("step", "set", "pass_rate", "entropy", "mean_length", "flops")
    one, two = ([[r[k] for k in kept] for r in rows(path, "eval.jsonl")] for path in (whole, tmp_path / "part"))
    assert one == two
