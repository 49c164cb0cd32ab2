"""`scalerl train engine=sglang` from start to end on real servers: killed and resumed, sharded, and its curve."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from scalerl.cli.compose import compose
from scalerl.rl.run import model_folder
from scalerl.rl.runlog import read_config, read_rows
from scalerl.rl.sampler import build_sampler
from scalerl.rl.tasks import build_task
from tests.rl.small_run import SMALL

from .conftest import PYTHON, answered, running
from .recorded import MOMENTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.is_file(), reason="no SGLang server here: scripts/setup_sglang sets one up"),
]
RECORDED = Path(__file__).with_name("recorded.py")
LIMIT = 900  # seconds, on a machine that does other things too


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def overrides(cache):
    """Of a run of seconds, in which every prompt comes in the order that the seed gives."""
    small = [override for override in SMALL if not override.startswith("engine.")]
    return [
        *small,
        "engine=sglang",
        f"engine.python={PYTHON}",
        "engine.kv_tokens=16384",
        "engine.start_limit=800",  # of a busy machine
        "recipe.resample_positive=true",
        "recipe.zero_variance=keep",  # every batch makes a step, and an update of the servers
        f"model.cache_dir={cache}",
    ]


def train(arguments, path, moment="never", launcher=()):
    """The command, in a process group of its own; its output goes to a file beside the run."""
    command = [*(launcher or [sys.executable, "-P"]), str(RECORDED), str(path.with_suffix(".jsonl")), moment, "train"]
    with path.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [*command, *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def torchrun(ranks):
    program = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", str(ranks), "--no-python"]
    return [*program, sys.executable, "-P"]


def processes(text):
    """Those whose command line holds it."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            if text in file.read_text():
                found.append(int(file.parent.name))
    return found


def gone(text, limit=60):
    end = time.monotonic() + limit
    while processes(text) and time.monotonic() < end:
        time.sleep(0.1)
    return not processes(text)


def end(process, path):
    """Its exit code, once every process that knows of the run has ended."""
    try:
        code = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        process.terminate()  # the first signal asks, the second doesn't
        process.terminate()
        pytest.fail(f"no end within {LIMIT} s: {path.with_suffix('.log').read_text()}")
    assert gone(str(path)), f"{processes(str(path))} are left behind"
    return code


def check(path, steps):
    """Every batch was trained of the prompts that the seed gives, in their order, and once: what a kill has undone is
    written down twice, and counts as it was done last."""
    config = read_config(path)
    size, sampler = config.recipe.prompts_per_batch, build_sampler(build_task(config.task), config)
    expected = [(group, prompt.id) for group, _, prompt in (sampler.next() for _ in range(steps * size))]
    batches = {
        row["step"]: row["groups"] for row in map(json.loads, path.with_suffix(".jsonl").read_text().splitlines())
    }
    trained = [tuple(group) for step in sorted(batches) for group in batches[step]]
    assert trained == expected
    assert [row["step"] for row in read_rows(path / "metrics.jsonl")] == list(range(1, steps + 1))
    evaluations = read_rows(path / "eval.jsonl")
    assert [row["step"] for row in evaluations] == [0, 4, 8, 12, 14]
    for axis in ("samples", "train_tokens", "generated_tokens", "flops", "device_hours", "wasted_device_hours"):
        values = [row[axis] for row in evaluations]
        assert values == sorted(values), axis
    return evaluations


def test_a_killed_run_goes_on_with_the_server_that_it_left(overrides, server, tmp_path):
    """Killed while its rollouts are out, within a weight update and in an evaluation, and resumed each time."""
    path, url = tmp_path / "run", f"http://127.0.0.1:{server.port}"
    for moment in (*(moment for moment in MOMENTS if moment != "never"), "never"):
        arguments = ["--resume", str(path)]
        if not path.exists():
            arguments = [*overrides, f"engine.urls=[{url}]", "--run-dir", str(path)]
        process = train(arguments, path, moment)
        expected = 0 if moment == "never" else -signal.SIGKILL
        assert end(process, path) == expected, (moment, path.with_suffix(".log").read_text())
    assert check(path, 14)[-1]["wasted_device_hours"] > 0
    assert server.alive


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_run_whose_server_fails_trains_every_prompt_once(overrides, cache, tmp_path, how):
    """kill -9 of the run's server, or SIGSTOP for good, while its rollouts are out."""
    path = tmp_path / "run"
    process = train([*overrides, "engine.stall_limit=20", "engine.transfer_limit=20", "--run-dir", str(path)], path)
    begun = time.monotonic()
    while not path.with_suffix(".jsonl").exists() or len(path.with_suffix(".jsonl").read_text().splitlines()) < 3:
        assert process.poll() is None and time.monotonic() - begun < LIMIT, path.with_suffix(".log").read_text()
        time.sleep(0.02)
    os.killpg(os.getpgid(processes(f"--model-path\0{cache}")[0]), how)
    assert end(process, path) == 0, path.with_suffix(".log").read_text()
    check(path, 14)
    assert "starting it again (1/3)" in path.with_suffix(".log").read_text()
    assert gone(f"--model-path\0{cache}"), "a server is left behind"


def test_two_ranks_and_two_servers_leave_nothing_behind_and_go_on(overrides, cache, tmp_path):
    """kill -9 of the first of two trainer ranks, within a weight update: the other one and both servers end too."""
    path = tmp_path / "run"
    first = train([*overrides, "engine.servers=2", "--run-dir", str(path)], path, "within an update", torchrun(2))
    assert end(first, path) == 1, path.with_suffix(".log").read_text()
    assert len(path.with_suffix(".jsonl").read_text().splitlines()) == 4  # batches that it has trained
    assert gone(f"--model-path\0{cache}"), "a server is left behind"
    second = train(["--resume", str(path)], path, launcher=torchrun(2))
    assert end(second, path) == 0, path.with_suffix(".log").read_text()
    check(path, 14)
    assert gone(f"--model-path\0{cache}", 0)
    for number in range(2):
        assert (path / "servers" / f"server_{number}.log").read_text().count("POST /generate") > 50


SHORT = [
    "steps=24",
    "eval.every=4",
    "eval.n_prompts=64",
    "eval.n_samples=4",
    "recipe.prompts_per_batch=16",
    "recipe.group_size=8",
    "recipe.k=2",
    "engine.slots=64",
    "engine.ticks_per_step=50",
    "trainer.lr=4.0e-4",
    "trainer.warmup_steps=4",
    "trainer.save_every=0",
]


@pytest.fixture(scope="module")
def by_torch(cache, tmp_path_factory):
    return learned([*SHORT, f"model.cache_dir={cache}"], tmp_path_factory.mktemp("torch"))


@pytest.fixture(scope="module")
def served(cache, tmp_path_factory):
    """The short run on SGLang, and two servers that know its model."""
    short = [override for override in SHORT if not override.startswith("engine.")]
    short += ["engine=sglang", f"engine.python={PYTHON}", "engine.kv_tokens=16384", f"model.cache_dir={cache}"]
    config = compose([*short, "engine.servers=2"], run_dir=str(tmp_path_factory.mktemp("servers"))).config
    with running(config, model_folder(config, build_task(config.task))) as servers:
        yield short, servers


@pytest.mark.parametrize("n", [1, 2])
def test_the_demo_learns_what_it_learns_on_the_torch_engine(by_torch, served, n, tmp_path):
    """On n servers and with n trainer ranks. Mean pass rate of the last 5 evaluations, over 2 seeds: the engines differ
    by less than 2 combined standard errors."""
    overrides, servers = served[0], served[1][:n]
    before = [answered(server) for server in servers]
    urls = ",".join(f"http://127.0.0.1:{server.port}" for server in servers)
    launcher = torchrun(n) if n > 1 else ()
    mean, error = learned([*overrides, f"engine.urls=[{urls}]"], tmp_path, launcher)
    print(f"torch {by_torch[0]:.3f} ± {by_torch[1]:.3f}, {n} server(s) {mean:.3f} ± {error:.3f}")
    assert abs(by_torch[0] - mean) < 2 * np.hypot(by_torch[1], error)
    shares = [answered(server) - b for server, b in zip(servers, before, strict=True)]
    assert min(shares) > 0.8 * max(shares), shares


def learned(overrides, folder, launcher=()):
    """(mean, its standard error) over two seeds, of runs that have learned something.

    A run's error is that of its evaluations, or the spread between the seeds where that is larger. A run's evaluations
    share their prompts, so that five of them have no smaller error than one; each seed draws prompts of its own."""
    means, errors = [], []
    for seed in (0, 1):
        path, begun = folder / f"seed{seed}", time.monotonic()
        given = [*overrides, f"seed={seed}", f"eval.seed={seed}", "--run-dir", str(path)]
        process = train(given, path, launcher=launcher)
        assert end(process, path) == 0, path.with_suffix(".log").read_text()
        evaluations = read_rows(path / "eval.jsonl")
        rates = [row["pass_rate"] for row in evaluations]
        print(f"{path}: {np.round(rates, 3)}, {time.monotonic() - begun:.0f} s")
        means.append(np.mean(rates[-5:]))
        errors.append(np.mean([row["stderr"] for row in evaluations[-5:]]))
        assert rates[-1] > rates[0] + 0.1
    return np.mean(means), max(np.sqrt(np.mean(np.square(errors))), np.std(means, ddof=1)) / np.sqrt(2)
