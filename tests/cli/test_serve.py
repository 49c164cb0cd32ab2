"""`scalerl serve`, with something in the server's place that only sleeps or fails."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-P", "-c", "from scalerl.cli.main import main; main()", "serve"]
LIMIT = 300  # seconds; where nothing else runs a command takes ten


@pytest.fixture
def serve(tmp_path):
    """Starts `scalerl serve` of two servers whose Python is a shell script."""

    started: list[subprocess.Popen[str]] = []

    def start(script: str, *overrides: str) -> subprocess.Popen[str]:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        small = ["model.warm_start.steps=0", f"model.cache_dir={tmp_path}"]
        arguments = ["--logs", str(tmp_path / "logs"), "engine=sglang", f"engine.python={python}", "engine.servers=2"]
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen([*COMMAND, *arguments, *small, *overrides], stdout=pipe, stderr=pipe, text=True)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()


def test_servers_stay_until_a_signal_and_none_is_left(serve, tmp_path):
    process = serve(f"echo $$ >> {tmp_path}/pids; exec sleep 600")
    assert process.stdout is not None
    urls = [process.stdout.readline().split()[0] for _ in range(2)]
    assert len(set(urls)) == 2 and all(url.startswith("http://127.0.0.1:") for url in urls)
    pids, end = tmp_path / "pids", time.monotonic() + LIMIT
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split())


def test_a_server_that_ends_is_quoted_and_takes_the_others_with_it(serve, tmp_path):
    process = serve(f"[ -e {tmp_path}/first ] && exec sleep 600; touch {tmp_path}/first; echo 'Error: no room'; exit 3")
    _, said = process.communicate(timeout=LIMIT)
    assert process.returncode == 1 and "has ended: Error: no room" in said


def test_it_is_for_servers_of_its_own(serve):
    _, said = (process := serve("exit 1", "engine.urls=[http://127.0.0.1:9]")).communicate(timeout=LIMIT)
    assert process.returncode == 2 and "no engine.urls, which are the trainer's" in said
