"""`scalerl train engine=sglang` from start to end on real servers that is killed and resumed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scalerl.rl.runlog import read_config, read_rows
from scalerl.rl.sampler import build_sampler
from scalerl.rl.tasks import build_task
from tests.rl.small_run import SMALL

from .conftest import PYTHON
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
