"""Verdicts on groups: all at once, truncated ones without the verifier, and what they do to the batch."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from scalerl.cli.compose import compose
from scalerl.rl.batch import assemble
from scalerl.rl.models.tokenizer import character_tokenizer
from scalerl.rl.requests import Requests
from scalerl.rl.scoring import Unscored, score
from scalerl.rl.types import Chat, CompletedGroup, Completion, Prompt, Verdict

TOKENIZER = character_tokenizer()


def completion(text: str, finish: Literal["stop", "length"] = "stop") -> Completion:
    tokens = np.array(TOKENIZER.encode(text + "<end>", add_special_tokens=False), np.int32)
    zeros = np.zeros(len(tokens))
    return Completion(tokens, zeros.astype(np.float32), zeros.astype(np.int32), zeros.astype(bool), finish=finish)


def prompt(answer: str) -> Prompt:
    return Prompt(id=answer, text="", answer=answer, task="t")


class Batched:
    """Right where the text is the answer, an error at `e`, unparsed and masked at `u`, less reward at `s`."""

    name = "t"

    def __init__(self) -> None:
        self.calls = []

    def train_prompts(self):
        return []

    held_out_prompts = train_prompts

    def extra_prompts(self, name):
        return []

    def verify(self, prompt, completion):
        return prompt.answer == completion

    def verify_batch(self, pairs):
        self.calls.append([(p.answer, text) for p, text in pairs])
        special = {
            "e": Verdict(True, error=True),
            "u": Verdict(False, unparsed=True, masked=True),
            "s": Verdict(False, unparsed=True, shaping=-0.5),
        }
        return [special.get(text, Verdict(p.answer == text)) for p, text in pairs]


def groups() -> list[Unscored]:
    first = [completion("1"), completion("2"), completion("1", finish="length"), completion("e")]
    second = [completion("2"), completion("u"), completion("s"), completion("3")]
    return [
        Unscored(CompletedGroup(number, tuple(made)), prompt(answer))
        for number, (made, answer) in enumerate([(first, "1"), (second, "2")])
    ]


def test_groups_are_verified_at_once_and_truncated_completions_not_at_all():
    task = Batched()
    one, two = score(groups(), task=task, tokenizer=TOKENIZER)
    assert task.calls == [[("1", "1"), ("1", "2"), ("1", "e"), ("2", "2"), ("2", "u"), ("2", "s"), ("2", "3")]]
    assert one.correct.tolist() == [True, False, False, False]
    assert one.verifier_error.tolist() == [False, False, False, True]
    assert two.correct.tolist() == [True, False, False, False]
    assert two.unparsed.tolist() == [False, True, True, False]
    assert two.masked.tolist() == [False, True, False, False]
    assert two.shaping.tolist() == [0.0, 0.0, -0.5, 0.0]


def test_masked_and_shaped_completions_in_the_batch(make_recipe):
    """Of the second group three are trained, with rewards 1, -1.5 and -1; the pass rate counts the masked one too."""
    batch = assemble(score(groups()[1:], task=Batched(), tokenizer=TOKENIZER), make_recipe(advantage_norm="none"))
    assert [row.order for row in batch.rows] == [0, 2, 3]
    assert [row.advantage for row in batch.rows] == pytest.approx([1.5, -1.0, -0.5])
    assert batch.stats["pass_rate"] == 1 / 4 and batch.stats["unparsed_rate"] == 1 / 2
    assert batch.stats["verifier_errors"] == 0


def test_prompts_go_through_the_chat_template_where_there_is_one():
    tokenizer = character_tokenizer()
    requests = Requests(compose([]).config, tokenizer)
    asked = Prompt("id", "two", "2", "t", Chat(system="sys", prefill="<think>"))
    assert tokenizer.decode(list(requests.encode(prompt("2")))) == ""
    assert len(requests.encode(asked)) == len("sys") + 2 + len("two") + 1
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}({{ m.content }}){% endfor %}assistant"
    assert tokenizer.decode(list(requests.encode(asked))) == "system(sys)user(two)assistant<think>"
    plain = Prompt("id", "two", "2", "t", Chat(system=None, prefill=""))
    assert tokenizer.decode(list(requests.encode(plain))) == "user(two)assistant"
