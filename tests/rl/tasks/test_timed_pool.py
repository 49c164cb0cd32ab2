"""Calls that hang, die or raise cost their time limit at most and never a wrong result."""

from __future__ import annotations

import os
import signal
import time

import pytest

from scalerl.rl.tasks.timed_pool import Failed, TimedPool

# What the processes call is found by name, which a test module is not: so the standard library's functions serve.
LIMIT = 5.0


@pytest.fixture
def sleeper():
    pool = TimedPool(time.sleep, workers=1, seconds=LIMIT)
    yield pool
    pool.close()


def test_an_endless_call_costs_its_limit_and_the_next_is_on_time(sleeper):
    assert sleeper.map([(0.0,)]) == [None], "the process is up"
    start = time.monotonic()
    late, on_time = sleeper.map([(1e6,), (0.01,)])
    assert late == Failed(f"no answer within {LIMIT} s")
    assert on_time is None
    assert time.monotonic() - start >= LIMIT


def test_results_are_in_order_whatever_takes_long():
    pool = TimedPool(divmod, workers=2, seconds=LIMIT)
    assert pool.map([(n, 7) for n in range(50)]) == [divmod(n, 7) for n in range(50)]
    assert pool.map([(1, 0), (8, 7)]) == [Failed("ZeroDivisionError: integer division or modulo by zero"), (1, 1)]
    assert pool.map([]) == []
    pool.close()


def test_a_process_that_dies_is_a_failure_and_replaced():
    pool = TimedPool(os._exit, workers=1, seconds=LIMIT)
    assert pool.map([(3,), (4,)]) == [Failed("the process died")] * 2
    pool.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_process_that_died_between_two_calls_is_replaced_and_no_call_fails(workers):
    pool = TimedPool(divmod, workers=workers, seconds=LIMIT)
    pool.map([(n, 7) for n in range(4)])
    dead = next(worker for worker in pool._workers if worker.ready).process  # the other may still be starting
    os.kill(dead.pid, signal.SIGKILL)
    dead.join()
    assert pool.map([(n, 7) for n in range(4)]) == [divmod(n, 7) for n in range(4)]
    pool.close()


def test_a_call_that_eats_memory_fails_and_the_next_works():
    pool = TimedPool(bytes, workers=1, seconds=LIMIT)
    failed, fine = pool.map([(1 << 40,), (3,)])
    assert failed == Failed("MemoryError: ") and fine == b"\0\0\0"
    pool.close()
