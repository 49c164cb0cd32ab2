"""Countdown: reach a target from a few numbers with + - *, each number used once at most."""

from __future__ import annotations

import ast
import operator
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from scalerl.rl.config import CountdownTask
from scalerl.rl.errors import UserError
from scalerl.rl.tasks import answer_of
from scalerl.rl.types import Prompt

HELD_OUT_POOL = 1024
_HELD_OUT_SHARE = 8
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


class Countdown:
    """Prompt `3 7 4=25<think>`; completion: tries such as `3+7+4=14`, one a line of thought, separated by commas,
    `</think>`, an expression, `<end>`. Demonstrations try random expressions and answer the closest, right or not."""

    name = "countdown"

    def __init__(self, config: CountdownTask) -> None:
        self._config = config

    @cached_property
    def _train(self) -> tuple[Prompt, ...]:
        n = self._config.n_train
        prompts = self._distinct(n, 0, held_out=False)
        if len(prompts) < n:
            raise UserError(
                f"task.n_train={n}: there are only about {len(prompts)} problems of {self._config.numbers} numbers up "
                f"to {self._config.max_number} to train on; lower task.n_train or raise task.max_number"
            )
        return prompts

    @cached_property
    def _held_out(self) -> tuple[Prompt, ...]:
        return self._distinct(HELD_OUT_POOL, 1, held_out=True)

    def train_prompts(self) -> Sequence[Prompt]:
        return self._train

    def held_out_prompts(self) -> Sequence[Prompt]:
        return self._held_out

    def extra_prompts(self, name: str) -> Sequence[Prompt]:
        raise UserError(f"eval.extra: the task countdown has no set '{name}'; it has none")

    def verify(self, prompt: Prompt, completion: str) -> bool:
        answer = answer_of(completion)
        numbers, target = prompt.answer.split("=")
        if answer is None:
            return False
        evaluated = evaluate(answer)
        if evaluated is None:
            return False
        value, used = evaluated
        return value == int(target) and not Counter(used) - Counter(map(int, numbers.split()))

    def demonstrations(self, n: int, rng: np.random.Generator) -> list[tuple[str, str]]:
        demonstrations = []
        while len(demonstrations) < n:
            numbers, target = self._draw(rng)
            if is_held_out(numbers, target):
                continue
            tries = [self._expression(numbers, rng) for _ in range(self._config.tries)]
            values = [_value(t) for t in tries]
            best = min(range(len(tries)), key=lambda i: abs(values[i] - target))
            thoughts = ",".join(f"{t}={v}" for t, v in zip(tries, values, strict=True))
            demonstrations.append((_question(numbers, target), f"{thoughts}</think>{tries[best]}<end>"))
        return demonstrations

    def _expression(self, numbers: Sequence[int], rng: np.random.Generator) -> str:
        """All numbers in random order, joined by random operators."""
        order = rng.permutation(len(numbers))
        text = str(numbers[order[0]])
        for i in order[1:]:
            text += "+-*"[rng.integers(3)] + str(numbers[i])
        return text

    def _draw(self, rng: np.random.Generator) -> tuple[tuple[int, ...], int]:
        """Numbers and a target that they reach."""
        while True:
            numbers = tuple(int(v) for v in rng.integers(1, self._config.max_number + 1, self._config.numbers))
            target = _value(self._expression(numbers, rng))
            if target > 0:
                return numbers, target

    def _distinct(self, n: int, stream: int, *, held_out: bool) -> tuple[Prompt, ...]:
        """n different prompts, or as many as 100 n draws find."""
        rng, found = np.random.default_rng((self._config.seed, stream)), {}
        for _ in range(100 * n):
            numbers, target = self._draw(rng)
            if is_held_out(numbers, target) == held_out:
                found.setdefault((numbers, target), None)
            if len(found) == n:
                break
        return tuple(_prompt(numbers, target) for numbers, target in found)


def is_held_out(numbers: Sequence[int], target: int) -> bool:
    """By the numbers in any order and the target, so that no reordering of a training prompt is held out."""
    return zlib.crc32(f"{sorted(numbers)}={target}".encode()) % _HELD_OUT_SHARE == 0


def evaluate(expression: str) -> tuple[int, list[int]] | None:
    """(value, numbers used) of an expression of integers, + - * and parentheses; None for anything else."""
    try:
        tree = ast.parse(expression, mode="eval").body
        used: list[int] = []
        return _walk(tree, used), used
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _walk(node: ast.expr, used: list[int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_walk(node.left, used), _walk(node.right, used))
    raise ValueError("not an expression of integers, + - * and parentheses")


def _value(expression: str) -> int:
    evaluated = evaluate(expression)
    assert evaluated is not None, expression
    return evaluated[0]


def _question(numbers: Sequence[int], target: int) -> str:
    return f"{' '.join(map(str, numbers))}={target}<think>"


def _prompt(numbers: Sequence[int], target: int) -> Prompt:
    key = f"{' '.join(map(str, numbers))}={target}"
    return Prompt(id=key, text=_question(numbers, target), answer=key, task="countdown")
