"""Tasks of the installed reasoning-gym: problems, the split, its scores as verdicts, and mistakes in one line."""

from __future__ import annotations

import pytest

from scalerl.cli.compose import compose
from scalerl.rl.errors import UserError
from scalerl.rl.tasks import build_task, reasoning_gym_task
from scalerl.rl.tasks.reasoning_gym_task import ReasoningGymTask, answer_in
from scalerl.rl.types import Prompt, Verdict


def make(name: str, *overrides: str) -> ReasoningGymTask:
    small = ["task.n_train=40", "task.n_held_out=10", "task.workers=1", "task.time_limit=60"]
    composed = compose(["model=hf", "model.path=m", "task=reasoning_gym", f"task.name={name}", *small, *overrides])
    task = build_task(composed.config.task)
    assert isinstance(task, ReasoningGymTask)
    return task


def problem(task: ReasoningGymTask, prompt: Prompt) -> dict:
    return reasoning_gym_task._problems(*task._problems)[int(prompt.answer)]


def test_problems_are_split_and_the_same_in_every_run():
    task, again, other = (make("chain_sum", f"task.seed={seed}") for seed in (0, 0, 1))
    train, held_out = (
        {p.id: problem(task, p)["question"] for p in part} for part in (task.train_prompts(), task.held_out_prompts())
    )
    assert (len(train), len(held_out)) == (40, 10)
    assert not set(train.values()) & set(held_out.values())
    assert [p.id for p in again.train_prompts()] == list(train)
    assert {p.id for p in again.held_out_prompts()} == set(held_out)
    assert set(train) != {p.id for p in other.train_prompts()}
    first = task.train_prompts()[0]
    assert first.task == "chain_sum" and first.chat is not None
    assert first.text.startswith(train[first.id]) and "<answer>" in first.text


def test_equal_problems_are_never_on_both_sides(capsys):
    """One-digit sums of two terms: 200 problems, of which 300 draws repeat many."""
    parameters = [f"+task.parameters.{key}" for key in ("max_terms=2", "max_digits=1")]
    task = make("chain_sum", *parameters, "task.n_train=250", "task.n_held_out=50")
    train, held_out = ([p.text for p in part] for part in (task.train_prompts(), task.held_out_prompts()))
    assert len(held_out) == 50 and len(train) == len(set(train)) < 200
    assert not set(train) & set(held_out)
    assert "repeat an earlier prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["basic_arithmetic", "leg_counting", "spell_backward", "spiral_matrix", "fraction_simplification"]
)
def test_any_task_knows_its_own_answers(name):
    task = make(name, "task.n_train=12", "task.n_held_out=4")
    prompts = [*task.train_prompts()[:6], *task.held_out_prompts()[:2]]
    right = [(p, f"<answer>{problem(task, p)['answer']}</answer>") for p in prompts]
    wrong = [(p, "<answer>no such thing</answer>") for p in prompts]
    assert task.verify_batch([*right, *wrong]) == [Verdict(True)] * len(right) + [Verdict(False)] * len(wrong)


def test_a_score_below_the_pass_score_is_wrong():
    """The library gives a right sum with words beside it a part of the point, by its share of the characters."""
    task = make("chain_sum")
    prompt = task.train_prompts()[0]
    sum_ = problem(task, prompt)["answer"]
    beside = f"<answer>{sum_} in all</answer>"
    score = reasoning_gym_task.score(*task._problems, int(prompt.answer), f"{sum_} in all")
    assert score == pytest.approx(len(sum_) / (len(sum_) + 7)) and 0 < score < 1
    assert not task.verify(prompt, beside)
    lenient = make("chain_sum", "task.pass_score=0.1")
    assert lenient.verify(prompt, beside) and lenient.verify(prompt, f"<answer>{sum_}</answer>")


def test_completions_without_an_answer_and_a_scorer_that_fails():
    task = make("chain_sum", "task.reward.format_penalty=0.5")
    prompt = task.train_prompts()[0]
    unparsed = Verdict(False, unparsed=True, shaping=-0.5)
    assert task.verify_batch([(prompt, "7"), (prompt, "<answer>7")]) == [unparsed, unparsed]
    beyond = Prompt("id", "", "not a number", "chain_sum")
    with pytest.raises(ValueError):
        task.verify(beyond, "<answer>1</answer>")
    assert answer_in("<answer>1</answer> no: <answer> 2\n</answer>") == "2"
    assert answer_in("<think><answer>1</answer></think> 1") is None


@pytest.mark.parametrize(
    "name,override,message",
    [
        ("chain_sums", "seed=0", r"no task 'chain_sums' \(task\.name\); did you mean 'chain_sum'\?"),
        ("chain_sum", "+task.parameters.max_term=3", r"parameters\.max_term: .* did you mean 'max_terms'\?"),
        ("chain_sum", "+task.parameters.min_terms=9", "makes no problems with .*max_terms must be >= min_terms"),
    ],
)
def test_mistakes_are_answered_in_one_line(name, override, message):
    with pytest.raises(UserError, match=message):
        make(name, override)


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(reasoning_gym_task, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'scalerl\[reasoning-gym\]'"):
        make("chain_sum")
