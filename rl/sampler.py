"""Which prompt comes next: seeded epochs, and no-positive-resampling (ScaleRL, arXiv 2510.13786, section 3.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scalerl.rl.config import RunConfig
from scalerl.rl.errors import RunEnded, UserError
from scalerl.rl.prompt_room import Keep, keep_all
from scalerl.rl.tasks import MixedTask, Task, fingerprint
from scalerl.rl.types import Prompt

_ROUNDING = 1e-9  # of a threshold times a count: 55 of 100 reach 0.55


class PromptSampler:
    """Endless stream of prompts, each epoch a seeded permutation of the pool. A prompt is made when its turn comes.

    A prompt's historical pass rate is that of all its training completions so far. With `resample_positive` off,
    prompts whose rate reaches `threshold` are left out for good from the next epoch on. The epoch that begins with
    dispatch number n uses the results of groups up to n - `lag` only, so that the stream does not depend on the
    engine's speed: with lag = (k+1)P all of those have been trained by then, whatever the timing.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, seed: int, resample_positive: bool, threshold: float, lag: int
    ) -> None:
        self._prompts = prompts
        self._seed = seed
        self._resample_positive = resample_positive
        self._threshold = threshold
        self._lag = lag
        self._passed = np.zeros(len(prompts), dtype=np.int64)
        self._total = np.zeros(len(prompts), dtype=np.int64)
        self._retired = np.zeros(len(prompts), dtype=bool)
        self._results: deque[tuple[int, int, int, int]] = deque()  # (group, prompt, passed, total), not yet used
        self._order = np.zeros(0, dtype=np.int64)  # the rest of the epoch
        self._open: dict[int, int] = {}  # group -> prompt, of groups without a result
        self._epoch = -1
        self._next_group = 0

    @property
    def n_retired(self) -> int:
        """Prompts left out for good so far."""
        return int(self._retired.sum())

    def next(self) -> tuple[int, int, Prompt]:
        """(dispatch number, epoch, prompt) of the next group. Raises RunEnded when every prompt has been left out."""
        group = self._next_group
        epoch, prompt = self.take(group)
        self._next_group += 1
        return group, epoch, prompt

    def take(self, group: int) -> tuple[int, Prompt]:
        """(epoch, prompt) for a group that was numbered elsewhere. Raises RunEnded as `next` does."""
        if not len(self._order):
            self._begin_epoch(group)
        self._open[group] = int(self._order[0])
        self._order = self._order[1:]
        return self._epoch, self._prompts[self._open[group]]

    def record(self, group: int, passed: int, total: int) -> None:
        """Result of a trained group: `passed` of `total` completions are correct. Call in order of group."""
        self._results.append((group, self._open.pop(group), passed, total))

    def _begin_epoch(self, group: int) -> None:
        while self._results and self._results[0][0] <= group - self._lag:
            _, prompt, passed, total = self._results.popleft()
            self._passed[prompt] += passed
            self._total[prompt] += total
        if not self._resample_positive:
            least = self._threshold * np.maximum(self._total, 1)
            self._retired |= self._passed >= least - _ROUNDING
        self._epoch += 1
        pool = np.flatnonzero(~self._retired)
        if pool.size == 0:
            raise RunEnded(
                f"all {len(self._prompts)} training prompts have a pass rate of at least {self._threshold}: nothing is "
                "left to train on; the log is complete. Give the task more or harder prompts"
            )
        self._order = np.random.default_rng((self._seed, self._epoch)).permutation(pool)

    def state_dict(self) -> dict[str, Any]:
        return {
            "prompts": fingerprint(self._prompts),
            "passed": self._passed.copy(),
            "total": self._total.copy(),
            "retired": self._retired.copy(),
            "results": list(self._results),
            "order": self._order.copy(),
            "open": dict(self._open),
            "epoch": self._epoch,
            "next_group": self._next_group,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError where the state is of other training prompts."""
        if state["prompts"] != fingerprint(self._prompts):
            raise UserError(
                "the training prompts are not those of the checkpoint: the task's files have changed; resume with "
                "the old files, or start a new run"
            )
        self._passed, self._total, self._retired = state["passed"], state["total"], state["retired"]
        self._results, self._order, self._open = deque(state["results"]), state["order"], dict(state["open"])
        self._epoch, self._next_group = state["epoch"], state["next_group"]


class MixtureSampler:
    """Prompts of several samplers: which one gives the next is drawn by weight, a function of seed and dispatch number.

    Each has epochs of its own, counted in the groups of all; the epoch that is told is its own. One whose prompts have
    all been left out drops out of the draw; RunEnded comes with the last."""

    def __init__(self, samplers: Mapping[str, PromptSampler], weights: Mapping[str, float], *, seed: int) -> None:
        self._samplers, self._weights, self._seed = dict(samplers), dict(weights), seed
        self._owner: dict[int, str] = {}  # group -> sampler, of groups without a result
        self._left = list(samplers)
        self._next_group = 0

    @property
    def n_retired(self) -> int:
        return sum(sampler.n_retired for sampler in self._samplers.values())

    def next(self) -> tuple[int, int, Prompt]:
        group = self._next_group
        while True:
            weights = np.array([self._weights[name] for name in self._left])
            rng = np.random.default_rng((self._seed, group, len(self._left)))
            name = self._left[int(rng.choice(len(weights), p=weights / weights.sum()))]
            try:
                epoch, prompt = self._samplers[name].take(group)
            except RunEnded:
                if len(self._left) == 1:
                    raise
                self._left.remove(name)
                continue
            self._owner[group] = name
            self._next_group += 1
            return group, epoch, prompt

    def record(self, group: int, passed: int, total: int) -> None:
        self._samplers[self._owner.pop(group)].record(group, passed, total)

    def state_dict(self) -> dict[str, Any]:
        return {
            "samplers": {name: sampler.state_dict() for name, sampler in self._samplers.items()},
            "owner": dict(self._owner),
            "left": list(self._left),
            "next_group": self._next_group,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, sampler in self._samplers.items():
            sampler.load_state_dict(state["samplers"][name])
        self._owner, self._left, self._next_group = dict(state["owner"]), list(state["left"]), state["next_group"]


def build_sampler(task: Task, config: RunConfig, keep: Keep = keep_all) -> PromptSampler | MixtureSampler:
    """The prompts of a run's training, as its seed and recipe say, of those that are kept."""
    recipe = config.recipe

    def sampler(name: str, prompts: Sequence[Prompt]) -> PromptSampler:
        return PromptSampler(
            keep(name, prompts),
            seed=config.seed,
            resample_positive=recipe.resample_positive,
            threshold=recipe.positive_threshold,
            lag=(recipe.k + 1) * recipe.prompts_per_batch,
        )

    if not isinstance(task, MixedTask):
        return sampler("training", task.train_prompts())
    samplers = {name: sampler(f"training ({name})", part.train_prompts()) for name, part in task.parts.items()}
    return MixtureSampler(samplers, task.weights, seed=config.seed)
