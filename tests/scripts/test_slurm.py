"""The Slurm job files, run with stand-ins for `srun`, `scontrol` and `scalerl` that note what would be started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from scalerl.cli.compose import compose
from scalerl.cli.main import app
from scalerl.rl.config import SGLangEngineConfig

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "scripts" / "slurm"
LIMIT = 300  # seconds; where nothing else runs a job takes two
NODES = [f"node{i}" for i in range(10)]
# Starts the tasks of a step here, and passes a signal on to them, as the real one does.
SRUN = """
import os, signal, subprocess, sys
given, command = {}, sys.argv[1:]
while command[0].startswith("--"):
    name, _, value = command.pop(0)[2:].partition("=")
    given[name] = value
n, nodes = int(given["ntasks"]), given.get("nodelist", "node0").split(",")
assert len(nodes) == int(given["nodes"])
per_node = n // len(nodes)
tasks, ended = [], False

def end(*_):
    global ended
    ended = True
    for task in tasks:
        task.terminate()

signal.signal(signal.SIGTERM, end)  # before the first task: a step may be ended while it starts
for i in range(n):
    slurm = {"PROCID": i, "LOCALID": i % per_node, "NTASKS": n}
    variables = {f"SLURM_{name}": str(value) for name, value in slurm.items()}
    variables["SLURMD_NODENAME"] = nodes[i // per_node]
    if not ended:
        tasks.append(subprocess.Popen(command, env=os.environ | variables))
if ended:
    end()  # of the task that was being started
sys.exit(max((abs(task.wait()) for task in tasks), default=0))
"""
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SCALERL = """
import glob, json, os, signal, sys, time
note = {"arguments": sys.argv[1:], **{name: os.environ.get(name) for name in NAMES}}
path = os.path.join(os.environ["NOTES"], f"{sys.argv[1]}-{os.environ['SLURMD_NODENAME']}-{os.environ['SLURM_LOCALID']}")
if sys.argv[1] == "serve" or os.environ.get("LONG"):
    signal.signal(signal.SIGTERM, lambda *_: (open(path + ".ended", "w").close(), os._exit(0)))
with open(path + ".tmp", "w") as file:
    json.dump(note, file)
os.rename(path + ".tmp", path)
if sys.argv[1] == "serve" or os.environ.get("LONG"):
    time.sleep(600)
while len(glob.glob(os.environ["NOTES"] + "/serve-*[0-9]")) < int(os.environ.get("SERVING", "0")):
    time.sleep(0.05)  # a trainer waits for its servers
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    """Starts a job file as sbatch would, on the ten nodes."""
    stand_ins = tmp_path / "bin"
    stand_ins.mkdir()
    (tmp_path / "notes").mkdir()
    for name, program in (("srun", SRUN), ("scalerl", f"NAMES = {NAMES}\n{SCALERL}")):
        (stand_ins / name).write_text(f"#!{sys.executable} -SE\n{program}")
    (stand_ins / "scontrol").write_text("#!/bin/sh\nprintf '%s\\n' " + " ".join(NODES) + "\n")
    for file in stand_ins.iterdir():
        file.chmod(0o755)

    started: list[subprocess.Popen[str]] = []

    def start(name: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        variables = {
            "SCALERL_BIN": str(stand_ins),
            "NOTES": str(tmp_path / "notes"),
            "SERVER_PYTHON": "/opt/sglang/bin/python",
            "SLURM_JOB_NODELIST": "node[0-9]",
        }
        process = subprocess.Popen(
            ["bash", JOBS / name, str(tmp_path / "run"), *arguments],
            cwd=ROOT,
            env=os.environ | variables | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def noted(tmp_path: Path, command: str) -> list[dict[str, Any]]:
    files = [file for file in (tmp_path / "notes").glob(f"{command}-*") if not file.suffix]
    return [json.loads(file.read_text()) for file in files]


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The arguments as the real command reads them: an option that it lacks is an error."""
    group: Any = typer.main.get_command(app)
    return dict(group.commands[arguments[0]].make_context(arguments[0], arguments[1:]).params)


def engine_of(overrides: list[str]) -> SGLangEngineConfig:
    engine = compose(overrides).config.engine
    assert isinstance(engine, SGLangEngineConfig)
    return engine


def finish(process: subprocess.Popen[str]) -> int:
    said, _ = process.communicate(timeout=LIMIT)
    print(said)
    return process.returncode


@pytest.mark.parametrize("file", sorted(JOBS.iterdir()), ids=lambda file: file.name)
def test_the_shell_can_read_them(file):
    subprocess.run(["bash", "-n", file], check=True)


def test_one_node_splits_its_gpus(job, tmp_path):
    assert finish(job("one_node.sbatch", "recipe=scalerl", "steps=7", GPUS="8", TRAINERS="4", TP="2")) == 0
    ranks = noted(tmp_path, "train")
    assert sorted((int(r["RANK"]), int(r["LOCAL_RANK"]), r["WORLD_SIZE"]) for r in ranks) == [
        (i, i, "4") for i in range(4)
    ]
    assert {(r["MASTER_ADDR"], r["MASTER_PORT"]) for r in ranks} == {("127.0.0.1", "29400")}
    (arguments,) = {tuple(r["arguments"]) for r in ranks}
    params = parsed(list(arguments))
    assert params["run_dir"] == str(tmp_path / "run") and params["resume"] is None
    engine = engine_of(params["overrides"])
    assert (engine.servers, engine.tensor_parallel, engine.first_gpu) == (2, 2, 4)  # GPUs 4 to 7
    assert compose(params["overrides"]).config.steps == 7


def test_many_nodes_are_the_papers_split(job, tmp_path):
    assert finish(job("many_nodes.sbatch", "recipe=scalerl", SERVING="8")) == 0
    ranks, nodes = noted(tmp_path, "train"), noted(tmp_path, "serve")
    assert sorted(int(r["RANK"]) for r in ranks) == list(range(16))
    assert {(r["MASTER_ADDR"], r["WORLD_SIZE"]) for r in ranks} == {("node0", "16")}
    (arguments,) = {tuple(r["arguments"]) for r in ranks}
    trainer = engine_of(parsed(list(arguments))["overrides"])
    assert len(trainer.urls) == 64 and trainer.n_servers * trainer.tensor_parallel == 64
    assert trainer.host == "node0"
    offered, folders = [], set()
    for note in nodes:
        params = parsed(note["arguments"])
        folders.add(params["logs"])
        server = engine_of(params["overrides"])
        assert (server.servers, server.first_gpu, server.python) == (8, 0, "/opt/sglang/bin/python")
        offered += [f"http://{server.host}:{server.port + i}" for i in range(server.servers)]
    assert sorted(offered) == sorted(trainer.urls)
    assert folders == {f"{tmp_path / 'run'}.servers/{node}" for node in NODES[2:]}
    assert len(list((tmp_path / "notes").glob("serve-*.ended"))) == 8  # the servers end with the run


def test_a_job_that_comes_again_goes_on_with_the_servers_that_it_has_now(job, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").touch()
    assert finish(job("many_nodes.sbatch", "recipe=scalerl", "steps=7", GPUS="2", TP="2")) == 0
    (arguments,) = {tuple(r["arguments"]) for r in noted(tmp_path, "train")}
    params = parsed(list(arguments))
    assert params["resume"] == str(tmp_path / "run") and params["allow_change"] and params["run_dir"] is None
    urls, host = params["overrides"]
    assert urls == "engine.urls=[" + ",".join(f"http://{node}:30000" for node in NODES[2:]) + "]"
    assert host == "engine.host=node0"


def test_slurms_signal_reaches_the_trainer_alone_and_its_end_is_the_jobs(job, tmp_path):
    process = job("many_nodes.sbatch", "recipe=scalerl", GPUS="1", LONG="1")
    end = time.monotonic() + LIMIT
    while len(noted(tmp_path, "train")) < 2 or len(noted(tmp_path, "serve")) < 8:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert finish(process) == 0
    ended = sorted(file.name for file in (tmp_path / "notes").glob("*.ended"))
    assert [name.partition("-")[0] for name in ended] == ["serve"] * 8 + ["train"] * 2


@pytest.mark.parametrize(
    ("missing", "words"),
    [("RUN_DIR", "usage: sbatch"), ("SERVER_PYTHON", "name the Python of the environment with sglang")],
)
def test_what_is_missing_is_said(job, tmp_path, missing, words):
    if missing == "RUN_DIR":
        process = subprocess.run(["bash", JOBS / "one_node.sbatch"], cwd=ROOT, capture_output=True, text=True)
        assert process.returncode == 2 and words in process.stderr
    else:
        process = job("one_node.sbatch", SERVER_PYTHON="")
        said, _ = process.communicate(timeout=LIMIT)
        assert process.returncode != 0 and words in said and not noted(tmp_path, "train")


def test_what_they_ask_of_slurm_is_what_they_split():
    asked = [line.split()[1] for line in (JOBS / "many_nodes.sbatch").read_text().splitlines() if "#SBATCH" in line[:7]]
    assert {"--nodes=10", "--gres=gpu:8", "--exclusive", "--signal=B:TERM@300", "--requeue"} <= set(asked)
