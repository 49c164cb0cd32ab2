"""A prompt computed once for all of its completions: what whole sequences give, to rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from scalerl.cli.compose import compose
from scalerl.rl.batch import Row, assemble
from scalerl.rl.errors import UserError
from scalerl.rl.micro_batches import balance, micro_batch
from scalerl.rl.shared_prompts import fill, pieces, require_shared_prompts

from .test_packing import CPU, build, scores

KINDS = ["llama", "qwen3", "sliding", "moe"]


@pytest.fixture
def rows(make_completion: Callable[..., Any], make_group: Callable[..., Any], make_recipe: Callable[..., Any]):
    """Completions of 1 to 17 tokens behind prompts of 2, 7 and 1 tokens."""
    found: list[Row] = []
    for number, (prompt, lengths) in enumerate(
        {(3, 5): (4, 17, 1), (2, 9, 8, 7, 3, 4, 5): (6, 2, 6), (1,): (9, 3)}.items()
    ):
        completions = [make_completion(n, seed=10 * number + n) for n in lengths]
        group = make_group(completions, [True, *[False] * (len(lengths) - 1)], group=number)
        made = assemble([replace(group, prompt_ids=prompt)], make_recipe()).rows
        found += [replace(row, order=len(found) + i) for i, row in enumerate(made)]
    return found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_shared_prompts_equal_whole_sequences(kind: str, attention: str, rows: list[Row], make_recipe: Any) -> None:
    """Log-probabilities and gradients, the window of `sliding` (4 tokens) reaching from completions into prompts."""
    model, recipe = build(kind, attention), make_recipe()
    (lines,) = balance(rows, 1, 10_000, "shared")[0]
    shared = micro_batch(lines, recipe, CPU, "shared")
    assert shared.prompts is not None
    assert shared.prompts.ids.shape == (3, 7) and shared.input_ids.shape == (8, 16)
    found, gradient = scores(model, shared, recipe)
    expected, wanted = scores(model, micro_batch([[row] for row in rows], recipe, CPU, "padded"), recipe)
    assert found.keys() == expected.keys() == set(range(8))
    for order, logp in expected.items():
        torch.testing.assert_close(found[order], logp, rtol=0, atol=2e-6)
    for name, value in wanted.items():
        assert (gradient[name] - value).norm() <= 2e-6 * max(1.0, float(value.norm())), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_sees_its_own_prompt_and_no_other_completion(kind: str, rows: list[Row], make_recipe: Any) -> None:
    """One prompt or one completion gets other tokens: what depends on it changes, and nothing else (but for
    rounding: products over experts are as large as the tokens that they get)."""
    model, recipe = build(kind), make_recipe()
    micro = micro_batch([[row] for row in rows], recipe, CPU, "shared")
    assert micro.prompts is not None
    before, _ = scores(model, micro, recipe)
    ids = micro.prompts.ids.clone()
    ids[1] = (ids[1] + 3) % 12
    after, _ = scores(model, replace(micro, prompts=replace(micro.prompts, ids=ids)), recipe)
    assert differing(before, after) == {row.order for row in rows if len(row.prompt_ids) == 7}
    fed = micro.input_ids.clone()
    fed[3] = (fed[3] + 3) % 12
    after, _ = scores(model, replace(micro, input_ids=fed), recipe)
    assert differing(before, after) == {micro.rows[3].order}


def differing(before: dict[int, torch.Tensor], after: dict[int, torch.Tensor]) -> set[int]:
    return {order for order in before if (before[order] - after[order]).abs().max() > 1e-4}


def test_pieces_and_micro_batches_are_within_the_budget(rows: list[Row]) -> None:
    """By hand: behind a prompt of 2 the completions of 17 and 4 are too many for 30 tokens; those of 6, 6 and 2 behind
    one of 7 are not, and fit with those of 9 and 3 into 60: 5 * 9 + 2 * 7."""

    def lengths(groups: Iterable[Iterable[Row]]) -> list[list[int]]:
        return [[len(row.completion.tokens) for row in group] for group in groups]

    assert lengths(pieces(rows, 30)) == [[17], [4, 1], [6, 6, 2], [9, 3]]
    for budget, expected in ((30, [[17], [9, 3], [6, 6, 2], [4, 1]]), (60, [[17, 4, 1], [9, 3, 6, 6, 2]])):
        made = fill(pieces(rows, budget), budget)
        assert lengths([row for (row,) in lines] for lines in made) == expected


def test_ranks_without_rows_go_through_both_passes(make_recipe: Any) -> None:
    model, recipe = build("llama"), make_recipe()
    empty = micro_batch([], recipe, CPU, "shared")
    found, gradient = scores(model, empty, recipe)
    assert not found and all(not value.any() for value in gradient.values())


@pytest.mark.parametrize("kind", KINDS)
def test_models_that_can(kind: str) -> None:
    require_shared_prompts(build(kind))


def test_a_recurrent_model_is_refused() -> None:
    config = MambaConfig(vocab_size=12, hidden_size=16, state_size=4, num_hidden_layers=1, initializer_range=0.3)
    with pytest.raises(UserError, match=r"trainer\.layout=shared, but mamba can't go on from .*layout=padded"):
        require_shared_prompts(MambaForCausalLM(config).eval())


@pytest.mark.parametrize("other", ["trainer.activation_checkpointing=true", "recipe.router_replay=r3"])
def test_what_it_does_not_go_with(other: str) -> None:
    with pytest.raises(UserError, match=rf"trainer\.layout=shared with {other}"):
        compose(["trainer.layout=shared", other], run_dir="unused")
