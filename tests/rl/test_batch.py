"""From scored groups to rows: masks, survivors, global counts and the step's statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scalerl.rl.batch import assemble, tokens_of


@pytest.fixture
def groups(make_completion, make_group):
    """Five prompts: mixed with an injected phrase; all right; all wrong; mixed once the truncated one is masked or
    scored; and one with nothing but a verifier's failure."""
    c = make_completion
    return [
        make_group([c(4), c(6, injected=(2, 3), interrupted=True, seed=1), c(2, seed=2)], [True, False, True], group=0),
        make_group([c(3), c(3, seed=1)], [True, True], group=1),
        make_group([c(5), c(2, seed=1)], [False, False], group=2, task="hard"),
        make_group([c(7, truncated=True), c(3, seed=1), c(4, seed=2)], [False, True, None], group=3, task="hard"),
        make_group([c(3)], [None], group=4),
    ]


def test_drop_leaves_only_prompts_whose_unmasked_rewards_differ(groups, make_recipe):
    """Prompt 3 has one unmasked completion under `mask`, so it goes too."""
    batch = assemble(groups, make_recipe())
    assert [row.order for row in batch.rows] == [0, 1, 2]
    assert [row.mask.tolist() for row in batch.rows] == [[1] * 4, [1, 1, 0, 0, 1, 1], [1, 1]]
    # A = (2/3, -4/3, 2/3), std sqrt(8)/3 over the three; ten unmasked tokens of one prompt
    assert [row.advantage for row in batch.rows] == pytest.approx([0.5**0.5, -(2**0.5), 0.5**0.5])
    assert [row.weight for row in batch.rows] == pytest.approx([0.1] * 3)
    assert {k: batch.stats[k] for k in ("effective_prompts", "trained_completions", "trained_completion_tokens")} == {
        "effective_prompts": 1,
        "trained_completions": 3,
        "trained_completion_tokens": 10,
    }


def test_keep_leaves_them_in_the_std_and_in_every_denominator(groups, make_recipe):
    batch = assemble(groups, make_recipe(zero_variance="keep"))
    assert [row.order for row in batch.rows] == [0, 1, 2, 3, 4, 5, 6, 8]
    std = np.sqrt((24 / 9) / 8)
    assert [row.advantage for row in batch.rows] == pytest.approx([2 / 3 / std, -4 / 3 / std, 2 / 3 / std] + [0] * 5)
    assert batch.stats["effective_prompts"] == 4
    # prompts of 10, 6, 7 and 3 unmasked tokens
    assert [row.weight for row in batch.rows] == pytest.approx(
        [1 / 40] * 3 + [1 / 24] * 2 + [1 / 28] * 2 + [1 / 12], rel=1e-12
    )


def test_scored_truncation_trains_its_tokens_at_reward_minus_one(groups, make_recipe):
    batch = assemble(groups, make_recipe(truncation="score", advantage_norm="none"))
    rows = {row.order: row for row in batch.rows}
    assert sorted(rows) == [0, 1, 2, 7, 8], "the failed verifier's completion stays out"
    assert rows[7].mask.all() and (rows[7].advantage, rows[8].advantage) == (-1, 1)


def test_the_penalty_takes_part_in_the_zero_variance_test(groups, make_recipe):
    """Both completions of prompt 1 are right; one of 3 tokens less than another is what tells them apart."""
    recipe = make_recipe(length_control="penalty", penalty={"max_length": 6, "cache_length": 4}, advantage_norm="none")
    assert not {3, 4} & {row.order for row in assemble(groups, recipe).rows}
    longer = groups[1].completions[0]
    shorter = groups[0].completions[2]
    group = type(groups[1])(**{**vars(groups[1]), "completions": (longer, shorter)})
    rows = assemble([group], recipe).rows  # rewards 1 + (6-3)/4 - 1 = 0.75 and 1
    assert [row.advantage for row in rows] == pytest.approx([-0.125, 0.125])


def test_statistics(groups, make_recipe):
    stats = assemble(groups, make_recipe()).stats
    assert stats["pass_rate"] == pytest.approx(5 / 9)  # 11 completions, two not judged, the truncated one not correct
    assert stats["reward_mean"] == pytest.approx(2 / 8)  # eight unmasked, five right
    assert stats["zero_variance_share"] == 3 / 4  # of the prompts with an unmasked token
    assert (stats["all_correct_share"], stats["all_wrong_share"]) == (1 / 4, 1 / 4)
    assert stats["truncation_rate"] == stats["interruption_rate"] == pytest.approx(1 / 11)
    assert stats["mean_length"] == pytest.approx(42 / 11)
    assert stats["verifier_errors"] == 2
    assert stats["entropy"] is None


def test_a_failed_verifier_is_no_wrong_answer(make_completion, make_group, make_recipe):
    group = make_group([make_completion(3), make_completion(3, seed=1)], [True, None])
    stats = assemble([group], make_recipe()).stats
    assert (stats["pass_rate"], stats["all_correct_share"], stats["all_wrong_share"]) == (1, 1, 0)


def test_nothing_survives(groups, make_recipe):
    batch = assemble(groups[1:3], make_recipe())
    assert batch.empty and batch.rows == []
    assert batch.stats["effective_prompts"] == 0
    masked = assemble(groups[4:], make_recipe())
    assert masked.empty
    assert masked.stats["pass_rate"] is masked.stats["reward_mean"] is masked.stats["zero_variance_share"] is None


def test_beta_is_the_tasks_own_where_it_has_one(groups, make_recipe):
    recipe = make_recipe(zero_variance="keep", kl_params={"beta": 0.1, "beta_by_task": {"hard": 0.7}})
    assert {row.prompt_ids[1] - 2: row.kl_beta for row in assemble(groups[:3], recipe).rows} == {0: 0.1, 1: 0.1, 2: 0.7}


def test_tokens_are_the_rows_in_order(groups, make_recipe):
    rows = assemble(groups, make_recipe()).rows[1:]
    tokens = tokens_of(rows, trainer_ratio=False, device=torch.device("cpu"), dtype=torch.float64)
    assert tokens.completion.tolist() == [0] * 6 + [1] * 2
    assert tokens.n_completions == 2
    assert tokens.mask.tolist() == [True, True, False, False] + [True] * 4
    assert tokens.weight.tolist() == pytest.approx([0.1, 0.1, 0, 0] + [0.1] * 4)
    assert tokens.advantage.tolist() == [rows[0].advantage] * 6 + [rows[1].advantage] * 2
    assert tokens.logp_gen.tolist() == [*rows[0].completion.logprobs.tolist(), *rows[1].completion.logprobs.tolist()]


def test_no_rows_give_no_tokens():
    tokens = tokens_of([], trainer_ratio=True, device=torch.device("cpu"), dtype=torch.float64)
    assert tokens.n_completions == 0
    assert len(tokens.mask) == len(tokens.logp_gen) == len(tokens.completion) == 0
    assert (tokens.mask.dtype, tokens.completion.dtype) == (torch.bool, torch.int64)
