"""Trainer against engine on one model: do both give the same token the same probability?

Measured before training, on the engine's own completions, as the Ring-Linear report aligns its systems: token by token
as they were decoded, and again by a prefill of what stands before them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalerl.rl.batch import Row
from scalerl.rl.config import RunConfig
from scalerl.rl.engines.generator import build_generator, head_dtype, torch_dtype
from scalerl.rl.engines.interface import Generator
from scalerl.rl.micro_batches import balance, micro_batch
from scalerl.rl.mismatch import EXTREME
from scalerl.rl.models.load import load_for_training
from scalerl.rl.models.router_replay import replay
from scalerl.rl.models.tokenizer import load_tokenizer
from scalerl.rl.policy import Policy
from scalerl.rl.process import set_up_process
from scalerl.rl.recipe import Recipe
from scalerl.rl.requests import Requests, build_sampling
from scalerl.rl.run import model_folder
from scalerl.rl.sharding import local_device
from scalerl.rl.tasks import build_task

LONGEST = 256  # tokens of a completion
_PREFILLED = 4  # tokens of each completion that are scored again by a prefill, evenly spread
_WORST = 5


@dataclass(frozen=True)
class Agreement:
    """Over n tokens, of log rho = the trainer's log-probability minus the engine's: the largest and the mean |log rho|,
    k3 = mean(rho - 1 - log rho), and F(2), the share of tokens with max(rho, 1/rho) > 2."""

    n: int
    largest: float
    mean: float
    k3: float
    extreme: float

    @classmethod
    def of(cls, log_rho: np.ndarray) -> Agreement:
        size = np.abs(log_rho)
        k3 = float(np.mean(np.expm1(log_rho) - log_rho))
        return cls(len(log_rho), float(size.max()), float(size.mean()), k3, float(np.mean(size > math.log(EXTREME))))


@dataclass(frozen=True)
class Token:
    """text: decoded by itself; position: in its completion, from 0; and its two log-probabilities."""

    text: str
    position: int
    engine: float
    trainer: float


@dataclass(frozen=True)
class Alignment:
    """decode: of the recipe's sampling distribution. prefill: at temperature 1, over the whole vocabulary. worst: the
    decoded tokens with the largest |log rho|."""

    completions: int
    decode: Agreement
    prefill: Agreement
    worst: tuple[Token, ...]


def align(config: RunConfig, *, n_prompts: int, n_samples: int) -> Alignment:
    """Sample completions of the task's first training prompts on the configuration's engine, and compare. The model's
    length is capped and its thinking not interrupted; all else is as in a run. Raises UserError as a run does."""
    recipe = config.recipe
    shorter = {"length_control": "none", "generation_budget": min(recipe.generation_budget, LONGEST)}
    config = config.model_copy(update={"recipe": recipe.model_copy(update=shorter)})
    set_up_process(config.trainer.threads)
    task = build_task(config.task)
    folder = model_folder(config, task)
    tokenizer = load_tokenizer(folder)
    requests = Requests(config, tokenizer)
    asked = [
        requests.evaluation(i, prompt, n_samples, 0, 0) for i, prompt in enumerate(task.train_prompts()[:n_prompts])
    ]
    generator = build_generator(config, folder, build_sampling(config, tokenizer))
    try:
        generator.call("submit", asked)
        groups = generator.call("run_until", [request.group for request in asked]).groups
        prompts = {request.group: request.prompt_ids for request in asked}
        rows = [_row(prompts[group.group], completion) for group in groups for completion in group.completions]
        scored = _scored_by_prefill(generator, rows)
    finally:
        generator.close()
    return _compare(config, folder, tokenizer, rows, scored)


def _row(prompt_ids: tuple[int, ...], completion: Any) -> Row:
    mask = np.ones(len(completion.tokens), bool)
    return Row(0, prompt_ids, completion, mask, advantage=0.0, weight=1.0, kl_beta=0.0)


def _scored_by_prefill(generator: Generator, rows: Sequence[Row]) -> list[dict[int, float]]:
    """For each row, by position, the log-probabilities that a prefill gives."""
    places = [np.unique(np.linspace(0, len(row.mask) - 1, _PREFILLED).astype(int)).tolist() for row in rows]
    sequences = [
        [*row.prompt_ids, *row.completion.tokens[: t + 1].tolist()]
        for row, at in zip(rows, places, strict=True)
        for t in at
    ]
    found = iter(generator.call("prefill_logprobs", sequences).state)
    return [{t: float(next(found)) for t in at} for at in places]


def _compare(
    config: RunConfig, folder: Path, tokenizer: Any, rows: Sequence[Row], scored: Sequence[dict[int, float]]
) -> Alignment:
    device = local_device(config.trainer.device)
    model = load_for_training(folder, device)
    plain = {"sampling_mask": "off", "router_replay": "off"}
    sampling = config.recipe.sampling.model_copy(update={"temperature": 1.0, "top_p": 1.0, "top_k": 0})
    whole = config.recipe.model_copy(update=plain | {"sampling": sampling})
    tokens, decoded, prefilled = [], [], []
    by_row = {id(row): at for row, at in zip(rows, scored, strict=True)}
    for (row, logp), (_, logp_whole) in zip(
        _trainers(config, config.recipe, model, rows), _trainers(config, whole, model, rows), strict=True
    ):
        decoded.append(logp - row.completion.logprobs)
        prefilled += [logp_whole[t] - engine for t, engine in by_row[id(row)].items()]
        tokens += [
            (int(token), t, float(theirs), float(ours))
            for t, (token, theirs, ours) in enumerate(
                zip(row.completion.tokens, row.completion.logprobs, logp, strict=True)
            )
        ]
    tokens.sort(key=lambda token: -abs(token[2] - token[3]))
    return Alignment(
        completions=len(rows),
        decode=Agreement.of(np.concatenate(decoded)),
        prefill=Agreement.of(np.array(prefilled)),
        worst=tuple(Token(tokenizer.decode([i]), t, theirs, ours) for i, t, theirs, ours in tokens[:_WORST]),
    )


@torch.no_grad()
def _trainers(config: RunConfig, recipe: Recipe, model: Any, rows: Sequence[Row]) -> Iterator[tuple[Row, np.ndarray]]:
    """Each row with the trainer's log-probabilities of its completion, float64 [T]."""
    policy = Policy(
        model,
        recipe,
        dtype=torch_dtype(config.model.dtype),
        head_dtype=head_dtype(config),
        chunk=config.trainer.logprob_chunk,
    )
    for lines in balance(rows, 1, config.trainer.micro_batch_tokens, "padded")[0]:
        micro = micro_batch(lines, recipe, local_device(config.trainer.device), "padded")
        with nullcontext() if micro.experts is None else replay(model, micro.experts):
            logp: Tensor = policy(micro).logp
        yield from zip(micro.rows, _split(logp, micro.rows), strict=True)


def _split(logp: Tensor, rows: Sequence[Row]) -> list[np.ndarray]:
    return [part.double().cpu().numpy() for part in logp.split([len(row.mask) for row in rows])]
