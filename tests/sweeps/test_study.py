"""Studies of real runs: jobs at a time, what a crash or a full disk leaves, kills and resumption, Slurm."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from scalerl.cli.compose import compose
from scalerl.cli.main import app
from scalerl.rl.ledger import Ledger
from scalerl.sweeps.early_stop import EarlyStop
from scalerl.sweeps.launch import Local, LocalJob, Order, Slurm
from scalerl.sweeps.plan import Plan, make_plan, read_plan, write_plan
from scalerl.sweeps.state import last_row, last_words, run_state
from scalerl.sweeps.study import Member, run_study

SMALL = (
    "model.architecture.hidden_size=32",
    "model.architecture.layers=2",
    "model.architecture.intermediate_size=32",
    "model.warm_start.steps=200",
    "model.warm_start.batch_size=16",
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
    "trainer.save_every=4",
    "steps=16",
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def small_plan(cache: Path, kind: str, *overrides: str, **choices: Any) -> Plan:
    choices = {"x": "flops", "seeds": [0], "command": "scalerl sweep"} | choices
    own = [*SMALL, f"model.cache_dir={cache}", *overrides]
    return make_plan(kind, "study", own, lambda texts: compose(texts, run_dir="unused").config, **choices)


def statuses(members: list[Member]) -> dict[str, str]:
    return {member.name: member.status for member in members}


def evaluations(run: Path) -> list[dict[str, Any]]:
    lines = (run / "eval.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in Ledger.CLOCK_FIELDS} for line in lines]


@pytest.fixture(scope="module")
def finished(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    """A study of three arms that nothing disturbed."""
    study = tmp_path_factory.mktemp("studies") / "whole"
    plan = small_plan(cache, "loo", axes=["loss", "zero_variance"])
    write_plan(study, plan)
    seen: list[int] = []
    members = run_study(study, plan, Local(2), on_change=lambda ms: seen.append(sum(m.status == "running" for m in ms)))
    assert statuses(members) == {"base": "done", "loss=dapo": "done", "zero_variance=keep": "done"}
    assert max(seen) == 2
    return study, plan


def test_arms_are_ordinary_runs(finished: tuple[Path, Plan]):
    study, plan = finished
    for arm in plan.arms:
        run = study / plan.run_folder(arm, 0)
        assert run_state(run) == run_state(run) and run_state(run).state == "done" and run_state(run).step == 16
        assert [row["step"] for row in evaluations(run)] == [0, 4, 8, 12, 16]
    base, loss = (evaluations(study / plan.run_folder(arm, 0)) for arm in plan.arms[:2])
    assert base[0] == loss[0] and base != loss  # the same policy at the start


class Nothing:
    jobs = 1

    def start(self, order: Order) -> LocalJob:
        raise AssertionError("nothing is left to start")


def test_a_finished_study_runs_nothing_again(finished: tuple[Path, Plan]):
    study, plan = finished
    assert set(statuses(run_study(study, plan, Nothing())).values()) == {"done"}


def test_an_arm_that_crashes_stops_no_other_and_is_told_with_its_last_words(cache: Path, tmp_path: Path):
    plan = small_plan(cache, "axis", "steps=4", swept=("trainer.device", ["cuda:99"]))
    write_plan(tmp_path / "study", plan)
    members = run_study(tmp_path / "study", plan, Local(1))
    assert statuses(members) == {"base": "done", "trainer.device=cuda:99": "failed"}
    assert "cuda:99" in " ".join(members[1].words)


class FullDisk(Local):
    """A disk with room for the small files and not for a checkpoint."""

    def start(self, order: Order) -> LocalJob:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            return super().start(order)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
def test_a_full_disk_is_told_in_one_line_and_the_study_goes_on_once_there_is_room(
    finished: tuple[Path, Plan], cache: Path, tmp_path: Path
):
    whole, plan = finished
    plan = replace(plan, arms=plan.arms[:1])
    write_plan(tmp_path / "study", plan)
    (member,) = run_study(tmp_path / "study", plan, FullDisk(1))
    assert member.status == "failed"
    assert "can't be written: OSError: [Errno 27] File too large" in member.words[-1]
    assert "Traceback" not in member.order.log.read_text()
    assert statuses(run_study(tmp_path / "study", plan, Local(1))) == {"base": "done"}
    assert evaluations(member.order.run) == evaluations(whole / member.order.run.relative_to(tmp_path / "study"))


class Hopeless(EarlyStop):
    """Sure of itself as soon as there is a run."""

    def reason(self, base: Path, arm: Path) -> str | None:
        return "ended early: hopeless" if run_state(arm).state == "begun" else None


def test_an_arm_that_is_ended_early_stays_ended(finished: tuple[Path, Plan], tmp_path: Path):
    whole, plan = finished
    study, plan = tmp_path / "study", replace(plan, arms=plan.arms[:2])
    write_plan(study, plan)
    members = run_study(study, plan, Local(2), early_stop=Hopeless(0.99, "flops"))
    assert statuses(members) == {"base": "done", "loss=dapo": "stopped"}
    assert members[1].words == ["ended early: hopeless"] and members[1].step < 16
    assert evaluations(members[0].order.run) == evaluations(whole / plan.run_folder(plan.arms[0], 0))
    assert statuses(run_study(study, plan, Nothing())) == statuses(members)


@pytest.mark.slow
def test_killed_studies_and_arms_resume_to_the_same_runs(finished: tuple[Path, Plan], cache: Path, tmp_path: Path):
    whole, plan = finished
    study = tmp_path / "study"
    write_plan(study, plan)
    command = [sys.executable, "-m", "scalerl.cli", "sweep", "loo", "--resume", str(study), "--jobs", "2"]
    log = (tmp_path / "log").open("ab")
    for wait_for in (4, 8):  # the study is killed, then an arm, and the study once more
        process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(lambda step=wait_for: any(run_state(run).step >= step for run in (study / "runs").glob("*")))
        if wait_for == 8:
            os.kill(a_run(study), signal.SIGKILL)
            time.sleep(1)
        process.kill()
        process.wait()
        wait_until(lambda: not runs_of(study))  # they die with the study
    done = subprocess.run(command, stdout=log, stderr=log)
    assert done.returncode == 1, (tmp_path / "log").read_text()  # every run is done, and too short for a fit
    for arm in plan.arms:
        folder = plan.run_folder(arm, 0)
        assert evaluations(study / folder) == evaluations(whole / folder)


def wait_until(true: Any, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


def runs_of(study: Path) -> list[int]:
    """Processes that train into the study."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if b"train" in command and any(part.startswith(str(study).encode()) for part in command):
            found.append(int(entry.name))
    return found


def a_run(study: Path) -> int:
    wait_until(lambda: runs_of(study))
    return runs_of(study)[0]


def test_a_study_on_slurm_runs_the_same_jobs(finished: tuple[Path, Plan], cache: Path, tmp_path: Path):
    """submitit's local executor takes the whole path: pickled, started as a job, its result read back."""
    whole, plan = finished
    plan = replace(plan, arms=plan.arms[:2])
    write_plan(tmp_path / "study", plan)
    launcher = Slurm(tmp_path / "study" / "slurm", {"timeout_min": 10}, jobs=2, cluster="local")
    members = run_study(tmp_path / "study", plan, launcher)
    assert statuses(members) == {"base": "done", "loss=dapo": "done"}
    for arm in plan.arms:
        folder = plan.run_folder(arm, 0)
        assert evaluations(tmp_path / "study" / folder) == evaluations(whole / folder)


def test_what_is_submitted_to_slurm(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A stand-in for sbatch keeps the job file that the real submitit hands it."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sbatch", "srun", "sacct", "scancel"):
        tool = tools / name
        keep = f'cat "$f" > {tmp_path}/submitted' if name == "sbatch" else ":"
        tool.write_text(f'#!/bin/sh\nfor f; do :; done\n{keep}\necho "Submitted batch job 17"\n')
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    launcher = Slurm(tmp_path / "slurm", {"slurm_partition": "gpu", "gpus_per_node": 8, "timeout_min": 90}, jobs=4)
    launcher.start(Order(tmp_path / "run", ("seed=3",), tmp_path / "log"))
    submitted = (tmp_path / "submitted").read_text()
    for line in ("--partition=gpu", "--gpus-per-node=8", "--time=90", "--signal=USR2@"):
        assert f"#SBATCH {line}" in submitted
    assert "submitit" in submitted.splitlines()[-1]


def test_slurm_options_that_nobody_knows_are_refused(tmp_path: Path):
    run = CliRunner().invoke(app, ["sweep", "seeds", "--launcher", "slurm", "--study", str(tmp_path / "study")])
    assert run.exit_code == 2 and "no Slurm here" in run.stderr
    run = CliRunner().invoke(app, ["sweep", "seeds", "--launcher", "cloud"])
    assert run.exit_code == 2 and "local or slurm" in run.stderr
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["loo", "seed=3"], "seed=3: a study gives its runs their seeds (--seeds 3,4)"),
        (["loo", "--seeds", "01,1"], "--seeds 01,1: how many, or different seeds"),
        (["loo", "--seeds", "\u00b2"], "how many, or different seeds"),
        (["axis"], "write KEY=V1,V2,..."),
        (["axis", "--resume", "nowhere"], "nowhere is no study"),
    ],
)
def test_what_a_study_can_not_do_is_one_line(arguments: list[str], words: str):
    run = CliRunner().invoke(app, ["sweep", *arguments, *(["--plan-only"] if "--resume" not in arguments else [])])
    assert run.exit_code == 2 and words in run.stderr and "Traceback" not in run.stderr


def write_run(folder: Path, a: float, until: int) -> None:
    folder.mkdir(parents=True)
    rows = [
        {"set": "held_out", "step": s, "flops": float(s), "pass_rate": 0.1 + (a - 0.1) / (1 + (20 / max(s, 1e-9)) ** 2)}
        for s in range(0, until + 1, 5)
    ]
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.json").write_text(json.dumps({"steps": 200}))


def test_an_arm_is_ended_early_when_it_is_as_good_as_certain(tmp_path: Path):
    write_run(tmp_path / "base", 0.8, 200)
    write_run(tmp_path / "worse", 0.5, 200)
    write_run(tmp_path / "alike", 0.79, 200)
    write_run(tmp_path / "young", 0.5, 5)
    stop = EarlyStop(0.99, "flops")
    assert "below the base at 400 with probability 1.000" in str(stop.reason(tmp_path / "base", tmp_path / "worse"))
    assert stop.reason(tmp_path / "base", tmp_path / "worse") is None  # nothing new to look at
    for name in ("alike", "young", "absent"):
        assert stop.reason(tmp_path / "base", tmp_path / name) is None, name


def test_the_state_of_a_run_is_read_from_its_files(tmp_path: Path):
    assert run_state(tmp_path / "none").state == "absent"
    write_run(tmp_path / "run", 0.8, 200)
    assert run_state(tmp_path / "run").state == "begun"  # its last checkpoint is missing
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 199}\n{"step": 200}\n{"st')
    (tmp_path / "run" / "checkpoints" / "step_200").mkdir(parents=True)
    state = run_state(tmp_path / "run")
    assert (state.state, state.step) == ("done", 200) and state.pass_rate == pytest.approx(0.793, abs=1e-3)
    assert last_row(tmp_path / "run" / "eval.jsonl", "other") == {}
    (tmp_path / "log").write_text("a\n\nb\n  c\n")
    assert last_words(tmp_path / "log", 2) == ["b", "c"] and last_words(tmp_path / "no log") == []


def test_the_command_shows_its_plan_and_answers_mistakes_in_one_line(tmp_path: Path):
    run = CliRunner().invoke(app, ["sweep", "loo", "--plan-only", "--axes", "loss", "--study", str(tmp_path / "s")])
    assert run.exit_code == 0 and "recipe.loss: cispo -> dapo" in run.stdout
    assert not (tmp_path / "s").exists()
    for arguments, message in (
        (["loo", "--axes", "los"], "--axes los"),
        (["loo", "recipe.los=dapo"], "did you mean 'recipe.loss'"),
        (["loo", "--resume", str(tmp_path)], "is no study"),
        (["axis", "group_size"], "write KEY=V1,V2"),
        (["axis", "group_size=7", "--fixed-total-batch"], "isn't divisible"),
        (["seeds", "--seeds", "0"], "how many"),
    ):
        run = CliRunner().invoke(app, ["sweep", *arguments])
        assert run.exit_code == 2 and message in run.stderr and run.stderr.count("\n") == 1, arguments


def test_a_study_of_another_kind_is_not_resumed(cache: Path, tmp_path: Path):
    write_plan(tmp_path / "study", small_plan(cache, "seeds"))
    assert read_plan(tmp_path / "study").kind == "seeds"
    run = CliRunner().invoke(app, ["sweep", "loo", "--resume", str(tmp_path / "study")])
    assert run.exit_code == 2 and "scalerl sweep seeds --resume" in run.stderr


@pytest.mark.parametrize("option", [["--seeds", "3"], ["--x", "flops"], ["steps=3"], ["--study", "other"]])
def test_a_resume_takes_nothing_that_its_plan_says(cache: Path, tmp_path: Path, option: list[str]):
    write_plan(tmp_path / "study", small_plan(cache, "seeds"))
    run = CliRunner().invoke(app, ["sweep", "seeds", "--resume", str(tmp_path / "study"), *option])
    assert run.exit_code == 2 and "--resume goes on under the study's own plan" in run.stderr
