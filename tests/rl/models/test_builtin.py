"""The built-in model: an ordinary folder, a cache by content, a warm start that learns."""

from __future__ import annotations

import json
import multiprocessing as mp
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from scalerl.cli.compose import compose
from scalerl.rl.errors import UserError
from scalerl.rl.models.builtin import build_model
from scalerl.rl.models.tokenizer import ALPHABET, character_tokenizer, special_ids
from scalerl.rl.models.warm_start import batch, prepare_builtin, train
from scalerl.rl.tasks import build_task
from scalerl.rl.trainer import flop_model

torch.set_num_threads(1)
SMALL = ["model.architecture.hidden_size=32", "model.architecture.layers=1", "model.architecture.intermediate_size=32"]


def prepare(cache, *overrides):
    config = compose([*SMALL, "model.warm_start.steps=2", f"model.cache_dir={cache}", *overrides]).config
    return prepare_builtin(config.model, build_task(config.task), config.task)  # pyright: ignore[reportArgumentType]


def test_every_character_is_one_token_and_comes_back():
    tokenizer = character_tokenizer()
    ids = tokenizer.encode(ALPHABET, add_special_tokens=False)
    assert len(set(ids)) == len(ALPHABET)
    assert tokenizer.decode(ids) == ALPHABET
    text = "57+68=<think>78</think>125<end>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len("57+68=") + 1 + 2 + 1 + 3 + 1
    assert tokenizer.decode(ids) == text


def test_special_ids():
    special = special_ids(character_tokenizer())
    assert len({special.think, special.end_think, *special.stop_ids}) == 3
    assert None not in (special.think, special.end_think)


def test_the_folder_is_an_ordinary_checkpoint(tmp_path):
    path = prepare(tmp_path).path
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert model.config.model_type == "llama"
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.decode(tokenizer.encode("1+2=<think>")) == "1+2=<think>"


def test_the_cache_is_hit_by_equal_content_and_missed_by_any_other(tmp_path):
    first = prepare(tmp_path)
    assert not first.cached
    assert first.cost.seconds > 0
    assert first.cost.tokens > 0
    assert prepare(tmp_path).cached
    assert prepare(tmp_path).cost == first.cost
    for other in ("model.warm_start.lr=1e-3", "task.demonstrations.slip=0.1", "model.architecture.layers=2"):
        assert prepare(tmp_path, other).path != first.path
    assert json.loads((first.path / "warm_start.json").read_text())["from"]["demonstrations"]


class InStep:
    """A task whose demonstrations wait for the other process: both train before either is done."""

    def __init__(self, task, barrier, batch_size):
        self._task, self._barrier, self._batch_size = task, barrier, batch_size

    def demonstrations(self, n, rng):
        if n == self._batch_size:
            self._barrier.wait(timeout=20)
        return self._task.demonstrations(n, rng)


def test_two_processes_at_once_get_one_folder(tmp_path):
    fork = mp.get_context("fork")
    config = compose([*SMALL, "model.warm_start.steps=2", f"model.cache_dir={tmp_path}"]).config
    task = InStep(build_task(config.task), fork.Barrier(2), config.model.warm_start.batch_size)  # pyright: ignore
    results = fork.Queue()

    def work() -> None:
        made = prepare_builtin(config.model, task, config.task)  # pyright: ignore
        results.put((made.path, made.cached))

    workers = [fork.Process(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    made = [results.get(timeout=20) for _ in workers]
    for worker in workers:
        worker.join()
    path = made[0][0]
    assert made == [(path, False), (path, False)]
    assert [p.name for p in (tmp_path / "warm_start").iterdir()] == [path.name]
    AutoModelForCausalLM.from_pretrained(path)


def test_the_loss_covers_completions_only():
    tokenizer = character_tokenizer()
    ids, labels = batch(tokenizer, [("1+2=<think>", "12</think>3<end>"), ("10+20=<think>", "1</think>30<end>")])
    assert ids.shape == labels.shape == (2, 12)
    assert labels[0].tolist() == [-100] * 5 + tokenizer.encode("12</think>3<end>") + [-100] * 2


def test_the_warm_start_lowers_the_loss():
    config = compose([*SMALL, "model.warm_start.steps=60", "model.warm_start.batch_size=16"]).config
    task: Any = build_task(config.task)
    tokenizer = character_tokenizer()
    model = build_model(config.model.architecture, tokenizer, 0)  # pyright: ignore
    ids, labels = batch(tokenizer, task.demonstrations(32, np.random.default_rng(99)))

    def loss() -> float:
        with torch.no_grad():
            logits = model(input_ids=ids[:, :-1]).logits
        return float(F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))

    before = loss()
    cost = train(model, tokenizer, config.model, task)  # pyright: ignore
    assert loss() < 0.75 * before
    parameters = sum(p.numel() for p in model.parameters())
    assert 6 * parameters * cost.tokens < cost.flops < 1.5 * 6 * parameters * cost.tokens  # attention is the rest


def test_the_cost_counts_every_token_of_the_sequence():
    config = compose([*SMALL, "model.warm_start.steps=1", "model.warm_start.batch_size=3"]).config
    task: Any = build_task(config.task)
    tokenizer = character_tokenizer()
    model = build_model(config.model.architecture, tokenizer, 0)  # pyright: ignore
    cost = train(model, tokenizer, config.model, task)  # pyright: ignore
    drawn = task.demonstrations(3, np.random.default_rng(config.model.warm_start.seed))  # pyright: ignore
    lengths = [len(tokenizer.encode(prompt + completion)) for prompt, completion in drawn]
    assert cost.tokens == sum(lengths)
    assert cost.flops == pytest.approx(3 * sum(map(flop_model(model).sequence, lengths)))


def test_without_steps_the_model_is_untrained_and_its_record_is_valid_json(tmp_path):
    made = prepare(tmp_path, "model.warm_start.steps=0")
    assert (made.cost.tokens, made.cost.flops, made.cost.final_loss) == (0, 0, None)
    record = json.loads((made.path / "warm_start.json").read_text(), parse_constant=pytest.fail)
    assert record["cost"]["final_loss"] is None


def test_making_the_model_leaves_the_global_generator_alone():
    torch.manual_seed(7)  # not the state that another model's seed left
    before = torch.get_rng_state()
    architecture = compose(SMALL).config.model.architecture  # pyright: ignore
    first, second = (build_model(architecture, character_tokenizer(), seed) for seed in (0, 0))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_cache_that_cannot_be_written_is_the_users_to_mend(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"model\.cache_dir=.*/file can't be written .*; give another folder"):
        prepare(tmp_path / "file")
