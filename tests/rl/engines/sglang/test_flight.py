"""A completion's way through its requests, and the checks on a server's answers."""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np
import pytest

from scalerl.rl.engines.sglang.books import Book
from scalerl.rl.engines.sglang.client import Answer, ServerFault, read_answer
from scalerl.rl.engines.sglang.flight import Flight
from scalerl.rl.engines.sglang.routing import Routing
from scalerl.rl.types import Interrupt, Request, Sampling

STOP, END_THINK = 9, 8
SAMPLING = Sampling(0.7, 12, (STOP,))
THINKING = Sampling(0.7, 12, (STOP,), interrupt=Interrupt(phrase=(7, END_THINK), end_think=END_THINK, answer_budget=3))


def answer(*tokens: int, reason: str = "length", version: int = 0, cached: int = 0) -> Answer:
    n = len(tokens)
    return Answer(
        np.array(tokens, np.int32), np.full(n, -0.5, np.float32), np.full(n, version, np.int32), reason, cached
    )


def with_experts(given: Answer, rows: int, first: int) -> Answer:
    """Numbered on from `first`, two layers of one expert."""
    return replace(given, experts=np.arange(first, first + 2 * rows, dtype=np.int32).reshape(rows, 2))


def flight(sampling: Sampling = SAMPLING, budget: int | None = None) -> Flight:
    return Flight(Request(3, (1, 2), 1, 0, None if budget is None else (budget,)), 0, sampling)


def test_a_stop_token_ends_it():
    f = flight()
    assert (f.room(), f.input_ids()) == (12, [1, 2])
    f.add(answer(4, 5, STOP, reason="stop"), 0)
    completion = f.completion()
    assert f.done and completion.finish == "stop" and not completion.interrupted
    assert completion.tokens.tolist() == [4, 5, STOP]
    assert completion.entropy is not None and completion.entropy.tolist() == [0.5, 0.5, 0.5]


def test_its_budget_truncates_it():
    f = flight()
    f.add(answer(*[4] * 12), 0)
    assert f.done and f.completion().truncated


def test_after_an_abort_it_goes_on_from_what_it_has():
    f = flight()
    f.add(answer(4, 5, reason="abort"), 0)
    assert not f.done and f.input_ids() == [1, 2, 4, 5] and f.room() == 10
    f.add(answer(6, STOP, reason="stop", version=1), 1)
    assert f.completion().versions.tolist() == [0, 0, 1, 1]


def test_a_stop_that_the_recipe_does_not_know_is_none():
    f = flight()
    f.add(answer(4, 5, reason="stop"), 0)
    assert not f.done and f.room() == 10


def test_thinking_is_interrupted_at_its_budget():
    f = flight(THINKING, budget=4)
    assert f.room() == 4
    f.add(answer(1, 2, 3, 4), 5)
    assert f.input_ids()[2:] == [1, 2, 3, 4, 7, END_THINK] and f.room() == 3
    f.add(answer(6, 6, 6, version=6), 6)
    completion = f.completion()
    assert f.done and completion.truncated and completion.interrupted
    assert completion.injected.tolist() == [False] * 4 + [True] * 2 + [False] * 3
    assert completion.logprobs[4:6].tolist() == [0, 0]
    assert completion.versions.tolist() == [0] * 4 + [5] * 2 + [6] * 3


def test_thinking_that_has_ended_is_not_interrupted():
    f = flight(THINKING, budget=4)
    f.add(answer(1, END_THINK, 3, 4), 0)
    assert f.room() == 8
    f.add(answer(STOP, reason="stop"), 0)
    assert not f.completion().interrupted and f.completion().finish == "stop"


def test_an_abort_before_the_budget_does_not_interrupt():
    f = flight(THINKING, budget=4)
    f.add(answer(1, reason="abort"), 0)
    assert f.room() == 3
    f.add(answer(2, STOP, reason="stop"), 0)
    assert not f.completion().interrupted


def test_its_requests_say_what_the_recipe_needs():
    plain = flight().body(salt=None, most_kept=50)
    assert not {"return_sampling_mask", "return_routed_experts", "extra_key"} & set(plain)
    assert limits(plain) == (1.0, -1)
    kept = flight(replace(SAMPLING, return_kept=True, top_p=0.9)).body(salt="3", most_kept=50)
    assert kept["return_sampling_mask"] and kept["extra_key"] == "3" and limits(kept) == (0.9, 50)
    assert limits(flight(replace(SAMPLING, return_kept=True, top_k=5)).body(salt=None, most_kept=50)) == (1.0, 5)


def limits(body):
    return body["sampling_params"]["top_p"], body["sampling_params"]["top_k"]


def test_kept_sets_follow_the_tokens_and_an_injected_one_has_none():
    f = flight(replace(THINKING, return_kept=True), budget=2)
    f.add(replace(answer(1, 2), kept=(np.array([1, 3]), np.array([2]))), 0)
    f.add(replace(answer(STOP, reason="stop"), kept=(np.array([4, STOP]),)), 0)
    kept = f.completion().kept
    assert kept is not None and [ids.tolist() for ids in kept] == [[1, 3], [2], [], [], [4, STOP]]
    plain = flight()
    plain.add(answer(STOP, reason="stop"), 0)
    assert plain.completion().kept is None and plain.completion().experts is None


def test_experts_are_those_of_the_request_that_sampled_the_next_token():
    """Two layers, of which the second has a router. A prompt of 2 tokens and 3 sampled: 4 were fed."""
    f = Flight(Request(3, (1, 2), 1, 0), 0, replace(SAMPLING, return_experts=True), Routing(2, (1,), 1))
    assert f.body(salt=None)["routed_experts_start_len"] == 0
    f.add(with_experts(answer(4, 5, 6, reason="abort"), rows=4, first=0), 0)
    assert f.body(salt=None)["routed_experts_start_len"] == 4  # the third token is fed now
    f.add(answer(reason="abort"), 0)
    assert f.body(salt=None)["routed_experts_start_len"] == 4
    f.add(with_experts(answer(7, STOP, reason="stop"), rows=2, first=100), 0)
    experts = f.completion().experts
    assert experts is not None and experts.tolist() == [[[1]], [[3]], [[5]], [[7]], [[101]], [[103]]]


def test_a_book_gives_out_the_oldest_group_and_completes_each_once():
    book = Book(SAMPLING)
    book.submit([Request(1, (1, 2, 3), 2, 0), Request(0, (1,), 1, 0)])
    flights = [book.next() for _ in range(3)]
    assert [f.order for f in flights if f is not None] == [(0, 0), (1, 0), (1, 1)]
    assert book.next() is None
    for f in flights:
        assert f is not None
        book.take_in(f, answer(4, 5, STOP, reason="stop", cached=1 if f.request.group else 0), 0)
    assert [g.group for g in book.take()] == [0, 1] and book.take() == [] and not book.requests
    # group 0: a prompt of 1 token, then 2 decoded with contexts 2 and 3; group 1, twice: 2 of 3 prompt tokens with
    # contexts 2 and 3, then 2 decoded with contexts 4 and 5
    work = book.work
    assert (work.prefill_tokens, work.prefill_context) == (1 + 2 * 2, 1 + 2 * 5)
    assert (work.decode_tokens, work.decode_context) == (2 + 2 * 2, 5 + 2 * 9)
    assert work.generated_tokens == 3 * 3


def test_a_book_counts_an_injected_phrase_among_the_generated_tokens():
    book = Book(THINKING)
    book.submit([Request(0, (1, 2), 1, 0, thinking_budgets=(4,))])
    for said in (answer(1, 2, 3, 4), answer(6, STOP, reason="stop")):
        next_flight = book.next()
        assert next_flight is not None
        book.take_in(next_flight, said, 0)
    ((completion,),) = [group.completions for group in book.take()]
    assert book.work.generated_tokens == len(completion.tokens) == 4 + 2 + 2


def test_a_group_number_is_unfinished_once():
    book = Book(SAMPLING)
    book.submit([Request(1, (1,), 1, 0)])
    with pytest.raises(ValueError, match="group 1 is already unfinished"):
        book.submit([Request(1, (1,), 1, 0)])


def served(**changed):
    meta = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5, 4, None], [-1.5, 5, None]],
        "weight_version": "3",
        "weight_versions": [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 2}],
        "cached_tokens": None,
    }
    return {"output_ids": [4, 5], "meta_info": meta | changed}


KEPT = {"output_token_sampling_mask": [[4, 6], [5]], "output_token_sampling_logprobs": [-0.25, 0.0]}
ROUTED = {"routed_experts": base64.b64encode(np.arange(12, dtype=np.int32).tobytes()).decode()}
ASKED = {"input_ids": [1, 2], "return_sampling_mask": True}
ASKED |= {"return_routed_experts": True, "routed_experts_start_len": 1}


def test_kept_sets_and_experts_are_read():
    """Of [1, 2, 4, 5] the tokens 2 and 4 were fed since position 1, through 6 experts each."""
    found = read_answer(served(**KEPT, **ROUTED), "here", ASKED)
    assert found.kept is not None and [ids.tolist() for ids in found.kept] == [[4, 6], [5]]
    assert found.logprobs.tolist() == [-0.25, 0.0]  # of the kept sets' distributions
    assert found.experts is not None and found.experts.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"output_token_sampling_mask": None}, "0 kept sets and 2 log-probabilities for 2 tokens"),
        ({"output_token_sampling_mask": [[4], [6]]}, "a token is not in its kept set"),
        ({"output_token_sampling_logprobs": [float("-inf"), 0.0]}, "not finite"),
        ({"routed_experts": None}, "0 numbers of experts for 2 tokens"),
        ({"routed_experts": "AAAA"}, "no completion"),
        ({"routed_experts": base64.b64encode(bytes(12)).decode()}, "3 numbers of experts for 2 tokens"),
    ],
)
def test_what_was_asked_for_and_is_wrong_is_the_servers_fault(changed, reason):
    with pytest.raises(ServerFault, match=reason):
        read_answer(served(**(KEPT | ROUTED | changed)), "here", ASKED)


def test_an_answer_is_read():
    found = read_answer(served(), "here", {})
    assert found.tokens.tolist() == [4, 5] and found.versions.tolist() == [2, 3]
    assert found.logprobs.tolist() == [-0.5, -1.5] and (found.reason, found.cached) == ("stop", 0)
    assert read_answer(served(weight_versions=None), "here", {}).versions.tolist() == [3, 3]


@pytest.mark.parametrize(
    "garbage",
    [
        None,
        "nonsense",
        [],
        {"output_ids": [4]},
        served(output_token_logprobs=[[-0.5, 4, None]]),
        served(output_token_logprobs=[[-0.5, 4, None], [-1.5, 6, None]]),
        served(output_token_logprobs=[[-0.5, 4, None], [float("nan"), 5, None]]),
        served(weight_versions=[{"version": "2", "start": 0, "end": 1}]),
        served(weight_versions=[{"version": "2", "start": 1, "end": 2}]),
        served(weight_versions=[{"version": "default", "start": 0, "end": 2}]),
    ],
)
def test_garbage_is_the_servers_fault(garbage):
    with pytest.raises(ServerFault, match=r"^here answers something that is no completion"):
        read_answer(garbage, "here", {})
