"""Countdown: the verifier, and splits that no reordering of the numbers joins."""

from __future__ import annotations

import numpy as np
import pytest

from scalerl.rl.config import CountdownTask
from scalerl.rl.errors import UserError
from scalerl.rl.tasks.countdown import Countdown, evaluate, is_held_out
from scalerl.rl.types import Prompt

PROMPT = Prompt(id="3 7 4=25", text="3 7 4=25<think>", answer="3 7 4=25", task="countdown")


def make(**overrides) -> Countdown:
    values = {"kind": "countdown", "numbers": 3, "max_number": 12, "tries": 4, "n_train": 500, "seed": 0} | overrides
    return Countdown(CountdownTask(**values))


@pytest.mark.parametrize(
    "answer,right",
    [
        ("3*7+4", True),
        ("4+(7*3)", True),
        ("3*7+5", False),  # a number that was not given
        ("7*3+4-0", False),
        ("25", False),
        ("3*3*3-2", False),  # used more often than given
        ("3**7", False),
        ("__import__('os')", False),
        ("3*7+", False),
        ("(" * 5000, False),
        ("", False),
    ],
)
def test_verifier(answer, right):
    assert make().verify(PROMPT, f"3+7+4=14</think>{answer}") is right


def test_an_answer_inside_the_thinking_is_wrong():
    assert not make().verify(PROMPT, "3*7+4")


def test_evaluate_by_hand():
    assert evaluate("2+3*4") == (14, [2, 3, 4])
    assert evaluate("2/3") is None


def test_train_and_held_out_share_no_problem_in_any_order():
    def problem(prompt: Prompt) -> tuple:
        numbers, target = prompt.answer.split("=")
        return (*sorted(map(int, numbers.split())), int(target))

    task = make()
    assert not {problem(p) for p in task.train_prompts()} & {problem(p) for p in task.held_out_prompts()}


def test_more_problems_than_there_are_is_refused_and_a_small_pool_is_not():
    small = make(numbers=2, max_number=3)
    with pytest.raises(UserError, match=r"task\.n_train=500.*lower task\.n_train or raise task\.max_number"):
        small.train_prompts()
    assert 0 < len(small.held_out_prompts()) < 10


def test_an_unknown_extra_set_is_refused():
    with pytest.raises(UserError, match="has no set 'longer'"):
        make().extra_prompts("longer")


def test_demonstrations_answer_the_closest_try_and_are_sometimes_right():
    task, right = make(), 0
    for prompt, completion in task.demonstrations(400, np.random.default_rng(0)):
        key = prompt.removesuffix("<think>")
        numbers, target = key.split("=")
        assert not is_held_out([int(v) for v in numbers.split()], int(target))
        right += task.verify(
            Prompt(id=key, text=prompt, answer=key, task="countdown"), completion.removesuffix("<end>")
        )
        assert completion.count(",") == 3
    assert 0.05 < right / 400 < 0.9
