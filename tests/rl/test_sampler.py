"""Epochs, and prompts that are left out for good."""

from __future__ import annotations

import pytest

from scalerl.rl.errors import RunEnded, UserError
from scalerl.rl.sampler import MixtureSampler, PromptSampler
from scalerl.rl.types import Prompt


def make(n: int = 6, *, lag: int = 0, resample_positive: bool = False) -> PromptSampler:
    prompts = [Prompt(id=f"p{i}", text="", answer="", task="t") for i in range(n)]
    return PromptSampler(prompts, seed=3, resample_positive=resample_positive, threshold=0.9, lag=lag)


def epoch_of(sampler: PromptSampler, n: int) -> list[str]:
    return [sampler.next()[2].id for _ in range(n)]


def test_an_epoch_is_a_permutation_and_epochs_differ():
    sampler = make()
    first, second = epoch_of(sampler, 6), epoch_of(sampler, 6)
    assert sorted(first) == sorted(second) == [f"p{i}" for i in range(6)]
    assert first != second


def test_a_prompt_at_the_threshold_is_left_out_from_the_next_epoch_on_for_good():
    sampler = make()
    for group, prompt in enumerate(epoch_of(sampler, 6)):
        sampler.record(group, 9 if prompt == "p2" else 8, 10)
    assert sorted(epoch_of(sampler, 5)) == ["p0", "p1", "p3", "p4", "p5"]
    for group in range(6, 11):
        sampler.record(group, 0, 10)
    assert "p2" not in epoch_of(sampler, 5)
    assert sampler.n_retired == 1


def test_a_rate_that_is_the_threshold_reaches_it():
    prompts = [Prompt(id=f"p{i}", text="", answer="", task="t") for i in range(3)]
    sampler = PromptSampler(prompts, seed=3, resample_positive=False, threshold=0.55, lag=0)
    assert 0.55 * 100 > 55
    for group, prompt in enumerate(epoch_of(sampler, 3)):
        sampler.record(group, 55 if prompt == "p0" else 54, 100)
    assert sorted(epoch_of(sampler, 2)) == ["p1", "p2"]


def test_the_rate_is_that_of_all_completions_so_far():
    sampler = make(1)
    sampler.next()
    sampler.record(0, 4, 10)
    sampler.next()
    sampler.record(1, 10, 10)  # 14 of 20
    assert sampler.next()[2].id == "p0"


def test_results_within_the_lag_are_not_used_yet():
    sampler = make(2, lag=2)
    for group in range(len(epoch_of(sampler, 2))):
        sampler.record(group, 10, 10)
    # Group 2 begins the epoch: of groups 0 and 1 it may know group 0 only.
    assert len(set(epoch_of(sampler, 1))) == 1
    assert sampler.n_retired == 1


def test_resampling_keeps_every_prompt():
    sampler = make(resample_positive=True)
    for group in range(len(epoch_of(sampler, 6))):
        sampler.record(group, 10, 10)
    assert len(set(epoch_of(sampler, 6))) == 6


def test_an_empty_pool_ends_the_run_with_the_reason():
    sampler = make(2)
    for group in range(len(epoch_of(sampler, 2))):
        sampler.record(group, 10, 10)
    with pytest.raises(RunEnded, match=r"all 2 training prompts have a pass rate of at least 0\.9"):
        sampler.next()


def test_a_prompt_without_a_verdict_is_not_left_out():
    sampler = make(1)
    sampler.next()
    sampler.record(0, 0, 0)
    assert sampler.next()[2].id == "p0"


def test_state_goes_on_where_it_was():
    one, two = make(lag=3), make(lag=3)
    for group in range(len(epoch_of(one, 4))):
        one.record(group, 10, 10)
    two.load_state_dict(one.state_dict())
    assert epoch_of(one, 9) == epoch_of(two, 9)


def test_a_state_of_other_prompts_is_refused():
    one = make(6)
    one.next()
    with pytest.raises(UserError, match="the training prompts are not those of the checkpoint"):
        make(7).load_state_dict(one.state_dict())


def mixed(**pools: int) -> MixtureSampler:
    samplers = {
        name: PromptSampler(
            [Prompt(f"{name}{i}", "", "", name) for i in range(n)],
            seed=3,
            resample_positive=False,
            threshold=0.9,
            lag=0,
        )
        for name, n in pools.items()
    }
    return MixtureSampler(samplers, {"a": 3.0, "b": 1.0}, seed=7)


def test_a_mixture_draws_by_weight_and_each_task_has_its_epochs():
    sampler = mixed(a=30, b=30)
    drawn = [sampler.next() for _ in range(4000)]
    assert [group for group, _, _ in drawn] == list(range(4000))
    assert sum(p.task == "a" for _, _, p in drawn) / 4000 == pytest.approx(0.75, abs=0.03)
    ids = [p.id for _, _, p in drawn if p.task == "b"]
    assert sorted(ids[:30]) == sorted(ids[30:60]) == sorted(f"b{i}" for i in range(30))
    assert {epoch for _, epoch, p in drawn[:60] if p.task == "b"} == {0}


def test_a_task_whose_prompts_have_all_been_left_out_drops_out():
    sampler = mixed(a=2, b=2)
    solved = set()
    with pytest.raises(RunEnded):
        while True:
            group, _, prompt = sampler.next()
            solved.add(prompt.id)
            sampler.record(group, 10 if prompt.task == "a" or group > 100 else 0, 10)
    assert sampler.n_retired == 4 and solved == {"a0", "a1", "b0", "b1"}


def test_a_mixtures_state_goes_on_where_it_was():
    one, two = mixed(a=3, b=5), mixed(a=3, b=5)
    for _ in range(20):
        one.record(one.next()[0], 1, 2)
    one.next()
    two.load_state_dict(one.state_dict())
    one.record(20, 1, 2)
    two.record(20, 1, 2)
    assert [one.next() for _ in range(50)] == [two.next() for _ in range(50)]
