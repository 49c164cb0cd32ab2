"""Sums of two numbers, for pretrained models: too little to be solved by them, and enough to be learnt in minutes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from functools import cached_property

import numpy as np

from scalerl.rl.config import SumsTask
from scalerl.rl.errors import UserError
from scalerl.rl.tasks import unparsed
from scalerl.rl.tasks.addition import is_held_out
from scalerl.rl.tasks.dataset import put
from scalerl.rl.types import Prompt, Verdict

_NUMBER = re.compile(r"\s*(-?\d+)\s*")


class Sums:
    """Prompt `a + b =`, both from 1 to `largest`, put as `asking` says; the completion must be the sum and nothing
    else. One that is no single number is `unparsed`, so learning to answer and learning to add can be told apart.
    Held out are all pairs that `addition.is_held_out` names, in any order of the operands."""

    def __init__(self, config: SumsTask, name: str) -> None:
        self.name, self._config, self._make = name, config, put(config.asking, name)
        if not (self._train and self._held_out):
            raise UserError(f"task.largest={config.largest} leaves no sum to train on or to hold out; raise it")

    @cached_property
    def _train(self) -> tuple[Prompt, ...]:
        return self._prompts(held_out=False)

    @cached_property
    def _held_out(self) -> tuple[Prompt, ...]:
        return self._prompts(held_out=True)

    def train_prompts(self) -> Sequence[Prompt]:
        return self._train

    def held_out_prompts(self) -> Sequence[Prompt]:
        return self._held_out

    def extra_prompts(self, name: str) -> Sequence[Prompt]:
        raise UserError(f"eval.extra: the task {self.name} has no set '{name}'; it has none")

    def verify(self, prompt: Prompt, completion: str) -> bool:
        return self.verify_batch([(prompt, completion)])[0].correct

    def verify_batch(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        found = [(prompt, _NUMBER.fullmatch(completion)) for prompt, completion in pairs]
        return [
            # Not int, which refuses more than 4300 digits: a policy may write them.
            unparsed(self._config.reward) if match is None else Verdict(Decimal(match[1]) == Decimal(prompt.answer))
            for prompt, match in found
        ]

    def _prompts(self, *, held_out: bool) -> tuple[Prompt, ...]:
        numbers = range(1, self._config.largest + 1)
        pairs = [(a, b) for a in numbers for b in numbers if is_held_out(a, b) == held_out]
        order = np.random.default_rng(self._config.seed).permutation(len(pairs))
        chosen = [pairs[int(i)] for i in order]
        return tuple(self._make(f"{a}+{b}", f"{a} + {b} =", str(a + b)) for a, b in chosen)
