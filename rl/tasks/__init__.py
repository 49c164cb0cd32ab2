"""Tasks: prompts whose answers are verified, with train and held-out prompts disjoint by construction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from scalerl.rl.types import Prompt

if TYPE_CHECKING:
    from scalerl.rl.config import AdditionTask, CountdownTask


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
class Fingerprinted(Protocol):
    """Prompts that know a digest of themselves."""

    @property
    def fingerprint(self) -> str: ...


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Equal for equal prompts in equal order; the number of prompts where they know no more."""
    return prompts.fingerprint if isinstance(prompts, Fingerprinted) else str(len(prompts))


class DemonstratedTask(Task, Protocol):
    """A task that can teach the built-in model."""

    def demonstrations(self, n: int, rng: np.random.Generator) -> list[tuple[str, str]]:
        """n pairs (prompt text, completion text), never of held-out prompts."""
        ...


def build_task(config: AdditionTask | CountdownTask) -> DemonstratedTask:
    """The task that `config` describes."""
    from scalerl.rl.tasks.addition import Addition
    from scalerl.rl.tasks.countdown import Countdown

    if config.kind == "addition":
        return Addition(config)
    return Countdown(config)


def answer_of(completion: str) -> str | None:
    """What follows `</think>`; None where thinking has not ended."""
    _, closed, answer = completion.partition("</think>")
    return answer.strip() if closed else None
