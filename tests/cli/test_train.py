"""`scalerl train` as a user runs it: in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCALERL = Path(sys.executable).with_name("scalerl")
SMOKE = [
    "model.architecture.hidden_size=32",
    "model.architecture.layers=1",
    "model.architecture.intermediate_size=32",
    "model.warm_start.steps=2",
    "recipe.prompts_per_batch=2",
    "recipe.group_size=2",
    "engine.slots=16",
    "steps=2",
    "eval.n_prompts=8",
    "eval.n_samples=2",
]


def scalerl(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCALERL), *arguments], capture_output=True, text=True, cwd=cwd, timeout=120)


def test_a_smoke_run_and_its_resume(tmp_path):
    done = scalerl("train", *SMOKE, "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step     2  held_out pass rate" in done.stderr
    assert json.loads((tmp_path / "run" / "config.json").read_text())["sources"]["steps"] == "command line"
    again = scalerl("train", "--resume", "run", cwd=tmp_path)
    assert again.returncode == 0
    assert "is complete at step 2" in again.stdout


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["recipe.los=cispo"], "error: no key 'recipe.los'; did you mean 'recipe.loss'?"),
        (["recipe.zero_variance=drip"], "error: recipe.zero_variance=drip; did you mean 'drop'?; one of drop, keep"),
        (["model=hf", "model.path=nowhere"], "error: model.path=nowhere is no folder"),
        (["trainer.device=cuda:99"], "error: trainer.device=cuda:99: torch sees"),
        (["engine.device=cuda:99"], "error: engine.device=cuda:99: torch sees"),
        (["--run-dir", "exists"], "error: run folder exists exists already"),
        (["--run-dir", "file/run"], "error: run folder file/run can't be made"),
        (["--resume", "exists"], "error: exists is no run folder: it has no config.json"),
        (["--resume", "exists", "--dry-run"], "error: --resume takes overrides and --allow-change only"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tmp_path, arguments, message):
    (tmp_path / "exists").mkdir()
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.iterdir())
    done = scalerl("train", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_dry_run_tells_values_sources_and_cost_and_writes_nothing(tmp_path):
    done = scalerl("train", "recipe.loss=dapo", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "recipe.loss = 'dapo'  # command line" in done.stdout
    assert "recipe.zero_variance = 'drop'  # recipe/scalerl.yaml" in done.stdout
    assert "completions" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_dry_runs_cost_counts_every_set_of_a_mixture(tmp_path):
    files = ("task.tasks.math.data.train=x", "task.tasks.code.data.train=y", "log.project='[/dim]'")
    done = scalerl(
        "train", "--dry-run", "task=mixture", "model=hf", "model.path=z", "eval.extra=[math.hard]", *files, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "evaluation: 5 x 3 sets x 1000 x 16 = 240,000 completions" in done.stdout
    assert "log.project = '[/dim]'  #" in done.stdout


def test_help_is_quick_for_what_it_leaves_unloaded(tmp_path):
    done = scalerl("--help", cwd=tmp_path)
    assert done.returncode == 0 and "train" in done.stdout
    code = "import sys, scalerl.cli.main; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "hydra", "pandas", "scipy", "matplotlib", "pydantic"} & set(loaded)
