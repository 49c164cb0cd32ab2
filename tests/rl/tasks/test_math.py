"""The math task: hand-labelled answers, answers that hang, and what completions without an answer cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scalerl.rl.config import Asking, Data, MathTask, Reward
from scalerl.rl.tasks.math import Math
from scalerl.rl.tasks.math_verifier import clean, same_answer
from scalerl.rl.types import Prompt, Verdict

PAIRS = [json.loads(line) for line in (Path(__file__).parent / "math_pairs.jsonl").read_text().splitlines()]
# 9^9^9^9 as an exact power: math-verify works on it for hours, and its own time limit doesn't stop it.
ENDLESS = "9^{9^{9^{9}}} - 1"


def make(tmp_path, *, time_limit: float = 60.0, workers: int = 2, **reward) -> Math:
    file = tmp_path / "train.jsonl"
    rows = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(
        train=str(file),
        held_out=None,
        n_held_out=3,
        seed=0,
        prompt_column=None,
        answer_column=None,
        exclude=None,
        extra={},
    )
    return Math(
        MathTask(
            kind="math",
            data=data,
            asking=Asking(template="{prompt} Use a \\boxed{}.", chat=True, system="Be brief.", prefill="<think>"),
            reward=Reward(**{"unparsed": "score", "format_penalty": 0.0, **reward}),
            workers=workers,
            time_limit=time_limit,
        ),
        "math",
    )


def asked(answer: str) -> Prompt:
    return Prompt("id", "text", answer, "math")


def test_the_labelled_pairs_cover_what_they_should():
    assert len({(p["gold"], p["completion"]) for p in PAIRS}) == len(PAIRS) >= 150
    kinds = {p["kind"] for p in PAIRS}
    assert kinds >= {"fraction", "surd", "interval", "tuple", "unit", "percent", "latex", "boxes", "nonsense"}
    assert 0.3 < sum(p["correct"] for p in PAIRS) / len(PAIRS) < 0.8
    assert sum("known_disagreement" in p for p in PAIRS) <= 10


def test_the_verifier_agrees_with_the_labels_but_where_the_file_says_so(tmp_path):
    task = make(tmp_path)
    verdicts = task.verify_batch([(asked(p["gold"]), p["completion"]) for p in PAIRS])
    assert not any(v.error for v in verdicts)
    disagree = [p for p, v in zip(PAIRS, verdicts, strict=True) if v.correct is not p["correct"]]
    assert disagree == [p for p in PAIRS if "known_disagreement" in p]


def test_an_endless_answer_is_a_verifiers_error_and_the_next_has_its_verdict(tmp_path):
    task = make(tmp_path, workers=1, time_limit=8.0)
    completions = [r"\boxed{0.5}", rf"\boxed{{{ENDLESS}}}", r"\boxed{\frac{2}{4}}", r"\boxed{3}"]
    verdicts = task.verify_batch([(asked(r"\frac{1}{2}"), c) for c in completions])
    assert verdicts == [Verdict(True), Verdict(False, error=True), Verdict(True), Verdict(False)]
    with pytest.raises(RuntimeError, match="no verdict"):
        task.verify(asked("1"), rf"\boxed{{{ENDLESS}}}")


def test_completions_without_an_answer(tmp_path):
    pairs = [(asked("5"), "It is 5."), (asked("5"), r"<think>\boxed{5}</think>It is 5."), (asked("5"), r"\boxed{5}")]
    assert make(tmp_path).verify_batch(pairs) == [Verdict(False, unparsed=True)] * 2 + [Verdict(True)]
    scored = make(tmp_path, format_penalty=0.5).verify_batch(pairs)
    assert scored == [Verdict(False, unparsed=True, shaping=-0.5)] * 2 + [Verdict(True)]
    masked = make(tmp_path, unparsed="mask").verify_batch(pairs)
    assert masked == [Verdict(False, unparsed=True, masked=True)] * 2 + [Verdict(True)]


def test_prompts_are_put_as_the_configuration_says(tmp_path):
    task = make(tmp_path)
    assert (len(task.train_prompts()), len(task.held_out_prompts())) == (5, 3)
    prompt = task.train_prompts()[0]
    assert prompt.text == f"What is {int(prompt.answer) // 2} + {int(prompt.answer) // 2}? Use a \\boxed{{}}."
    assert prompt.chat is not None and (prompt.chat.system, prompt.chat.prefill) == ("Be brief.", "<think>")
    assert prompt.task == "math"


def test_an_answer_of_the_data_set_that_can_not_be_read_is_an_error():
    with pytest.raises(ValueError, match="of the data set can't be read"):
        same_answer("}", "5")


@pytest.mark.parametrize(
    "text,expected",
    [
        ("$5$.", "5"),
        (r"\$18", r"\$18"),
        (r"10\,000", "10000"),
        ("1{,}000", "1000"),
        (r"50\%", "50"),
        (r"\big\{1\big\}", r"\{1\}"),
        (r"\bigcup", r"\bigcup"),
        ("", ""),
    ],
)
def test_clean(text, expected):
    assert clean(text) == expected
