"""What goes wrong with servers: each ends in recovery, or in one clear error."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from scalerl.rl.engines.sglang.generator import SGLangGenerator
from scalerl.rl.engines.sglang.server import ServerProcess
from scalerl.rl.errors import UserError
from scalerl.rl.types import Sampling

from .conftest import PYTHON, TOKENIZER, make_config, requests

END = TOKENIZER.eos_token_id
LONG = Sampling(1.0, 400, ())
GREEDY = Sampling(1.0, 24, (END,), top_k=1)


def group_is_gone(group: int, limit: float = 20.0) -> bool:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


class Garbage(BaseHTTPRequestHandler):
    """Answers everything with broken JSON."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"nonsense": ')

    do_POST = do_GET

    def log_message(self, format, *args):
        pass


@contextlib.contextmanager
def garbage_server():
    server = HTTPServer(("127.0.0.1", 0), Garbage)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_server_that_answers_garbage_is_no_server(models, tmp_path):
    with garbage_server() as url, pytest.raises(UserError, match="answers something that is no JSON"):
        config = make_config(tmp_path, models["first"], f"engine.urls=[{url}]", "engine.start_limit=10")
        SGLangGenerator(config, models["first"], LONG)


def test_a_refused_port_ends_within_its_limit(models, tmp_path):
    config = make_config(tmp_path, models["first"], "engine.urls=[http://127.0.0.1:9]", "engine.start_limit=1")
    start = time.monotonic()
    with pytest.raises(UserError, match=r"^http://127\.0\.0\.1:9: All connection attempts failed"):
        SGLangGenerator(config, models["first"], LONG)
    assert time.monotonic() - start < 30


def test_a_missing_environment_is_said(models, tmp_path):
    config = make_config(tmp_path, models["first"], "engine.python=/nowhere/python")
    with pytest.raises(UserError, match=r"engine\.python=/nowhere/python is not there; scripts/setup_sglang makes it"):
        SGLangGenerator(config, models["first"], LONG)


def test_a_server_that_does_not_start_is_quoted(models, tmp_path):
    """Any Python that has no sglang: the launcher's own error is in the message."""
    config = make_config(tmp_path, models["first"], f"engine.python={sys.executable}", "engine.device=cuda")
    with pytest.raises(UserError, match=r"server_0\.log ends: ModuleNotFoundError: No module named 'sglang'"):
        SGLangGenerator(config, models["first"], LONG)


def test_a_server_ends_with_the_process_that_started_it(tmp_path):
    """The launcher of the servers, killed parent and all; what it launches here only sleeps."""
    program = (
        "import subprocess, sys, time\n"
        "from scalerl.rl.engines.sglang import launch\n"
        "code = f'import sys, threading, time; sys.path.insert(0, {launch.__file__.rpartition(\"/\")[0]!r}); '\\\n"
        '       \'import launch, subprocess; subprocess.Popen(["sleep", "600"]); \'\\\n'
        "       'threading.Thread(target=launch.end_with_parent, daemon=True).start(); time.sleep(600)'\n"
        "child = subprocess.Popen([sys.executable, '-c', code], stdin=subprocess.PIPE, start_new_session=True)\n"
        "print(child.pid, flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    group = int(parent.stdout.readline())
    os.killpg(group, 0)
    parent.kill()
    parent.wait()
    assert group_is_gone(group)


@pytest.mark.slow
def test_an_abort_from_outside_costs_nothing(make_generator, server):
    generator, asked = make_generator(LONG), requests(4, 4)
    generator.call("submit", asked)
    time.sleep(0.5)
    httpx.post(f"http://127.0.0.1:{server.port}/abort_request", json={"abort_all": True}).raise_for_status()
    groups = generator.call("run_until", [0, 1, 2, 3]).groups
    assert sorted(group.group for group in groups) == [0, 1, 2, 3]
    assert all(len(c.tokens) == 400 for group in groups for c in group.completions)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.is_file(), reason="no SGLang server here: scripts/setup_sglang sets one up")
@pytest.mark.parametrize("transfer", ["broadcast", "disk"])
def test_killed_and_stopped_servers_are_started_again(models, tmp_path, transfer, capsys):
    """kill -9 and SIGSTOP while completions are in progress: each group is complete once, and under the current
    weights; closing leaves no process."""
    overrides = (f"engine.transfer={transfer}", "engine.stall_limit=20")
    generator = SGLangGenerator(make_config(tmp_path / "run", models["first"], *overrides), models["first"], LONG)
    (server,) = generator._fleet.servers
    second = dict(AutoModelForCausalLM.from_pretrained(models["second"], dtype=torch.float32).named_parameters())
    try:
        generator.update_weights(second, 1)
        for number, fault in enumerate((signal.SIGKILL, signal.SIGSTOP)):
            asked = requests(4, 4, first=10 * number)
            generator.call("submit", asked)
            time.sleep(0.5)
            group = process_of(server.process).pid
            os.killpg(group, fault)
            found = generator.call("run_until", [request.group for request in asked]).groups
            assert sorted(g.group for g in found) == [request.group for request in asked]
            assert all(len(c.tokens) == 400 and (c.versions == 1).all() for g in found for c in g.completions)
            assert server.restarts == number + 1 and group_is_gone(group)
    finally:
        last = process_of(server.process).pid
        generator.close()
    assert group_is_gone(last)
    assert "starting it again (2/3)" in capsys.readouterr().err


def process_of(server: ServerProcess | None) -> subprocess.Popen[bytes]:
    assert server is not None and server._process is not None
    return server._process
