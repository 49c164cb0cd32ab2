"""Tasks: prompts whose answers are verified, with train and held-out prompts disjoint by construction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from scalerl.rl.types import Prompt, Verdict

if TYPE_CHECKING:
    from scalerl.rl.config import Reward
    from scalerl.rl.config import Task as TaskConfig


class Task(Protocol):
    """What a run asks of its task. Prompts end where the completion's thinking begins."""

    name: str

    def train_prompts(self) -> Sequence[Prompt]: ...

    def held_out_prompts(self) -> Sequence[Prompt]:
        """The pool from which the evaluation's random split is drawn; shares no prompt with training."""
        ...

    def extra_prompts(self, name: str) -> Sequence[Prompt]:
        """A further evaluation set. Raises UserError, with the names there are, for an unknown one."""
        ...

    def verify(self, prompt: Prompt, completion: str) -> bool:
        """Whether a completion that ended answers the prompt: its text, special tokens included but for the end token.
        May raise: a verifier's failure is counted as such and never as a wrong answer."""
        ...


@runtime_checkable
class BatchTask(Task, Protocol):
    """A task that verifies many completions at once, or says more of them than right or wrong."""

    def verify_batch(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """One verdict a pair, in order; does not raise for a verifier's failure."""
        ...


@runtime_checkable
class MixedTask(Task, Protocol):
    """Several tasks by name, each with its weight in training; a prompt's `task` is the name."""

    parts: Mapping[str, Task]
    weights: Mapping[str, float]


def verdicts(task: Task, pairs: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
    """The task's verdict on each (prompt, completion)."""
    if isinstance(task, BatchTask):
        return task.verify_batch(pairs)
    return [_verdict(task, prompt, completion) for prompt, completion in pairs]


def _verdict(task: Task, prompt: Prompt, completion: str) -> Verdict:
    try:
        return Verdict(bool(task.verify(prompt, completion)))
    except Exception:  # a user's verifier may raise anything; it is counted, and its completion masked
        return Verdict(False, error=True)


@runtime_checkable
class Fingerprinted(Protocol):
    """Prompts that know a digest of themselves."""

    @property
    def fingerprint(self) -> str: ...


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Equal for equal prompts in equal order; the number of prompts where they know no more."""
    return prompts.fingerprint if isinstance(prompts, Fingerprinted) else str(len(prompts))


@runtime_checkable
class DemonstratedTask(Task, Protocol):
    """A task that can teach the built-in model."""

    def demonstrations(self, n: int, rng: np.random.Generator) -> list[tuple[str, str]]:
        """n pairs (prompt text, completion text), never of held-out prompts."""
        ...


def build_task(config: TaskConfig, name: str | None = None) -> Task:
    """The task that `config` describes; `name` is its own in a mixture. Raises UserError
    where its files or libraries are missing."""
    from scalerl.rl.tasks.addition import Addition
    from scalerl.rl.tasks.code import Code
    from scalerl.rl.tasks.countdown import Countdown
    from scalerl.rl.tasks.math import Math
    from scalerl.rl.tasks.mixture import Mixture
    from scalerl.rl.tasks.python_task import PythonTask
    from scalerl.rl.tasks.reasoning_gym_task import ReasoningGymTask
    from scalerl.rl.tasks.sums import Sums

    match config.kind:
        case "addition":
            return Addition(config)
        case "countdown":
            return Countdown(config)
        case "sums":
            return Sums(config, name or "sums")
        case "math":
            return Math(config, name or "math")
        case "code":
            return Code(config, name or "code")
        case "python":
            return PythonTask(config, name or "python")
        case "reasoning_gym":
            return ReasoningGymTask(config, name or config.name)
        case "mixture":
            return Mixture(config)


def answer_of(completion: str) -> str | None:
    """What follows `</think>`; None where thinking has not ended."""
    _, closed, answer = completion.partition("</think>")
    return answer.strip() if closed else None


def final_part(completion: str) -> str:
    """What follows the last `</think>`; the whole completion where there is none."""
    return completion.rpartition("</think>")[2]


def unparsed(reward: Reward) -> Verdict:
    """The verdict on a completion without an answer."""
    if reward.unparsed == "mask":
        return Verdict(False, unparsed=True, masked=True)
    return Verdict(False, unparsed=True, shaping=-reward.format_penalty)
