"""The demo's model learns its task; with the advantages' sign flipped it unlearns it. About a minute each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scalerl.cli.compose import compose
from scalerl.rl import batch
from scalerl.rl.run import start_run

torch.set_num_threads(1)
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "scalerl"  # the demo's, so that the warm start runs once


def pass_rates(run_dir: Path, *overrides: str) -> list[float]:
    short = ("trainer.warmup_steps=5", "eval.n_prompts=128")  # the demo's own warm-up is as long as this test
    config = compose([f"model.cache_dir={CACHE}", *short, *overrides], run_dir=str(run_dir)).config
    lines = (start_run(config, {}) / "eval.jsonl").read_text().splitlines()
    return [json.loads(line)["pass_rate"] for line in lines]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_pass_rate_rises(tmp_path, seed):
    rates = pass_rates(tmp_path / "run", "steps=40", "eval.every=20", f"seed={seed}")
    assert rates[-1] >= rates[0] + 0.2


def test_flipped_advantages_lower_the_pass_rate(tmp_path, monkeypatch):
    original = batch.advantages
    monkeypatch.setattr(batch, "advantages", lambda *args: -original(*args))
    rates = pass_rates(tmp_path / "run", "steps=20", "eval.every=20")
    assert rates[-1] < rates[0] / 2
