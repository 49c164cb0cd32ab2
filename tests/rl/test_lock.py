"""Two processes never work on one run folder, and a dead one is in nobody's way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scalerl.rl.errors import UserError
from scalerl.rl.lock import lock_run
from scalerl.rl.runlog import read_rows
from tests.rl.small_run import SMALL, rows

HOLDER = """
import os, sys, time
from pathlib import Path
from scalerl.rl.lock import lock_run
with lock_run(Path(sys.argv[1])):
    child = os.fork()  # as a generator's process: it knows nothing of the lock
    if child:
        print(child, flush=True)
    time.sleep(60)
"""


def test_a_held_folder_is_refused_until_its_process_is_gone(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        refusal = rf"run {tmp_path} is being worked on by process {holder.pid} on "
        with pytest.raises(UserError, match=refusal), lock_run(tmp_path):
            pass
        holder.kill()
        holder.wait(60)
        os.kill(child, 0)  # the child lives on
        with lock_run(tmp_path):
            assert str(os.getpid()) in (tmp_path / "lock").read_text()
    finally:
        holder.kill()
        os.kill(child, signal.SIGKILL)


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    refusal = r"nowhere can't be written \(No such file or directory\)"
    with pytest.raises(UserError, match=refusal), lock_run(tmp_path / "nowhere"):
        pass


@pytest.mark.slow
def test_two_commands_on_one_run(tmp_path: Path) -> None:
    """The second resume is turned away and changes nothing; after a kill -9 of the first it goes on."""
    run, scalerl = tmp_path / "run", Path(sys.executable).with_name("scalerl")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    overrides = [*SMALL, f"model.cache_dir={tmp_path / 'cache'}", "steps=8"]
    resume = [scalerl, "train", "--resume", run]

    def finish(command: list) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)

    whole = finish([scalerl, "train", *overrides, "--run-dir", tmp_path / "whole"])
    assert whole.returncode == 0, whole.stderr
    first = subprocess.Popen(
        [scalerl, "train", *overrides, "--run-dir", run],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        limit = time.monotonic() + 600
        while len(read_rows(run / "metrics.jsonl")) < 3:
            assert time.monotonic() < limit and first.poll() is None
            time.sleep(0.02)
        first.send_signal(signal.SIGSTOP)
        before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
        refused = finish(resume)
        assert refused.returncode == 2
        (line,) = refused.stderr.strip().splitlines()
        assert f"is being worked on by process {first.pid} on" in line
        assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    finally:
        first.kill()
        first.wait(60)
    done = finish(resume)
    assert done.returncode == 0, done.stderr
    for name in ("eval.jsonl", "metrics.jsonl"):
        assert rows(run, name) == rows(tmp_path / "whole", name)
