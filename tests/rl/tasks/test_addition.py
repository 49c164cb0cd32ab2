"""Addition: splits that cannot meet, a verifier that is not hit by luck, demonstrations with the stated faults."""

from __future__ import annotations

import re

import numpy as np
import pytest
from pydantic import ValidationError

from scalerl.rl.config import AdditionTask, Demonstrations
from scalerl.rl.errors import UserError
from scalerl.rl.tasks.addition import Addition, is_held_out, work
from scalerl.rl.types import Prompt


def make(no_carry: float = 0.7, slip: float = 0.08, **overrides) -> Addition:
    values = {"kind": "addition", "min_digits": 4, "max_digits": 7, "n_train": 500, "seed": 0, "wrong_keys": 0.0}
    values |= overrides
    return Addition(AdditionTask(**values, demonstrations=Demonstrations(no_carry=no_carry, slip=slip)))


def test_train_and_held_out_are_disjoint_and_their_answers_right():
    task = make()
    train, held_out = task.train_prompts(), task.held_out_prompts()
    assert len(train) == len({p.id for p in train}) == 500
    assert not {p.id for p in train} & {p.id for p in held_out}
    for prompt in [*train, *held_out]:
        a, b = map(int, prompt.id.split("+"))
        assert prompt.answer == str(a + b)


@pytest.mark.parametrize("share", [0.1, 0.25])
def test_any_first_prompts_have_the_share_of_wrong_keys(share):
    right, task = make(), make(wrong_keys=share)
    for name in ("train_prompts", "held_out_prompts"):
        prompts = getattr(task, name)()
        assert [p.id for p in prompts] == [p.id for p in getattr(right, name)()]
        wrong = np.cumsum([p.answer != str(sum(map(int, p.id.split("+")))) for p in prompts])
        assert np.abs(wrong - share * np.arange(1, len(wrong) + 1)).max() <= 1
    wrong = next(p for p in prompts if p.answer != str(sum(map(int, p.id.split("+")))))
    a, b = map(int, wrong.id.split("+"))
    assert not task.verify(wrong, work(a, b, carries=True, errors=[0] * 7))


@pytest.mark.parametrize("name,held", [("train_prompts", False), ("held_out_prompts", True)])
def test_the_split_is_a_function_of_the_operands(name, held):
    prompts = getattr(make(), name)()
    assert all(is_held_out(*map(int, p.id.split("+"))) == held for p in prompts)


def test_another_seed_gives_other_prompts_and_the_same_seed_the_same():
    assert make().train_prompts() == make().train_prompts()
    assert make(seed=1).train_prompts() != make().train_prompts()


def test_lengths_vary_evenly():
    lengths = [len(p.id.split("+")[0]) for p in make(n_train=2000).train_prompts()]
    counts = np.bincount(lengths)[4:]
    assert len(counts) == 4
    assert counts.min() > 400


def test_the_worked_example_by_hand():
    # 57 + 68: 7+8 = 15, 5+6+1 = 12 -> 125.
    assert work(57, 68, carries=True, errors=[0, 0]) == "78155612</think>125<end>"
    # Without the carry the tens column makes 11, and the answer follows from the columns.
    assert work(57, 68, carries=False, errors=[0, 0]) == "78155611</think>115<end>"
    assert work(12, 34, carries=True, errors=[1, 0]) == "24071304</think>47<end>"


@pytest.mark.parametrize(
    "completion,right",
    [
        ("0505</think>125", True),
        ("</think>125", True),
        ("</think> 125 ", True),
        ("</think>126", False),
        ("</think>0125", False),
        ("125", False),  # thinking not ended
        ("</think>1</think>125", False),
        ("</think>", False),
        ("", False),
    ],
)
def test_only_a_complete_and_exact_answer_is_correct(completion, right):
    prompt = Prompt(id="57+68", text="57+68=<think>", answer="125", task="addition")
    assert make().verify(prompt, completion) is right


def test_demonstrations_have_the_stated_faults_and_no_held_out_prompt():
    task, n = make(slip=0.0), 3000
    demonstrations = task.demonstrations(n, np.random.default_rng(0))
    wrong = carried = 0
    for prompt, completion in demonstrations:
        a, b = map(int, re.findall(r"\d+", prompt))
        assert not is_held_out(a, b)
        if completion != work(a, b, carries=True, errors=[0] * 7):
            wrong += 1
            assert completion == work(a, b, carries=False, errors=[0] * 7)
        carried += work(a, b, carries=True, errors=[0] * 7) != work(a, b, carries=False, errors=[0] * 7)
    assert wrong / carried == pytest.approx(0.7, abs=0.03)


def test_column_sums_slip_at_the_stated_rate():
    task = make(no_carry=0.0)
    slips = columns = 0
    for prompt, completion in task.demonstrations(1000, np.random.default_rng(1)):
        a, b = map(int, re.findall(r"\d+", prompt))
        worked = completion.partition("</think>")[0]
        carry = 0
        for i, column in enumerate(re.findall(r"....", worked)):
            x, y, total = int(column[0]), int(column[1]), int(column[2:])
            assert (x, y) == (a // 10**i % 10, b // 10**i % 10)
            slips += total != x + y + carry
            columns += 1
            carry = total // 10
    assert slips / columns == pytest.approx(0.08, abs=0.01)


def test_the_extra_set_is_longer_and_an_unknown_one_is_refused():
    assert {len(p.id) for p in make().extra_prompts("longer")} == {17}
    with pytest.raises(UserError, match="has no set 'longr'; it has longer"):
        make().extra_prompts("longr")


def test_more_prompts_than_there_are_is_refused():
    with pytest.raises(UserError, match=r"task\.n_train=500.*lower task\.n_train or raise task\.max_digits"):
        make(min_digits=1, max_digits=1, n_train=500).train_prompts()


def test_a_small_task_has_a_small_held_out_pool():
    assert 0 < len(make(min_digits=1, max_digits=1).held_out_prompts()) < 81


def test_the_longest_operands_that_are_allowed_are_exact():
    task = make(min_digits=17, max_digits=17, n_train=20)
    for prompt in [*task.train_prompts(), *task.extra_prompts("longer")[:20]]:
        a, b = map(int, prompt.id.split("+"))
        assert work(a, b, carries=True, errors=[0] * 18).endswith(f"</think>{a + b}<end>")
    with pytest.raises(ValidationError, match="max_digits"):
        make(max_digits=18)
