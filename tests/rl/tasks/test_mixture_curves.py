"""Mathematics and code at once, as a user runs them: real verifiers, a curve of each task, and fits of all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scalerl.rl.models.warm_start import batch
from scalerl.rl.runlog import read_rows

SCALERL = Path(sys.executable).with_name("scalerl")
DIGITS = "0123456789"
STEPS = 24


def completion(task: str, digit: str) -> str:
    return rf"\boxed{{{digit}}}<end>" if task == "math" else f"```python\nprint({digit})\n```<end>"


def guesser(path: Path) -> Path:
    """A small Llama that answers in the form of either task, with any digit: it is right once in ten."""
    characters = sorted({*map(chr, range(32, 127)), "\n"})
    backend = Tokenizer(
        models.WordLevel({t: i for i, t in enumerate(["<pad>", "<end>", *characters])}, unk_token="<pad>")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", clean_up_tokenization_spaces=False
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            pad_token_id=0,
            eos_token_id=1,
        )
    )
    optimizer, rng = torch.optim.AdamW(model.parameters(), lr=4e-3), np.random.default_rng(0)
    for _ in range(250):
        shown = [
            (f"{task} {rng.integers(1000)}:", completion(task, DIGITS[rng.integers(10)]))
            for task in ("math", "code")
            for _ in range(8)
        ]
        ids, labels = batch(tokenizer, shown)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def scalerl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCALERL), *arguments], capture_output=True, text=True, timeout=1200)


@pytest.mark.slow
def test_mathematics_and_code_have_a_curve_each_and_scalerl_fits_them(tmp_path):
    """The right digit is 7 in mathematics and 3 in code, for every prompt, and the policy guesses; what it learns in
    so few steps is no matter here."""
    math = [{"problem": f"math {i}:", "answer": r"\frac{14}{2}"} for i in range(60)]
    code = [{"prompt": f"code {i}:", "tests": {"inputs": [""], "outputs": ["3\n"]}} for i in range(60)]
    run = tmp_path / "run"
    done = scalerl(
        "train",
        "model=hf",
        f"model.path={guesser(tmp_path / 'model')}",
        "model.dtype=float32",
        "task=mixture",
        f"task.tasks.math.data.train={write(tmp_path / 'math.jsonl', math)}",
        f"task.tasks.code.data.train={write(tmp_path / 'code.jsonl', code)}",
        *[f"task.tasks.{task}.{key}" for task in ("math", "code") for key in ("data.n_held_out=20", "time_limit=60")],
        *[f"task.tasks.{task}.asking.template='{{prompt}}'" for task in ("math", "code")],
        "recipe.length_control=none",
        "recipe.generation_budget=32",
        "recipe.truncation=score",
        "recipe.resample_positive=true",
        "recipe.k=1",
        "recipe.prompts_per_batch=8",
        "recipe.group_size=8",
        "engine.slots=64",
        "engine.ticks_per_step=40",
        "trainer.lr=5e-4",
        "trainer.warmup_steps=2",
        "eval.n_prompts=8",
        "eval.n_samples=4",
        "eval.every=3",
        f"steps={STEPS}",
        "--run-dir",
        str(run),
    )
    assert done.returncode == 0, done.stderr
    evaluations = list(read_rows(run / "eval.jsonl"))
    curves = {name: [r for r in evaluations if r["set"] == name] for name in ("held_out", "math", "code")}
    assert {len(rows) for rows in curves.values()} == {STEPS // 3 + 1}
    for overall, *parts in zip(*curves.values(), strict=True):
        assert overall["pass_rate"] == pytest.approx(np.mean([part["pass_rate"] for part in parts]))
        assert {part["flops"] for part in parts} == {overall["flops"]}
    for rows in curves.values():
        assert 0 < np.mean([row["pass_rate"] for row in rows]) < 1
        assert all(row["answered"] > 0.9 and row["verifier_errors"] == 0 for row in rows)
    for name in curves:
        fitted = scalerl("fit", str(run), "--set", name, "--x", "flops", "--extrapolate", "2x", "--json", "-")
        (result,) = json.loads(fitted.stdout)["runs"]
        assert result["n"] == STEPS // 3 and result["status"], fitted.stdout
    shown = scalerl("fit", str(run), "--set", "all", "--x", "flops")
    assert all(f" {name} " in shown.stdout for name in ("run", "run/math", "run/code")), shown.stdout
