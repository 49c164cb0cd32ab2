"""The staleness bounds on a virtual clock, for engines of every speed."""

from __future__ import annotations

import random

import pytest

from scalerl.rl.sampler import PromptSampler
from scalerl.rl.schedule import PPO, Pipeline, Schedule
from scalerl.rl.types import Prompt

P, STEPS = 4, 40


class VirtualEngine:
    """Groups of `length` ticks in `slots`; remembers under which version each group got its first token."""

    def __init__(self, slots: int, length, ticks: int) -> None:
        self.slots, self.length, self.ticks = slots, length, ticks
        self.queue: list[int] = []
        self.active: dict[int, int] = {}
        self.first_version: dict[int, int] = {}
        self.done: set[int] = set()

    def tick(self, version: int) -> None:
        while self.queue and len(self.active) < self.slots:
            group = self.queue.pop(0)
            self.active[group] = self.length(group)
            self.first_version[group] = version
        for group in list(self.active):
            self.active[group] -= 1
            if self.active[group] == 0:
                del self.active[group]
                self.done.add(group)

    @property
    def idle(self) -> bool:
        return not self.queue and not self.active


def simulate(schedule: Schedule, engine: VirtualEngine, sampler: PromptSampler, rate) -> tuple[list, list[int], int]:
    """The run's main loop with every cost but the bookkeeping removed: batches, lags, dispatched groups."""
    version, batches, lags, prompts = 0, [], [], {}
    pipeline = isinstance(schedule, Pipeline)
    while not schedule.done:
        n = schedule.may_dispatch()
        for _ in range(n):
            group, epoch, prompt = sampler.next()
            prompts[group] = (epoch, prompt.id)
            engine.queue.append(group)
        schedule.dispatch(n)
        round_ = schedule.next_round()
        ticks = 0
        while not all(g in engine.done for batch in round_ for g in batch):
            engine.tick(version)
            ticks += 1
            assert ticks < 100_000, "deadlock"
        if pipeline:
            for _ in range(engine.ticks):
                if engine.idle:
                    break
                engine.tick(version)
        for batch in round_:
            batches.append([prompts[g] for g in batch])
            lags += [version - engine.first_version[g] for g in batch]
            schedule.finish_batch()
            version += 1
            for g in batch:
                sampler.record(g, rate(prompts[g][1]), 10)
    return batches, lags, schedule.dispatched


def make_sampler(k: int) -> PromptSampler:
    prompts = [Prompt(id=str(i), text="", answer="", task="t") for i in range(50)]
    return PromptSampler(prompts, seed=0, resample_positive=False, threshold=0.9, lag=(k + 1) * P)


def some_pass(prompt_id: str) -> int:
    return 10 if int(prompt_id) % 3 == 0 else 4


@pytest.mark.parametrize("k", [0, 1, 3, 8])
@pytest.mark.parametrize("slots,ticks", [(1, 1), (4, 7), (100, 3), (100, 1000)])
def test_pipeline_lag_never_exceeds_k_and_nothing_is_dropped(k, slots, ticks):
    rng = random.Random(1)
    lengths = [rng.randint(1, 20) for _ in range(STEPS * P)]
    lengths[30] *= 100  # one completion a hundred times as long as the rest
    engine = VirtualEngine(slots, lambda g: lengths[g], ticks)
    batches, lags, dispatched = simulate(Pipeline(k, P, STEPS * P), engine, make_sampler(k), some_pass)
    assert max(lags) <= k
    assert dispatched == STEPS * P == sum(len(batch) for batch in batches) == len(engine.done)


def test_a_fast_engine_uses_the_whole_bound():
    engine = VirtualEngine(1000, lambda g: 1, ticks=10)
    _, lags, _ = simulate(Pipeline(8, P, STEPS * P), engine, make_sampler(8), some_pass)
    assert max(lags) == 8


@pytest.mark.parametrize("k", [1, 2, 8])
def test_ppo_lag_is_at_most_k_minus_1(k):
    engine = VirtualEngine(3, lambda g: 1 + g % 5, ticks=5)
    batches, lags, dispatched = simulate(PPO(k, P, STEPS * P), engine, make_sampler(k), some_pass)
    assert max(lags) == k - 1
    assert dispatched == STEPS * P == sum(len(batch) for batch in batches)


@pytest.mark.parametrize("kind,k", [(Pipeline, 0), (Pipeline, 1), (Pipeline, 8), (PPO, 4)])
def test_the_sequence_of_batches_does_not_depend_on_speed(kind, k):
    speeds = [(1, 1, lambda g: 1), (7, 3, lambda g: 1 + (g * 7919) % 50), (500, 400, lambda g: 1 + g % 2)]
    sequences = [
        simulate(kind(k, P, STEPS * P), VirtualEngine(slots, length, ticks), make_sampler(k), some_pass)[0]
        for slots, ticks, length in speeds
    ]
    assert sequences[0] == sequences[1] == sequences[2]
    assert max(epoch for batch in sequences[0] for epoch, _ in batch) >= 2, "several epochs, so that prompts retire"


def test_ppo_goes_on_from_a_round_that_was_never_whole():
    """The prompts ran out in the middle of it; a resume with more steps must find that out again."""
    schedule = PPO(k=3, prompts_per_batch=4, end=400)
    schedule.dispatch(12)
    assert schedule.may_dispatch() == 0
    for _ in range(3):
        schedule.finish_batch()
    schedule.dispatch(2)
    assert schedule.may_dispatch() == 10


def test_the_last_ppo_round_may_be_short():
    schedule = PPO(k=8, prompts_per_batch=2, end=2 * 10)
    sizes = []
    while not schedule.done:
        schedule.dispatch(schedule.may_dispatch())
        sizes.append(len(schedule.next_round()))
        for _ in schedule.next_round():
            schedule.finish_batch()
    assert sizes == [8, 2]
