"""Sums for pretrained models: prompts, verdicts, and what an evaluation tells apart."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from scalerl.cli.compose import compose
from scalerl.rl.errors import UserError
from scalerl.rl.evaluation import Evaluator
from scalerl.rl.models.tokenizer import character_tokenizer
from scalerl.rl.requests import Requests
from scalerl.rl.tasks.sums import Sums
from scalerl.rl.types import CompletedGroup, Completion, Prompt, Verdict

TOKENIZER = character_tokenizer()


def config(*overrides: str):
    return compose(["task=sums", "model=smollm2", "eval.n_prompts=2", "eval.n_samples=4", *overrides]).config


def sums(*overrides: str) -> Sums:
    task = config(*overrides).task
    assert task.kind == "sums"
    return Sums(task, "sums")


def test_every_sum_is_trained_on_or_held_out_in_either_order():
    task = sums("task.largest=12")
    train, held_out = ([tuple(map(int, p.id.split("+"))) for p in part] for part in (task._train, task._held_out))
    assert sorted([*train, *held_out]) == [(a, b) for a in range(1, 13) for b in range(1, 13)]
    assert not {tuple(sorted(pair)) for pair in train} & {tuple(sorted(pair)) for pair in held_out}
    assert all(int(p.answer) == sum(map(int, p.id.split("+"))) for p in task.train_prompts())
    assert [p.id for p in sums("task.largest=12", "task.seed=1")._train] != [p.id for p in task._train]
    with pytest.raises(UserError, match="has no set 'longer'"):
        task.extra_prompts("longer")
    with pytest.raises(UserError, match=r"task\.largest=1 leaves no sum"):
        sums("task.largest=1")


def test_the_prompt_is_the_template_alone_whatever_the_tokenizer_can():
    asked = next(p for p in sums().train_prompts() if p.id == "21+9")
    text = "5 + 3 = 8<|im_end|>12 + 7 = 19<|im_end|>21 + 9 ="
    assert (asked.text, asked.chat, asked.answer) == (text, None, "30")
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "user({{ messages[0].content }})"
    ids = Requests(config(), tokenizer).encode(Prompt("id", "21 + 9 =", "30", "sums"))
    assert tokenizer.decode(list(ids)) == "21 + 9 ="


def test_a_number_and_nothing_else_is_an_answer():
    prompt, unparsed = Prompt("12+30", "", "42", "sums"), Verdict(False, unparsed=True)
    given = [" 42", "42\n", " 43", " 042", "0" * 5000 + "42", "42" * 5000, "42 of", "", "-", "4 2"]
    wanted = [Verdict(passes) for passes in (True, True, False, True, True, False)] + [unparsed] * 4
    assert sums().verify_batch([(prompt, text) for text in given]) == wanted
    masked = sums("task.reward.unparsed=mask").verify_batch([(prompt, "none")])
    assert masked == [Verdict(False, unparsed=True, masked=True)]
    assert sums().verify(prompt, "42") and not sums().verify(prompt, "41")


def test_a_chat_goes_with_turns_and_prefill_and_the_template_alone_without():
    for key in ("system=Add.", "prefill=The sum is"):
        with pytest.raises(UserError, match="chat=false puts the template alone"):
            config(f"task.asking.{key}")
    assert config("task.asking.system=Add.", "task.asking.chat=true").task.kind == "sums"


def completion(text: str, finish: Literal["stop", "length"] = "stop") -> Completion:
    tokens = np.array(TOKENIZER.encode(text + "<end>", add_special_tokens=False), np.int32)
    zeros = np.zeros(len(tokens), np.float32)
    return Completion(tokens, zeros, zeros.astype(np.int32), zeros.astype(bool), finish=finish, entropy=zeros)


def test_an_evaluation_tells_learning_to_answer_from_learning_to_add():
    """Of 8 completions 4 are numbers, of which 3 are right; the truncated one is no answer, whatever it holds."""
    made = config()
    evaluator = Evaluator(made, sums(), TOKENIZER, Requests(made, TOKENIZER))
    one, two = (prompt.answer for prompt in evaluator.sets[0].prompts)
    first = [completion(one), completion("no"), completion("more of it"), completion(one, finish="length")]
    second = [completion(two), completion(two), completion("0"), completion("")]
    ((row, prompts),) = evaluator.rows(0, 0, [CompletedGroup(0, tuple(first)), CompletedGroup(1, tuple(second))])
    assert (row["pass_rate"], row["answered"], row["correct_if_answered"]) == (3 / 8, 4 / 8, 3 / 4)
    assert [p["correct"] for p in prompts] == [1, 2]
    nothing = [CompletedGroup(i, (completion("no"),) * 4) for i in range(2)]
    assert evaluator.rows(0, 0, nothing)[0][0]["correct_if_answered"] is None
