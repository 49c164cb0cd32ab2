"""Groups that were handed out: what of them is still in progress, and what is complete."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from scalerl.rl.engines.sglang.client import Answer
from scalerl.rl.engines.sglang.flight import Flight
from scalerl.rl.engines.sglang.routing import Routing
from scalerl.rl.engines.torch_engine import Work
from scalerl.rl.types import CompletedGroup, Completion, Request, Sampling


class Book:
    """Groups by number. A flight is always in exactly one place: waiting here, or with the server that works on it."""

    def __init__(self, sampling: Sampling, routing: Routing | None = None) -> None:
        self.work = Work()
        self.requests: dict[int, Request] = {}  # unfinished
        self.complete: list[CompletedGroup] = []  # and not yet taken
        self._sampling, self._routing = sampling, routing
        self._landed: dict[int, list[Completion | None]] = {}
        self._waiting: list[tuple[tuple[int, int], Flight]] = []  # a heap, oldest group first

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.group in self.requests:
                raise ValueError(f"group {request.group} is already unfinished in this engine")
            self.requests[request.group] = request
            self._landed[request.group] = [None] * request.n
            for sample in range(request.n):
                self.put_back(Flight(request, sample, self._sampling, self._routing))

    def put_back(self, flight: Flight) -> None:
        """It waits for a server, at its group's place."""
        heapq.heappush(self._waiting, (flight.order, flight))

    def next(self) -> Flight | None:
        return heapq.heappop(self._waiting)[1] if self._waiting else None

    def take_in(self, flight: Flight, answer: Answer, version: int) -> None:
        """What a server answered: the flight has landed, or waits for another request."""
        before = len(flight.input_ids())
        self._count(before, answer)
        flight.add(answer, version)
        self.work.generated_tokens += len(flight.input_ids()) - before
        if not flight.done:
            self.put_back(flight)
            return
        group = flight.request.group
        landed = self._landed[group]
        landed[flight.sample] = flight.completion()
        if all(completion is not None for completion in landed):
            self.complete.append(CompletedGroup(group, tuple(c for c in landed if c is not None)))
            del self._landed[group], self.requests[group]

    def take(self) -> list[CompletedGroup]:
        """The groups that became complete since the last call, by number."""
        groups, self.complete = sorted(self.complete, key=lambda group: group.group), []
        return groups

    def missing(self, groups: Sequence[int]) -> bool:
        return any(group in self.requests for group in groups)

    def _count(self, prompt: int, answer: Answer) -> None:
        """The request's forward passes: its prompt but for what the server had cached, then all its tokens but the
        last."""
        n, work = len(answer.tokens), self.work
        if not n:
            return  # it was given up while it waited at the server
        work.prefill_tokens += prompt - answer.cached
        work.prefill_context += _sum_to(prompt) - _sum_to(answer.cached)
        work.decode_tokens += n - 1
        work.decode_context += _sum_to(prompt + n - 1) - _sum_to(prompt)


def _sum_to(n: int) -> int:
    return n * (n + 1) // 2
