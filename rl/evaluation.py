"""Held-out evaluation on one weight version (ScaleRL, arXiv 2510.13786, section 2.1)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from scalerl.rl.config import RunConfig
from scalerl.rl.errors import UserError
from scalerl.rl.prompt_room import Keep, keep_all
from scalerl.rl.requests import Requests
from scalerl.rl.scoring import Unscored, score
from scalerl.rl.tasks import MixedTask, Task
from scalerl.rl.types import CompletedGroup, Prompt, Request, ScoredGroup


@dataclass(frozen=True)
class EvalSet:
    """`name` is `held_out` or an extra set's; its prompts are the same at every evaluation of the run."""

    name: str
    prompts: tuple[Prompt, ...]

    @cached_property
    def fingerprint(self) -> str:
        """Of prompts and answers."""
        return hashlib.sha256(repr([(p.id, p.text, p.answer) for p in self.prompts]).encode()).hexdigest()[:16]


def build_eval_sets(config: RunConfig, task: Task, keep: Keep = keep_all) -> list[EvalSet]:
    """A random, seeded split of the held-out pool (of a mixture, of each task's), and the extra sets, of the prompts
    that are kept. Raises UserError where a pool is too small."""
    extra = [EvalSet(name, _draw(name, keep(name, task.extra_prompts(name)), config)) for name in config.eval.extra]
    parts = task.parts if isinstance(task, MixedTask) else {"held_out": task}
    held_out = [_draw(name, keep(name, part.held_out_prompts()), config) for name, part in parts.items()]
    return [EvalSet("held_out", tuple(chain.from_iterable(held_out))), *extra]


def _draw(name: str, pool: Sequence[Prompt], config: RunConfig) -> tuple[Prompt, ...]:
    n = config.eval.n_prompts
    if n > len(pool):
        raise UserError(f"eval.n_prompts={n} but the set '{name}' has {len(pool)} prompts; ask for at most that many")
    chosen = np.random.default_rng((config.eval.seed, len(pool))).permutation(len(pool))[:n]
    return tuple(pool[int(i)] for i in np.sort(chosen))


def standard_errors(passed: np.ndarray, samples: np.ndarray) -> tuple[float, float | None]:
    """(stderr, stderr_within) of the mean pass rate of n prompts, prompt i with passed[i] of samples[i] = m_i correct.

    stderr is clustered by prompt: sd of the prompts' rates / sqrt(n), for statements about the task. stderr_within =
    sqrt(sum_i p_i (1 - p_i) / (m_i - 1)) / n is the noise of the curve, whose prompts are the same at every point; None
    where an m_i is 1."""
    rates, n = passed / samples, len(passed)
    clustered = float(np.std(rates, ddof=1) / math.sqrt(n)) if n > 1 else math.nan
    if samples.min() == 1:
        return clustered, None
    return clustered, math.sqrt(float(np.sum(rates * (1 - rates) / (samples - 1)))) / n


class Evaluator:
    """Makes the requests of an evaluation and turns their completions into rows of the log."""

    def __init__(
        self, config: RunConfig, task: Task, tokenizer: Any, requests: Requests, keep: Keep = keep_all
    ) -> None:
        self.sets = build_eval_sets(config, task, keep)
        self._n_samples = config.eval.n_samples
        self._task = task
        self._tokenizer = tokenizer
        self._requests = requests

    def state_dict(self) -> dict[str, str]:
        return {chosen.name: chosen.fingerprint for chosen in self.sets}

    def check_state(self, state: Mapping[str, str]) -> None:
        """Raises UserError where a set that is in `state` has other prompts or answers now: a curve's points are of
        the same ones."""
        for name, fingerprint in self.state_dict().items():
            if state.get(name, fingerprint) != fingerprint:
                raise UserError(
                    f"the prompts or answers of the set '{name}' are not those of the checkpoint: the task's files "
                    "have changed; resume with the old files, or start a new run"
                )

    def requests(self, number: int, step: int) -> list[Request]:
        """The requests of set `number`, one a prompt, at `step`."""
        prompts = self.sets[number].prompts
        return [self._requests.evaluation(i, p, self._n_samples, step, number) for i, p in enumerate(prompts)]

    def rows(
        self, number: int, step: int, completed: Sequence[CompletedGroup]
    ) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """Of the set, and of a mixture's held-out set once more for each task, under its name: (the evaluation's row
        less the ledger's columns, one row a prompt)."""
        chosen = self.sets[number]
        groups = [Unscored(c, chosen.prompts[c.group]) for c in sorted(completed, key=lambda c: c.group)]
        scored = score(groups, task=self._task, tokenizer=self._tokenizer)
        if chosen.name != "held_out" or not isinstance(self._task, MixedTask):
            return [self._rows(chosen.name, step, scored)]
        parts = {name: [group for group in scored if group.prompt.task == name] for name in self._task.parts}
        return [self._rows(name, step, groups) for name, groups in {"held_out": scored, **parts}.items()]

    def _rows(self, name: str, step: int, scored: Sequence[ScoredGroup]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        completions = [c for group in scored for c in group.completions]
        passed = np.array([int(group.correct.sum()) for group in scored])
        samples = np.array([int((~group.verifier_error).sum()) for group in scored])
        judged = samples > 0  # a prompt whose every verdict failed says nothing
        if not judged.any():
            raise UserError(f"the verifier failed on every completion of the set '{name}'; see the task's `verify`")
        stderr, within = standard_errors(passed[judged], samples[judged])
        answered = sum(int((~(g.unparsed | g.verifier_error)).sum()) for g in scored) - sum(
            c.truncated for c in completions
        )
        entropies = np.concatenate([c.entropy[~c.injected] for c in completions if c.entropy is not None])
        row = {
            "set": name,
            "pass_rate": float(np.mean(passed[judged] / samples[judged])),
            "stderr": stderr,
            "stderr_within": within,
            "n_prompts": len(scored),
            "n_samples": self._n_samples,
            "answered": answered / len(completions),
            "correct_if_answered": int(passed.sum()) / answered if answered else None,
            "entropy": float(entropies.mean(dtype=np.float64)),
            "mean_length": float(np.mean([len(c.tokens) for c in completions])),
            "truncation_rate": float(np.mean([c.truncated for c in completions])),
            "verifier_errors": int(sum(group.verifier_error.sum() for group in scored)),
        }
        prompts = [
            {"step": step, "set": name, "prompt": g.prompt.id, "correct": int(k), "n_samples": int(m)}
            for g, k, m in zip(scored, passed, samples, strict=True)
        ]
        return row, prompts
