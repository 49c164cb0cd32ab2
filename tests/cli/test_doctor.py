"""`scalerl doctor`: each fault has its line and its way out."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from scalerl.cli.compose import compose
from scalerl.rl import doctor
from scalerl.rl.doctor import Check, examine, is_tested, n_parameters
from scalerl.rl.models.tokenizer import character_tokenizer

LIMIT = 600  # seconds; where nothing else runs a command takes ten


def checks(tmp_path: Path, *overrides: str) -> dict[str, Check]:
    config = compose(list(overrides), run_dir=str(tmp_path / "run")).config
    return {check.name: check for check in examine(config)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder."""
    path, tokenizer = tmp_path_factory.mktemp("model"), character_tokenizer()
    tokenizer.save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_nothing_is_wrong_with_the_demo(tmp_path):
    found = checks(tmp_path)
    assert {name: check.status for name, check in found.items() if check.status != "ok"} == {}
    assert "4096 training and" in found["task"].words and "built in" in found["model"].words
    assert not (tmp_path / "run").exists()


def test_a_model_is_measured(tmp_path, folder):
    found = checks(tmp_path, "model=hf", f"model.path={folder}")["model"]
    assert (found.status, found.words) == ("ok", "llama, 3e+03 parameters, bfloat16")
    config = compose(["model=hf", f"model.path={folder}"]).config
    # embedding (tied), 4 x 16 x 16 of attention, 3 x 16 x 24 of the MLP, 3 norms of 16
    assert n_parameters(config) == len(character_tokenizer()) * 16 + 1024 + 1152 + 48


@pytest.mark.parametrize(
    ("name", "overrides", "way_out"),
    [
        ("model", ["model=hf", "model.path=/nowhere"], "model.path=/nowhere is no folder"),
        ("run folder", ["model=hf", "model.path=/nowhere"], "model.path=/nowhere is no folder"),
        (
            "model",
            ["model=hf", "model.path={folder}", "recipe.generation_budget=129"],
            "lower recipe.generation",
        ),
        ("task", ["task=math", "task.data.train=/nowhere.jsonl"], "/nowhere.jsonl"),
        ("task", ["eval.n_prompts=1000000"], "ask for at most that many"),
        ("task", ["task.n_train=16"], "16 training and .*: a batch takes 32"),
        ("devices", ["trainer.device=cuda:99"], "GPU 99 is asked for, .* set the devices to cpu"),
        ("sglang", ["engine=sglang", "engine.python=/nowhere"], "scripts/setup_sglang makes it"),
        ("sglang", ["engine=sglang", f"engine.python={sys.executable}"], "sglang; install sglang there"),
        (
            "sglang",
            ["engine=sglang", "engine.urls=[http://127.0.0.1:9]"],
            "or leave engine.urls empty",
        ),
        ("network", ["engine=sglang", "engine.host=192.0.2.1"], "give this machine's address"),
    ],
)
def test_a_fault_fails_with_the_way_out(tmp_path, folder, name, overrides, way_out):
    found = checks(tmp_path, *(text.format(folder=folder) for text in overrides))[name]
    assert found.status == "fail"
    assert re.search(way_out, found.words), found.words


def test_prompts_that_a_run_would_leave_out_are_not_counted(tmp_path, folder, capsys):
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"problem": "1" * n, "answer": "7"}) + "\n" for n in range(50, 90))
    )
    (tmp_path / "held_out.jsonl").write_text('{"problem": "2", "answer": "7"}\n')
    found = checks(
        tmp_path,
        *("model=hf", f"model.path={folder}", "task=math", "task.asking.template='{prompt}'", "task.asking.chat=false"),
        *(f"task.data.{name}={tmp_path / name}.jsonl" for name in ("train", "held_out")),
        *("recipe.length_control=none", "recipe.generation_budget=60", "eval.n_prompts=1"),
    )
    assert found["task"].words == "math, 19 training and 1 held-out prompts: a batch takes 48"
    assert "21 of 40 training prompts left out, which have more than 68 tokens" in capsys.readouterr().err


def test_a_run_folder_that_is_there_and_a_port_that_is_taken(tmp_path):
    (tmp_path / "run").mkdir()
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = checks(tmp_path, "engine=sglang", "engine.servers=2", f"engine.port={port - 1}")
    assert found["network"].status == "fail" and f"port {port} is in use" in found["network"].words
    assert found["run folder"].status == "fail" and "--resume" in found["run folder"].words


def test_servers_elsewhere_need_an_address_that_they_reach(tmp_path):
    found = checks(tmp_path, "engine=sglang", "engine.urls=[http://node7:30000]")["network"]
    assert found.status == "warn" and "engine.host=127.0.0.1" in found.words


def test_wandb_online_needs_a_key(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    found = checks(tmp_path, "log.wandb=online")["wandb"]
    assert found.status == "warn" and "wandb login" in found.words
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password 0123\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert checks(tmp_path, "log.wandb=online")["wandb"].status == "ok"
    assert checks(tmp_path, "log.wandb=offline")["wandb"].status == "ok"


def test_a_full_disk_fails_and_a_tight_one_warns(tmp_path, monkeypatch):
    """The demo's 3 checkpoints of 3 fp32 copies of its parameters."""
    needed = 3 * 3 * 4 * n_parameters(compose([]).config)
    for free, status in ((needed // 2, "fail"), (needed * 3 // 2, "warn"), (needed * 3, "ok")):
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert checks(tmp_path)["run folder"].status == status


@pytest.mark.parametrize(
    ("version", "fits"), [("0.5.11", True), ("0.5.23", True), ("0.5.9", False), ("0.5.24", False), ("0.6.0", False)]
)
def test_versions_of_sglang(version, fits):
    assert is_tested(version) is fits


def scalerl(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from scalerl.cli.main import main; main()"
    return subprocess.run([sys.executable, "-P", "-c", code, *arguments], capture_output=True, text=True, timeout=LIMIT)


def test_the_command_prints_a_line_a_part_and_exits_1_on_a_fault(tmp_path):
    done = scalerl("doctor", "--run-dir", str(tmp_path / "run"), "eval.n_prompts=1000000")
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and [line.split()[0] for line in lines].count("fail") == 1
    assert any(line.startswith("fail  task ") for line in lines)


def test_a_wrong_override_is_exit_2(tmp_path):
    done = scalerl("doctor", "engin=sglang")
    assert done.returncode == 2 and "did you mean 'engine'" in done.stderr


def test_alignment_on_the_embedded_engine(tmp_path, folder):
    arguments = ["--run-dir", str(tmp_path / "run"), "--align", str(folder), "--prompts", "2", "--samples", "2"]
    arguments += ["engine.process=inline", "engine.slots=4"]
    done = scalerl("doctor", *arguments, "model.dtype=float32")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as decoded" in done.stdout and "by prefill" in done.stdout and "F(2) 0.00%" in done.stdout
    apart = scalerl("doctor", *arguments, "trainer.alarms.mismatch_k3=1e-30")
    assert apart.returncode == 1 and "fail  align" in apart.stdout
    assert not (tmp_path / "run").exists()
