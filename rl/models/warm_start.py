"""The warm start: a short supervised phase on the task's demonstrations gives the policy that RL starts from.

Cached by the hash of everything that it depends on, so that all runs of a study start from the same weights; its cost
is recorded in the folder and belongs to no run's ledger."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from scalerl.rl.config import BuiltinModel
from scalerl.rl.config import Task as TaskConfig
from scalerl.rl.errors import UserError
from scalerl.rl.ledger import FlopModel
from scalerl.rl.models.builtin import build_model
from scalerl.rl.models.tokenizer import ALPHABET, character_tokenizer
from scalerl.rl.tasks import DemonstratedTask

_IGNORED = -100  # label of tokens without a loss
REVISION = 1  # raise it when a change of the training code changes the weights that come out
_REPORT_EVERY = 100
_SAMPLED = 16  # demonstrations that enter the key


@dataclass(frozen=True)
class Cost:
    """What the supervised phase took: wall seconds, tokens through backward (prompts included), their FLOPs as a run's
    ledger counts them. `final_loss` is the last batch's; None without a step."""

    seconds: float
    tokens: int
    flops: float
    final_loss: float | None


@dataclass(frozen=True)
class WarmStarted:
    """path: a Hugging Face folder; cached: True where it was there already."""

    path: Path
    cached: bool
    cost: Cost


def prepare_builtin(config: BuiltinModel, task: DemonstratedTask, task_config: TaskConfig) -> WarmStarted:
    """The built-in model after its warm start on `task`, from the cache where it is there.

    The folder is written beside and renamed into place; of two processes at once the first to finish wins. Raises
    UserError where the cache can't be written."""
    path = Path(config.cache_dir) / "warm_start" / _key(config, task, task_config)
    record = path / "warm_start.json"
    if record.is_file():
        return WarmStarted(path, True, Cost(**json.loads(record.read_text())["cost"]))
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"model.cache_dir={config.cache_dir} can't be written ({error.strerror}); give another folder"
        ) from None
    tokenizer = character_tokenizer()
    # Not tuned for the CPU: other rounding gives another initial policy, and one such ended 0.03 lower on three seeds.
    model = build_model(config.architecture, tokenizer, config.warm_start.seed)
    cost = train(model, tokenizer, config, task, _report)
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    content = {"cost": asdict(cost), "from": _content(config, task, task_config)}
    (beside / record.name).write_text(json.dumps(content, indent=2))
    try:
        beside.rename(path)
    except OSError:
        if not record.is_file():
            raise
        shutil.rmtree(beside)  # the other process was first
    return WarmStarted(path, False, cost)


def train(
    model: Any,
    tokenizer: Any,
    config: BuiltinModel,
    task: DemonstratedTask,
    report: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> Cost:
    """Next-token cross-entropy on the demonstrations' completions; AdamW with a cosine to zero. In place."""
    warm, start, tokens, flops, loss = config.warm_start, time.perf_counter(), 0, 0.0, None
    flop_model = FlopModel(
        n_active=sum(p.numel() for p in model.parameters()),  # the head is the embedding table
        layers=config.architecture.layers,
        width=config.architecture.hidden_size,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=warm.lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: _cosine(s, warm.steps))
    rng = np.random.default_rng(warm.seed)
    for step in range(warm.steps):
        ids, labels = batch(tokenizer, task.demonstrations(warm.batch_size, rng))
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        value = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        lengths = (ids != tokenizer.pad_token_id).sum(1).tolist()
        tokens += sum(lengths)
        flops += 3 * sum(map(flop_model.sequence, lengths))
        loss = float(value.detach())
        if (step + 1) % _REPORT_EVERY == 0:
            report(step + 1, warm.steps, loss)
    return Cost(time.perf_counter() - start, tokens, flops, loss)


def batch(tokenizer: Any, demonstrations: Sequence[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels), int64 [n, S], right-padded; labels are ignored on prompts and padding."""
    ids, labels = [], []
    for prompt, completion in demonstrations:
        head = tokenizer.encode(prompt, add_special_tokens=False)
        tail = tokenizer.encode(completion, add_special_tokens=False)
        ids.append(torch.tensor(head + tail))
        labels.append(torch.tensor([_IGNORED] * len(head) + tail))
    pad = torch.nn.utils.rnn.pad_sequence
    padded = pad(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    return padded, pad(labels, batch_first=True, padding_value=_IGNORED)


def _cosine(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / max(1, steps // 20)) * 0.5 * (1 + math.cos(math.pi * step / max(1, steps)))


def _content(config: BuiltinModel, task: DemonstratedTask, task_config: TaskConfig) -> dict[str, Any]:
    return {
        "revision": REVISION,
        "alphabet": ALPHABET,
        # A change of the task's code changes its demonstrations, and so the key.
        "demonstrations": task.demonstrations(_SAMPLED, np.random.default_rng(0)),
        "architecture": config.architecture.model_dump(),
        "warm_start": config.warm_start.model_dump(),
        "task": task_config.model_dump(),
    }


def _key(config: BuiltinModel, task: DemonstratedTask, task_config: TaskConfig) -> str:
    return hashlib.sha256(json.dumps(_content(config, task, task_config), sort_keys=True).encode()).hexdigest()[:16]


def _report(step: int, steps: int, loss: float) -> None:
    print(f"warm start: supervised step {step}/{steps}, loss {loss:.3f}", file=sys.stderr)
