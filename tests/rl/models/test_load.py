"""Models that can't be had or can't be run: one clear line each, before anything is made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from scalerl.cli.compose import compose
from scalerl.rl.engines.decoder import load_decoder
from scalerl.rl.errors import UserError
from scalerl.rl.models.load import find_model, load_model
from scalerl.rl.models.tokenizer import character_tokenizer
from scalerl.rl.run import start_run


def test_a_hub_id_without_a_network_is_one_line(tmp_path):
    command = [str(Path(sys.executable).with_name("scalerl")), "train", "model=hf", "model.path=nobody/nothing"]
    offline = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600, env=offline)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: model.path=nobody/nothing: it is no folder, and the Hugging Face hub")
    assert "can't be reached" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_hub_that_does_not_answer_is_as_good_as_none(tmp_path, monkeypatch):
    """Nobody listens at that port."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT", 1)
    with pytest.raises(UserError, match=r"nobody/nothing: it is no folder, and .* can't be reached"):
        find_model("nobody/nothing")


def test_what_is_no_model_is_told_from_what_is_no_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    for path in ("nowhere", "models/misspelt", "a/b/c"):
        with pytest.raises(UserError, match=f"model.path={path} is no folder"):
            find_model(path)
    with pytest.raises(UserError, match=r"has no config\.json"):
        find_model("models")
    Path("models/config.json").write_text("{}")
    with pytest.raises(UserError, match=r"has no tokenizer_config\.json"):
        find_model("models")
    Path("models/tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"model\.path=models can't be loaded"):
        load_model(find_model("models"))


@pytest.mark.parametrize("damage", ["missing", "garbage", "another shape"])
def test_damaged_weights_are_one_line_to_trainer_and_engine_alike(llama_folder, tmp_path, damage):
    path = tmp_path / "model"
    shutil.copytree(llama_folder, path)
    weights, config = path / "model.safetensors", path / "config.json"
    if damage == "missing":
        weights.unlink()
    elif damage == "garbage":
        weights.write_bytes(b"no tensors")
    else:
        content = json.loads(config.read_text())
        config.write_text(json.dumps(content | {"vocab_size": content["vocab_size"] + 8}))
    with pytest.raises(UserError, match=r"model\.path=.*model can't be loaded: "):
        load_model(path)
    with pytest.raises(UserError, match=r"model\.path=.*model can't be loaded: "):
        load_decoder(path, dtype=torch.float32, head_dtype=torch.float32, device="cpu")


def test_a_window_shorter_than_the_budget_is_refused_when_the_run_starts(tmp_path):
    tokenizer = character_tokenizer()
    shape: dict[str, Any] = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        num_key_value_heads=1,
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=1,
        eos_token_id=tokenizer.eos_token_id,
        **shape,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "windowed")
    tokenizer.save_pretrained(tmp_path / "windowed")
    overrides = ["model=hf", f"model.path={tmp_path / 'windowed'}", "engine.process=inline", "model.dtype=float32"]
    config = compose([*overrides, "recipe.generation_budget=60"], run_dir=str(tmp_path / "runs" / "run")).config
    with pytest.raises(
        UserError, match=r"exceed the model's sliding_window=16; lower recipe\.generation_budget or take"
    ):
        start_run(config, {})
    assert not (tmp_path / "runs").exists()
