"""Multi-digit addition, worked column by column inside the thinking and answered after it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from scalerl.rl.config import AdditionTask
from scalerl.rl.errors import UserError
from scalerl.rl.tasks import answer_of
from scalerl.rl.types import Prompt

HELD_OUT_POOL = 2048
_HELD_OUT_SHARE = 8  # one pair of operands in so many is held out


def is_held_out(a: int, b: int) -> bool:
    """The split is a function of the operands in any order, so train and held-out problems cannot meet."""
    return zlib.crc32(f"{min(a, b)}+{max(a, b)}".encode()) % _HELD_OUT_SHARE == 0


class Addition:
    """Prompt `a+b=<think>`; completion: for each column from the right its two digits and their two-digit sum with the
    carry, `</think>`, the sum, `<end>`. Both operands have the same number of digits, min_digits to max_digits,
    each equally likely, so that completions differ in length.

    The demonstrations are faulty in a way that RL can mend: a share never propagates the carry (a policy that imitates
    a mixture does either), and column sums are off by one now and then. The answer always follows from the columns.

    As in data sets at large, a share of the answer keys is wrong: a bound of the pass rate that is known."""

    name = "addition"

    def __init__(self, config: AdditionTask) -> None:
        self._config = config

    @cached_property
    def _train(self) -> tuple[Prompt, ...]:
        n, seed = self._config.n_train, (self._config.seed, 0)
        prompts = self._distinct(n, seed, lambda a, b: not is_held_out(a, b))
        if len(prompts) < n:
            raise UserError(
                f"task.n_train={n}: there are only about {len(prompts)} prompts of {self._config.min_digits} to "
                f"{self._config.max_digits} digits to train on; lower task.n_train or raise task.max_digits"
            )
        return prompts

    @cached_property
    def _held_out(self) -> tuple[Prompt, ...]:
        return self._distinct(HELD_OUT_POOL, (self._config.seed, 1), is_held_out)

    def train_prompts(self) -> Sequence[Prompt]:
        return self._train

    def held_out_prompts(self) -> Sequence[Prompt]:
        return self._held_out

    def extra_prompts(self, name: str) -> Sequence[Prompt]:
        """`longer`: both operands one digit longer than any in training (out of distribution)."""
        if name != "longer":
            raise UserError(f"eval.extra: the task addition has no set '{name}'; it has longer")
        digits = self._config.max_digits + 1
        return self._distinct(HELD_OUT_POOL, (self._config.seed, 2), lambda a, b: True, (digits, digits))

    def verify(self, prompt: Prompt, completion: str) -> bool:
        return answer_of(completion) == prompt.answer

    def demonstrations(self, n: int, rng: np.random.Generator) -> list[tuple[str, str]]:
        faults, demonstrations = self._config.demonstrations, []
        while len(demonstrations) < n:
            a, b = self._operands(rng)
            if is_held_out(a, b):
                continue
            carries = rng.random() >= faults.no_carry
            slips = rng.random(self._config.max_digits) < faults.slip
            signs = rng.integers(0, 2, self._config.max_digits) * 2 - 1
            demonstrations.append((_question(a, b), work(a, b, carries=carries, errors=slips * signs)))
        return demonstrations

    def _operands(self, rng: np.random.Generator, digits: tuple[int, int] | None = None) -> tuple[int, int]:
        low, high = digits or (self._config.min_digits, self._config.max_digits)
        length = int(rng.integers(low, high + 1))
        a, b = rng.integers(10 ** (length - 1), 10**length, size=2)
        return int(a), int(b)

    def _distinct(
        self,
        n: int,
        seed: tuple[int, int],
        wanted: Callable[[int, int], bool],
        digits: tuple[int, int] | None = None,
    ) -> tuple[Prompt, ...]:
        """n different prompts, or as many as 100 n draws find."""
        rng, found = np.random.default_rng(seed), {}
        for _ in range(100 * n):
            a, b = self._operands(rng, digits)
            if wanted(a, b):
                found.setdefault((a, b), None)
            if len(found) == n:
                break
        return tuple(
            Prompt(f"{a}+{b}", _question(a, b), key, self.name)
            for (a, b), key in zip(found, self._keys([str(a + b) for a, b in found]), strict=True)
        )

    def _keys(self, sums: list[str]) -> list[str]:
        """The answers to check against: of any first n prompts the share `wrong_keys`, to within one, has the sum of
        the prompt before, which no policy finds."""
        share = self._config.wrong_keys
        wrong = [int((i + 1) * share) > int(i * share) for i in range(len(sums))]
        return [sums[i - 1] if wrong[i] else sums[i] for i in range(len(sums))]


def _question(a: int, b: int) -> str:
    return f"{a}+{b}=<think>"


def work(a: int, b: int, *, carries: bool, errors: Sequence[int] | np.ndarray) -> str:
    """The completion of a+b, column by column from the right. errors[i] is added to the sum of column i; without
    `carries` no column takes the carry of the one before it. The answer is read off the columns.

    >>> work(57, 68, carries=True, errors=[0, 0])
    '78155612</think>125<end>'
    >>> work(57, 68, carries=False, errors=[0, 0])
    '78155611</think>115<end>'
    """
    columns, answer, carry = [], "", 0
    for i in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**i % 10, b // 10**i % 10
        total = max(0, x + y + (carry if carries else 0) + int(errors[i]))
        columns.append(f"{x}{y}{total:02d}")
        answer = f"{total % 10}{answer}"
        carry = total // 10
    answer = f"{carry}{answer}" if carry else answer
    return f"{''.join(columns)}</think>{answer.lstrip('0') or '0'}<end>"
