"""What goes wrong with servers: each ends in recovery, or in one clear error."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from scalerl.rl.engines.sglang.generator import SGLangGenerator
from scalerl.rl.engines.sglang.server import ServerProcess
from scalerl.rl.errors import UserError
from scalerl.rl.types import Sampling

from .conftest import PYTHON, TOKENIZER, answered, generate, make_config, requests, running, slowed

END = TOKENIZER.eos_token_id
LONG = Sampling(1.0, 200, ())
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
    before = answered(server)
    with slowed(server):
        generator.call("submit", asked)
        time.sleep(0.5)
        httpx.post(f"http://127.0.0.1:{server.port}/abort_request", json={"abort_all": True}).raise_for_status()
    check_groups(generator.call("run_until", [0, 1, 2, 3]).groups, asked, version=0)
    assert answered(server) - before > 16, "nothing was in progress when it was aborted"
    assert generator._fleet.servers[0].restarts == 0


ABORTED = b"""{"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "0"}}"""


@pytest.mark.slow
@pytest.mark.parametrize("times", [4, 5])
def test_a_server_that_only_aborts_is_not_asked_for_ever(make_generator, between, times):
    url = f"engine.urls=[http://127.0.0.1:{between.server_port}]"
    generator, asked = make_generator(LONG, url), requests(1, 1)
    between.instead["/generate"] = [(200, ABORTED)] * times
    generator.call("submit", asked)
    if times < 5:
        (group,) = generator.call("run_until", [0]).groups
        assert len(group.completions[0].tokens) == 200
    else:
        with pytest.raises(UserError, match=r"^http://\S+: 5 answers in a row without a token \(abort\)"):
            generator.call("run_until", [0])
    assert generator._fleet.servers[0].restarts == 0


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.is_file(), reason="no SGLang server here: scripts/setup_sglang sets one up")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_server_that_is_killed_or_stands_still_is_started_again(models, tmp_path, capsys, how):
    """kill -9, or SIGSTOP for longer than the limit, while completions are in progress: each group is complete once,
    and under the current weights; of the first server nothing is left, and of the second nothing after closing."""
    config = make_config(tmp_path / "run", models["first"], "engine.stall_limit=10")
    generator = SGLangGenerator(config, models["first"], LONG)
    (server,) = generator._fleet.servers
    try:
        generator.update_weights(weights(models["second"]), 1)
        asked = requests(4, 4)
        assert server.process is not None
        with contextlib.suppress(httpx.TransportError), slowed(server.process):
            generator.call("submit", asked)
            time.sleep(0.5)
            group = process_of(server.process).pid
            os.killpg(group, how)
            if how == signal.SIGSTOP:
                assert group_is_gone(group, 30), "it stood still for 30 s"
        check_groups(generator.call("run_until", [0, 1, 2, 3]).groups, asked, version=1)
        assert server.restarts == 1 and group_is_gone(group)
    finally:
        last = process_of(server.process).pid
        generator.close()
    assert group_is_gone(last)
    assert "starting it again (1/3)" in capsys.readouterr().err


def weights(path):
    return dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())


def check_groups(groups, asked, *, version):
    """Each group is there once, whole, and of one version."""
    assert sorted(group.group for group in groups) == [request.group for request in asked]
    for group in groups:
        assert len(group.completions) == 4
        assert all(len(c.tokens) == 200 and (c.versions == version).all() for c in group.completions)


@pytest.mark.slow
@pytest.mark.parametrize("stall_limit, restarts", [(120, 0), (4, 1)])
def test_a_server_that_stands_still_is_waited_for(make_generator, server, models, stall_limit, restarts):
    """SIGSTOP for 30 s, longer than the limit: what it was working on is given out again when it goes on, once; for a
    shorter time: nothing happens."""
    limits = f"engine.stall_limit={stall_limit}", f"engine.start_limit={2 * stall_limit}", "engine.max_restarts=20"
    generator = make_generator(LONG, *limits)
    asked, before = requests(4, 4), answered(server)
    generator.update_weights(weights(models["second"]), 1)
    with slowed(server):
        generator.call("submit", asked)
        time.sleep(0.5)
        group = process_of(server).pid
        os.killpg(group, signal.SIGSTOP)
        time.sleep(30)
        os.killpg(group, signal.SIGCONT)
    check_groups(generator.call("run_until", [0, 1, 2, 3]).groups, asked, version=1)
    assert generator._fleet.servers[0].restarts >= restarts
    assert restarts or (generator._fleet.servers[0].restarts, answered(server) - before) == (0, 16)


class Between(ThreadingHTTPServer):
    """Passes requests on to a server. `instead`: path -> the answers, status and body, to the next requests there."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Pass)
        self.behind = f"http://127.0.0.1:{port}"
        self.instead: dict[str, list[tuple[int, bytes]]] = {}

    def handle_error(self, request, client_address):
        pass  # who asked has given up


class _Pass(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        assert isinstance(self.server, Between)
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if instead := self.server.instead.get(self.path):
            status, content = instead.pop(0)
        else:
            url = self.server.behind + self.path
            headers = {"content-type": "application/json"}
            answer = httpx.request(self.command, url, content=body, headers=headers, timeout=300, trust_env=False)
            status, content = answer.status_code, answer.content
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, format, *args):
        pass


@pytest.fixture
def between(server):
    proxy = Between(server.port)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    yield proxy
    proxy.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("answer", [(200, b'{"nonsense": '), (200, b"{}"), (500, b"out of luck")])
def test_garbage_in_between_costs_nothing(make_generator, between, models, answer):
    url = f"engine.urls=[http://127.0.0.1:{between.server_port}]"
    generator, asked = make_generator(LONG, url), requests(4, 4)
    generator.update_weights(weights(models["second"]), 1)
    between.instead["/generate"] = [answer]
    generator.call("submit", asked)
    check_groups(generator.call("run_until", [0, 1, 2, 3]).groups, asked, version=1)
    assert not between.instead["/generate"] and generator._fleet.servers[0].restarts == 1


@pytest.mark.slow
def test_a_port_that_is_refused_from_now_on_ends_the_run(make_generator, between):
    url = f"engine.urls=[http://127.0.0.1:{between.server_port}]"
    generator = make_generator(LONG, url, "engine.start_limit=2", "engine.max_restarts=2")
    between.shutdown()
    between.server_close()
    time.sleep(3)  # open connections are used for 2 s
    start = time.monotonic()
    generator.call("submit", requests(4, 4))
    with pytest.raises(
        UserError, match=r"^no server is left; the last one: http://\S+: All connection attempts failed"
    ):
        generator.call("run_until", [0, 1, 2, 3])
    assert time.monotonic() - start < 60


@pytest.mark.slow
def test_an_update_that_is_refused_while_the_broadcast_waits_is_given_up(make_generator, between, models, capsys):
    """The server never joins the broadcast. Long before the limit its words are heard, and it gets the weights anew."""
    url = f"engine.urls=[http://127.0.0.1:{between.server_port}]"
    generator, asked = make_generator(LONG, url, "engine.transfer_limit=300"), requests(4, 4)
    refusal = b'{"success": false, "message": "no room for weights"}'
    between.instead["/update_weights_from_distributed"] = [(400, refusal)]
    start = time.monotonic()
    generator.update_weights(weights(models["second"]), 1)
    generator.call("submit", asked)
    check_groups(generator.call("run_until", [0, 1, 2, 3]).groups, asked, version=1)
    assert time.monotonic() - start < 200
    assert "weight update to version 1 failed: " in (said := capsys.readouterr().err) and "no room for weights" in said


@pytest.fixture
def small_disk(tmp_path):
    """The folder of the weights, with room for 32 KiB."""
    folder = tmp_path / "run" / "servers"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system of its own can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_one_clear_error(make_generator, models, small_disk):
    with pytest.raises(UserError, match=r"can't be written to \S+/servers/weights: .*No space left on device"):
        make_generator(LONG, "engine.transfer=disk")
    assert not list(small_disk.iterdir())
    assert generate(make_generator(GREEDY), requests(1, 1)).keys() == {0}  # the server goes on


@pytest.mark.slow
def test_a_server_that_ends_over_a_model_of_another_shape_is_one_clear_error(models, tmp_path):
    """Through the disk SGLang doesn't survive it: it would go back to weights that it no longer knows."""
    with running(make_config(tmp_path / "server", models["first"]), models["first"]) as (process,):
        urls = f"engine.urls=[http://127.0.0.1:{process.port}]"
        config = make_config(tmp_path / "run", models["wide"], urls, "engine.transfer=disk")
        group, start = process_of(process).pid, time.monotonic()
        with pytest.raises(UserError, match=r"^weight update to version 0 failed: .* start it with the run's model"):
            SGLangGenerator(config, models["wide"], LONG)
        assert time.monotonic() - start < 120  # engine.transfer_limit
        assert not process.alive and group_is_gone(group)
        assert not (tmp_path / "run" / "servers" / "weights").exists()


def process_of(server: ServerProcess | None) -> subprocess.Popen[bytes]:
    assert server is not None and server._process is not None
    return server._process
