"""From scored groups to the rows that are trained: everything that is a property of the whole batch is settled here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from scalerl.rl.advantages import advantages, has_variance
from scalerl.rl.aggregation import token_weights
from scalerl.rl.recipe import Recipe
from scalerl.rl.rewards import rewards
from scalerl.rl.tokens import Tokens
from scalerl.rl.types import Completion, ScoredGroup


@dataclass(frozen=True)
class Row:
    """One completion that is trained. order: its place in the batch, which no split changes. mask: bool [T]. weight: of
    each of its unmasked tokens, global counts included."""

    order: int
    prompt_ids: tuple[int, ...]
    completion: Completion
    mask: np.ndarray
    advantage: float
    weight: float
    kl_beta: float

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_ids) + len(self.completion.tokens)


@dataclass(frozen=True)
class TrainBatch:
    """rows: completions with an unmasked token, of prompts that survive the filter. stats: of the whole batch."""

    rows: list[Row]
    stats: dict[str, Any]

    @property
    def empty(self) -> bool:
        return not self.rows


def assemble(groups: Sequence[ScoredGroup], recipe: Recipe) -> TrainBatch:
    """Rewards, zero-variance filter, advantages and aggregation weights of one batch."""
    completions = [c for g in groups for c in g.completions]
    prompt = np.repeat(np.arange(len(groups)), [len(g.completions) for g in groups])
    correct = np.concatenate([g.correct for g in groups])
    error = np.concatenate([g.verifier_error for g in groups])
    left_out = error | np.concatenate([g.masked for g in groups])
    lengths = np.array([len(c.tokens) for c in completions])
    masks = [_mask(c, bool(out), recipe) for c, out in zip(completions, left_out, strict=True)]
    n_tokens = np.array([int(m.sum()) for m in masks])

    reward = rewards(correct, lengths, recipe) + np.concatenate([g.shaping for g in groups])
    unmasked = n_tokens > 0
    varied = has_variance(reward, prompt, unmasked)
    survives = unmasked & (varied[prompt] | (recipe.zero_variance == "keep"))
    advantage = advantages(reward, prompt, survives, recipe.advantage_norm)
    weight = token_weights(np.where(survives, n_tokens, 0), prompt, recipe.loss_aggregation)
    rows = [
        Row(
            order=int(i),
            prompt_ids=groups[prompt[i]].prompt_ids,
            completion=completions[i],
            mask=masks[i],
            advantage=float(advantage[i]),
            weight=float(weight[i]),
            kl_beta=recipe.kl_params.beta_by_task.get(groups[prompt[i]].prompt.task, recipe.kl_params.beta),
        )
        for i in np.flatnonzero(survives)
    ]
    stats = _statistics(completions, prompt, correct, error, reward, unmasked, varied)
    unparsed = np.concatenate([g.unparsed for g in groups])
    if unparsed.any():
        stats["unparsed_rate"] = float(unparsed.mean())
    stats |= {
        "effective_prompts": len(np.unique(prompt[survives])),
        "trained_completions": len(rows),
        "trained_completion_tokens": int(n_tokens[survives].sum()),
    }
    return TrainBatch(rows=rows, stats=stats)


def tokens_of(rows: Sequence[Row], *, trainer_ratio: bool, device: torch.device, dtype: torch.dtype) -> Tokens:
    """The rows' completion tokens, flat and in order; no rows give T = 0."""

    lengths = [len(row.completion.tokens) for row in rows]

    def flat(parts: list[np.ndarray], of: torch.dtype) -> torch.Tensor:
        joined = np.concatenate(parts) if parts else np.zeros(0)
        return torch.as_tensor(joined, dtype=of, device=device)

    def repeated(values: Sequence[float], of: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(np.repeat(np.array(values), lengths), dtype=of, device=device)

    mask = flat([row.mask for row in rows], torch.bool)
    return Tokens(
        logp_gen=flat([row.completion.logprobs for row in rows], dtype),
        advantage=repeated([row.advantage for row in rows], dtype),
        mask=mask,
        weight=repeated([row.weight for row in rows], dtype) * mask,
        completion=repeated(range(len(rows)), torch.int64),
        n_completions=len(rows),
        versions=flat([row.completion.versions for row in rows], torch.int64),
        kl_beta=repeated([row.kl_beta for row in rows], dtype),
        trainer_ratio=trainer_ratio,
    )


def _mask(completion: Completion, left_out: bool, recipe: Recipe) -> np.ndarray:
    """True on tokens that the policy sampled; nowhere on a masked completion."""
    if left_out or (completion.truncated and recipe.truncation == "mask"):
        return np.zeros(len(completion.tokens), dtype=bool)
    return ~completion.injected


def _statistics(
    completions: Sequence[Completion],
    prompt: np.ndarray,
    correct: np.ndarray,
    error: np.ndarray,
    reward: np.ndarray,
    unmasked: np.ndarray,
    varied: np.ndarray,
) -> dict[str, Any]:
    judged = ~error
    solved, judged_each = np.bincount(prompt, weights=correct), np.bincount(prompt, weights=judged)
    present = np.bincount(prompt, weights=unmasked) > 0  # a prompt without an unmasked token is in no share

    def share(of: np.ndarray) -> float | None:
        return float(of[present].mean()) if present.any() else None

    entropy = [c.entropy[~c.injected] for c in completions if c.entropy is not None]
    return {
        "pass_rate": float(correct[judged].mean()) if judged.any() else None,
        "reward_mean": float(reward[unmasked].mean()) if unmasked.any() else None,
        "zero_variance_share": share(~varied),
        "all_correct_share": share(solved == judged_each),
        "all_wrong_share": share(solved == 0),
        "truncation_rate": float(np.mean([c.truncated for c in completions])),
        "interruption_rate": float(np.mean([c.interrupted for c in completions])),
        "mean_length": float(np.mean([len(c.tokens) for c in completions])),
        "verifier_errors": int(error.sum()),
        "entropy": float(np.concatenate(entropy).mean(dtype=np.float64)) if entropy else None,
    }
