"""Runs that are killed, stopped and resumed: what is left equals a run that nothing happened to.

Each run is the command `scalerl train` in a process group of its own, forked from here so that it starts at once."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from scalerl.cli.main import main
from scalerl.rl import checkpoint, resume, runlog
from scalerl.rl.evaluation import Evaluator
from scalerl.rl.run import Run
from scalerl.rl.trainer import Trainer
from tests.rl.small_run import SMALL, rows

torch.set_num_threads(1)
GROWING = (
    *("samples", "train_tokens", "generated_tokens", "flops"),
    *("device_hours", "eval_device_hours", "checkpoint_device_hours", "wasted_device_hours"),
)


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner, name, nth=1):
    """Kills at the nth call of a function, before it does anything."""

    def hook():
        original, calls = getattr(owner, name), itertools.count(1)

        def wrapped(*args, **kwargs):
            if next(calls) == nth:
                kill()
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    return hook


def half_a_line():
    def append(file, row):
        with file.open("a") as f:
            f.write(json.dumps(runlog.strict(row))[:20])
            f.flush()
            kill()

    runlog.append_row = append


def half_a_checkpoint():
    def write(tensors, folder, group):
        (folder / ".metadata").write_bytes(b"half")
        kill()

    checkpoint.write_tensors = write
    sys.modules[Trainer.__module__].write_tensors = write  # pyright: ignore[reportAttributeAccessIssue]


POINTS = {
    "in a step": before(Run, "_update", 2),
    "in an optimiser step": before(torch.optim.AdamW, "step"),
    "in an evaluation": before(Evaluator, "rows"),
    "between the two files of an evaluation": before(runlog.RunLog, "_mirror"),
    "in a line of the log": half_a_line,
    "in a checkpoint's tensors": half_a_checkpoint,
    "before a checkpoint's rename": before(checkpoint, "_move_into_place"),
    "after a checkpoint's rename": before(checkpoint, "_sync", 2),
    "as a resume notes what was lost": before(resume, "write_rows"),
    "as a resume cuts the log": before(runlog.RunLog, "cut_after"),
}


def after(seconds):
    """Kills so long after training has begun."""

    def hook():
        original = Run.train

        def train(self):
            threading.Timer(seconds, kill).start()
            original(self)

        Run.train = train

    return hook


def command(arguments, hook, log):
    os.setsid()
    hook()
    sys.argv = ["scalerl", "train", *arguments]
    with Path(log).open("a", buffering=1) as f, redirect_stdout(f), redirect_stderr(f):
        main()


def begin(path, overrides=(), hook=lambda: None):
    """Start the run, or resume it where its folder is there."""
    arguments = ["--resume", str(path), *overrides] if path.exists() else [*overrides, "--run-dir", str(path)]
    process = multiprocessing.get_context("fork").Process(
        target=command, args=(arguments, hook, path.with_suffix(".log"))
    )
    process.start()
    return process


def pid(process) -> int:
    assert process.pid is not None
    return process.pid


def end(process, path):
    """Its exit code, when every process of its group has gone."""
    process.join(300)
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        try:
            os.killpg(pid(process), 0)
        except ProcessLookupError:
            return process.exitcode
        time.sleep(0.05)
    pytest.fail(f"a process is left behind: {path.with_suffix('.log').read_text()}")


def check(path, whole):
    """A finished run against an undisturbed one."""
    for name in ("eval.jsonl", "metrics.jsonl"):
        assert rows(path, name) == rows(whole, name), path.with_suffix(".log").read_text()
    evaluations = runlog.read_rows(path / "eval.jsonl")
    for axis in GROWING:
        values = [row[axis] for row in evaluations]
        assert values == sorted(values), axis
    prompts = pd.read_parquet(path / "eval_prompts.parquet")
    pd.testing.assert_frame_equal(prompts, pd.read_parquet(whole / "eval_prompts.parquet"))
    for row in evaluations:
        of_step = prompts[prompts["step"] == row["step"]]
        share = np.mean(of_step["correct"] / of_step["n_samples"])
        assert float(share) == pytest.approx(row["pass_rate"])
    assert [p.name for p in sorted(path.glob("checkpoints/*"))] == ["step_12", "step_14"]
    assert not list(path.glob("*.tmp"))
    return evaluations[-1]["wasted_device_hours"]


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    return [*SMALL, f"model.cache_dir={tmp_path_factory.mktemp('cache')}"]


@pytest.fixture(scope="module")
def whole(overrides, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run"
    assert end(begin(path, overrides), path) == 0, path.with_suffix(".log").read_text()
    return path


@pytest.mark.slow
@pytest.mark.parametrize("process", ["beside", "inline"])
def test_twenty_kills(overrides, whole, tmp_path, process):
    """Ten at named points and ten at random moments, in random order; each time the next process goes on. A run that
    ends before its moment comes is checked, and the moment goes to the next run, which begins with a kill of its own:
    two of the points lie in a resume."""
    rng = random.Random(process)
    moments = [*POINTS.values(), *[None] * 10]
    rng.shuffle(moments)
    wasted, number, kills = 0.0, 0, 0
    while moments:
        path = tmp_path / f"run{number}"
        given = () if path.exists() else (*overrides, f"engine.process={process}")
        moment = moments[-1] if path.exists() else POINTS["in a step"]
        code = end(begin(path, given, moment or after(rng.uniform(0, 1))), path)
        assert code in (0, -signal.SIGKILL), path.with_suffix(".log").read_text()
        if code == 0:
            wasted, number = wasted + check(path, whole), number + 1
        elif not given:
            kills += 1
            moments.pop()
    path = tmp_path / f"run{number}"
    assert end(begin(path), path) == 0
    assert kills == 20
    assert wasted + check(path, whole) > 0


def wait_for(file, text=""):
    limit = time.monotonic() + 120
    while not (file.exists() and text in file.read_text()):
        assert time.monotonic() < limit, f"{file} never came"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_at_a_checkpoint_and_the_run_goes_on(overrides, whole, tmp_path, number):
    path = tmp_path / "run"
    for line in ('"step": 1,', '"step": 6,'):  # after the first step, and after the sixth
        process = begin(path, () if path.exists() else overrides)
        wait_for(path / "metrics.jsonl", line)
        os.killpg(pid(process), number)  # the whole group, as a terminal and Slurm do
        assert end(process, path) == 0
        said = path.with_suffix(".log").read_text()
        assert f"resume with: scalerl train --resume {path}" in said
    assert end(begin(path), path) == 0
    assert check(path, whole) == 0


def pausing_evaluation():
    """An evaluation whose first tick lasts until a signal comes."""
    from scalerl.rl.engines.generator import GeneratorCore

    original = GeneratorCore.evaluate

    def evaluate(self, requests, version, to_the_end):
        Path(os.environ["STARTED"]).touch()
        while not self._abandoned.value:
            time.sleep(0.01)
        return original(self, requests, version, to_the_end)

    GeneratorCore.evaluate = evaluate


@pytest.mark.slow
@pytest.mark.parametrize("process", ["beside", "inline"])
def test_a_signal_ends_a_long_evaluation(overrides, whole, tmp_path, monkeypatch, process):
    path = tmp_path / "run"
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    started = begin(path, [*overrides, f"engine.process={process}"], pausing_evaluation)
    wait_for(tmp_path / "started")
    os.kill(pid(started), signal.SIGTERM)
    assert end(started, path) == 0
    assert rows(path, "eval.jsonl") == []
    assert end(begin(path), path) == 0
    for name in ("eval.jsonl", "metrics.jsonl"):
        assert rows(path, name) == rows(whole, name)


def deaf():
    """A trainer that never comes to an end."""

    def update(self, prepared):
        Path(os.environ["STARTED"]).touch()
        time.sleep(1000)
        return {}

    Run._update = update  # pyright: ignore


@pytest.mark.slow
def test_a_second_signal_ends_at_once(overrides, tmp_path, monkeypatch):
    path = tmp_path / "run"
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    process = begin(path, overrides, deaf)
    wait_for(tmp_path / "started")
    os.kill(pid(process), signal.SIGTERM)
    process.join(1)
    assert process.exitcode is None
    os.kill(pid(process), signal.SIGTERM)
    assert end(process, path) == -signal.SIGTERM
