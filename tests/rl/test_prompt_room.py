"""Prompts that leave no room for a completion."""

from __future__ import annotations

import json

import pytest
from transformers import LlamaConfig

from scalerl.cli.compose import compose
from scalerl.rl.engines.base import NO_LIMIT, ContextLimit
from scalerl.rl.errors import UserError
from scalerl.rl.models.tokenizer import character_tokenizer
from scalerl.rl.prompt_room import PromptRoom, _limit
from scalerl.rl.requests import Requests
from scalerl.rl.run import start_run
from scalerl.rl.tasks import fingerprint
from scalerl.rl.types import Chat, Prompt

REQUESTS = Requests(compose([]).config, character_tokenizer())


def room(tokens: int, completion: int = 4) -> PromptRoom:
    return PromptRoom(ContextLimit(tokens, "max_position_embeddings"), completion, REQUESTS)


def prompts(*lengths: int, chat: Chat | None = None) -> list[Prompt]:
    return [Prompt(str(i), "1" * n, "", "t", chat) for i, n in enumerate(lengths)]


def test_what_just_fits_stays_and_the_rest_is_told(capsys):
    given = prompts(6, 7, 5, 9)
    kept = room(10).keep("training", given)
    assert list(kept) == [given[0], given[2]] and list(kept[1:]) == [given[2]]
    said = capsys.readouterr().err
    assert said.startswith("2 of 4 training prompts left out, which have more than 6 tokens (max_position_embeddings=")
    assert "the first, '1111111', has 7" in said
    assert room(13).keep("training", given) is given and not capsys.readouterr().err


def test_what_is_put_around_a_prompt_counts():
    """Of a tokenizer without a chat template: the system's words, two line breaks and what the completion goes on
    from."""
    chat = Chat("12", "<think>")
    whole = len(REQUESTS.encode(prompts(3, chat=chat)[0]))
    assert whole > 3 + 2
    given = prompts(3, 4, chat=chat)
    assert list(room(whole + 1, 1).keep("training", given)) == given[:1]


def test_a_set_that_has_none_left_is_refused():
    with pytest.raises(UserError, match=r"all 2 longer prompts have more than 6 tokens .* lower the budget or give"):
        room(10).keep("longer", prompts(7, 8))


def test_a_budget_that_no_prompt_fits_beside_is_the_models_matter():
    with pytest.raises(UserError, match="exceed the model's max_position_embeddings=4"):
        room(4)


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        ([], 128),
        (["engine=sglang"], 128),
        (["engine=sglang", "engine.arguments=[--context-length,'256']"], NO_LIMIT.tokens),
        (["engine=sglang", "engine.urls=[http://node:30000]"], NO_LIMIT.tokens),
    ],
)
def test_servers_that_may_have_another_context_judge_by_themselves(llama_folder, overrides, limit):
    config = compose(["model=hf", f"model.path={llama_folder}", "recipe.length_control=none", *overrides]).config
    config = config.model_copy(update={"recipe": config.recipe.model_copy(update={"generation_budget": 100})})
    made = PromptRoom.of_run(config, llama_folder, REQUESTS)
    assert len(made.keep("training", prompts(28, 29))) == (1 if limit == 128 else 2)


def test_stretched_positions_are_the_servers_matter():
    config = compose(["model=hf", "model.path=m", "engine=sglang"]).config
    model = LlamaConfig(
        max_position_embeddings=32, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    )
    assert _limit(config.engine, model) == NO_LIMIT
    assert _limit(config.engine, LlamaConfig(max_position_embeddings=32)).tokens == 32


def test_the_state_of_other_kept_prompts_is_told_apart():
    given = prompts(6, 7, 5, 9)
    assert len({fingerprint(room(n).keep("training", given)) for n in (10, 11, 13)}) == 3


def test_a_run_leaves_them_out_of_training_and_evaluation(tmp_path, llama_folder, capsys):
    rows = [{"problem": "1" * n, "answer": "7"} for n in (*range(1, 20), 90, 100)]
    for name, chosen in (("train", rows[::2]), ("held_out", rows[1::2])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    composed = compose(
        [
            "model=hf",
            f"model.path={llama_folder}",
            "task=math",
            *[f"task.data.{name}={tmp_path / name}.jsonl" for name in ("train", "held_out")],
            "task.asking.template='{prompt}'",
            "task.asking.chat=false",
            "recipe.length_control=none",
            "recipe.generation_budget=40",
            "recipe.zero_variance=keep",
            "recipe.prompts_per_batch=4",
            "recipe.group_size=2",
            "recipe.k=1",
            "steps=6",
            "eval.every=3",
            "eval.n_prompts=9",
            "eval.n_samples=1",
            "eval.extra=[]",
        ],
        run_dir=str(tmp_path / "run"),
    )
    start_run(composed.config, {})
    assert len((tmp_path / "run" / "eval.jsonl").read_text().splitlines()) == 3
    said = capsys.readouterr().err
    assert "1 of 11 training prompts left out" in said and "1 of 10 held_out prompts left out" in said
