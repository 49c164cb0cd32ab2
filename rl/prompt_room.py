"""Prompts too long for the model: left out, and told, before a run begins rather than met in the middle of it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import numpy as np

from scalerl.rl.config import Engine, RunConfig
from scalerl.rl.engines.base import NO_LIMIT, ContextLimit
from scalerl.rl.errors import UserError
from scalerl.rl.models.load import text_config
from scalerl.rl.requests import Requests
from scalerl.rl.tasks import fingerprint
from scalerl.rl.types import Chat, Prompt

Keep = Callable[[str, Sequence[Prompt]], Sequence[Prompt]]  # (the set's name, its prompts) -> those that are used


def keep_all(name: str, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    return prompts


class _Subset(Sequence[Prompt]):
    """Some of a sequence's prompts, in its order; made when they are asked for, as the sequence's own are."""

    def __init__(self, prompts: Sequence[Prompt], kept: np.ndarray) -> None:
        self._prompts, self._kept = prompts, kept

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> _Subset: ...
    def __getitem__(self, index: int | slice) -> Prompt | _Subset:
        if isinstance(index, slice):
            return _Subset(self._prompts, self._kept[index])
        return self._prompts[int(self._kept[index])]

    @property
    def fingerprint(self) -> str:
        of_all = fingerprint(self._prompts).encode()
        return hashlib.sha256(of_all + self._kept.astype(np.int64).tobytes()).hexdigest()[:16]


def _limit(engine: Engine, model: Any) -> ContextLimit:
    """The embedded engine's; of SGLang servers where it is the model's positions, and else none: what a server was
    started with, and how it stretches rotary positions, it knows itself, and it refuses what doesn't fit."""
    if engine.kind == "torch":
        return ContextLimit.of(model)
    rotary = getattr(model, "rope_parameters", None) or getattr(model, "rope_scaling", None)
    started_so = any(argument.startswith("--context-length") for argument in engine.arguments)
    if engine.urls or started_so or "'factor'" in str(rotary):
        return NO_LIMIT
    return ContextLimit.of(model, windows=False)


class PromptRoom:
    """Leaves out the prompts that, with a whole completion, exceed the model's context."""

    def __init__(self, limit: ContextLimit, completion: int, requests: Requests) -> None:
        """completion: tokens of the longest one. Raises UserError where no prompt at all has room."""
        limit.check(1, completion)
        self._limit, self._completion, self._requests = limit, completion, requests
        self._frames: dict[Chat | None, int] = {}

    @classmethod
    def of_run(cls, config: RunConfig, model_path: Path, requests: Requests) -> PromptRoom:
        limit = _limit(config.engine, text_config(model_path))
        return cls(limit, config.recipe.generation_budget, requests)

    def keep(self, name: str, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """Those of a set's prompts that fit, `prompts` itself where all do; else as `indices`."""
        kept = self.indices(name, prompts)
        return prompts if len(kept) == len(prompts) else _Subset(prompts, np.array(kept))

    def indices(self, name: str, prompts: Sequence[Prompt]) -> Sequence[int]:
        """The places of the prompts that fit. How many don't is told on stderr; raises UserError where none does."""
        if self._limit == NO_LIMIT:
            return range(len(prompts))
        room = self._limit.tokens - self._completion
        kept, first = [], ""
        for i, prompt in enumerate(prompts):
            if self._at_most(prompt) > room and (tokens := len(self._requests.encode(prompt))) > room:
                first = first or f"{prompt.text[:40]!r}, has {tokens}"
            else:
                kept.append(i)
        if not first:
            return kept
        why = (
            f"have more than {room} tokens ({self._limit.reason}={self._limit.tokens} less "
            f"recipe.generation_budget={self._completion}; the first, {first})"
        )
        if not kept:
            raise UserError(f"all {len(prompts):,} {name} prompts {why}; lower the budget or give shorter prompts")
        print(f"{len(prompts) - len(kept):,} of {len(prompts):,} {name} prompts left out, which {why}", file=sys.stderr)
        return kept

    def _at_most(self, prompt: Prompt) -> int:
        """A bound on the prompt's tokens that is had without encoding it: a token is of a byte at least."""
        if prompt.chat not in self._frames:
            self._frames[prompt.chat] = len(self._requests.encode(replace(prompt, text=".")))
        return self._frames[prompt.chat] + len(prompt.text.encode())
