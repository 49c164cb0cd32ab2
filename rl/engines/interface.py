"""What a run asks of any engine: the commands of a `Generator`, and what they bring."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawValue
from typing import Any

import torch

from scalerl.rl.engines.torch_engine import Work
from scalerl.rl.types import CompletedGroup


@dataclass(frozen=True)
class Outcome:
    """What a command brought: groups that became complete, all work so far (training and evaluation apart), and the
    seconds that the command kept the generator busy."""

    groups: list[CompletedGroup]
    work: Work
    eval_work: Work
    busy: float
    state: Any = None


class Generator(ABC):
    """Commands, begun and finished, one at a time: those of `generator.GeneratorCore`, whatever the engine."""

    devices: int  # that it adds to the trainer's

    def __init__(self) -> None:
        self._abandoned = RawValue("b", 0)

    def abandon(self) -> None:
        """From now on `run_until` and `evaluate` end early; may be called from a signal handler."""
        self._abandoned.value = 1

    @abstractmethod
    def begin(self, command: str, *args: Any) -> None: ...

    @abstractmethod
    def finish(self) -> Outcome: ...

    @abstractmethod
    def update_weights(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        """Give the rollout engine new weights; unfinished completions go on from their stale KV cache."""

    @abstractmethod
    def close(self) -> None: ...

    def call(self, command: str, *args: Any) -> Outcome:
        self.begin(command, *args)
        return self.finish()
