"""`scalerl serve` and `scalerl doctor --align` on a real server."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import PYTHON, ready

COMMAND = [sys.executable, "-P", "-c", "from scalerl.cli.main import main; main()"]


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.is_file(), reason="no SGLang server here: scripts/setup_sglang sets one up")
def test_a_served_model_is_aligned_with_the_trainer(models: dict[str, Path], tmp_path: Path) -> None:
    """The doctor finds the server at its URL; both sides are fp32 and compute one function, decoding and prefilling."""
    run = ["engine=sglang", f"engine.python={PYTHON}", "engine.kv_tokens=16384", "model.dtype=float32"]
    model = ["model=hf", f"model.path={models['first']}"]
    serve = [*COMMAND, "serve", "--logs", str(tmp_path / "logs"), *run, *model]
    server = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[0]
        asyncio.run(ready(url, 400, lambda: server.poll() is None))
        align = [*COMMAND, "doctor", "--run-dir", str(tmp_path / "run"), "--align", str(models["first"])]
        options = ["--prompts", "8", "--samples", "4", f"engine.urls=[{url}]"]
        found = subprocess.run([*align, *options, *run], capture_output=True, text=True, timeout=600)
        print(found.stdout, found.stderr)
        assert found.returncode == 0
        for part in ("as decoded", "by prefill"):
            (line,) = [line for line in found.stdout.splitlines() if line.strip().startswith(part)]
            numbers = re.search(r"at most (\S+), mean .* k3 KL (\S+); F\(2\) 0\.00%", line)
            assert numbers is not None and float(numbers[1]) < 1e-4 and abs(float(numbers[2])) < 1e-9
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            assert server.wait(300) == 0
        finally:
            server.kill()
