"""A function called in processes that are killed when it takes too long: for verifiers that hang."""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

_MEMORY = 4 << 30  # address space of a worker
_START = 120.0  # seconds a worker may take to come up


@dataclass(frozen=True)
class Failed:
    """A call without a result, and why."""

    reason: str


@dataclass
class _Worker:
    process: Any
    connection: Connection
    ready: bool = False
    deadline: float = field(default_factory=lambda: time.monotonic() + _START)
    item: int | None = None  # in its hands


class TimedPool:
    """Calls `function(*arguments)` in `workers` processes, each call for `seconds` at most.

    A process that exceeds it is killed and replaced, so the next call waits for no more than a fork: the processes come
    from a fork server that has imported `preload`, for the first pool of a program. They start with the first call."""

    def __init__(
        self, function: Callable[..., Any], *, workers: int, seconds: float, preload: Sequence[str] = ()
    ) -> None:
        self._function, self._n, self._seconds = function, workers, seconds
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([function.__module__, *preload])
        self._workers: list[_Worker] = []

    def map(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The result of each call, or why it `Failed`, in order."""
        results: list[Any] = [None] * len(calls)
        waiting = deque(range(len(calls)))
        while waiting or any(worker.item is not None for worker in self._workers):
            self._refill(min(self._n, len(calls)))
            for worker in list(self._workers):
                if waiting and worker.ready and worker.item is None:
                    worker.item, worker.deadline = waiting.popleft(), time.monotonic() + self._seconds
                    try:
                        worker.connection.send(calls[worker.item])
                    except OSError:  # it has died since its last call, which is no fault of this one
                        waiting.appendleft(worker.item)
                        _end(worker)
                        self._workers.remove(worker)
            busy = [worker for worker in self._workers if worker.item is not None or not worker.ready]
            # None is busy where all had died: then there is nothing to wait for.
            patience = min((worker.deadline for worker in busy), default=0.0) - time.monotonic()
            ready = wait([worker.connection for worker in busy], max(0.0, patience))
            for worker in busy:
                self._attend(worker, worker.connection in ready, results)
        return results

    def close(self) -> None:
        for worker in self._workers:
            _end(worker)
        self._workers = []

    def _attend(self, worker: _Worker, has_spoken: bool, results: list[Any]) -> None:
        """Takes what a busy worker has sent; ends it when it has died or is late."""
        if has_spoken:
            try:
                message = worker.connection.recv()
            except (EOFError, OSError):
                self._give_up(worker, results, "the process died")
                return
            if worker.item is None:
                worker.ready = True
            else:
                results[worker.item], worker.item = message, None
        elif time.monotonic() >= worker.deadline:
            self._give_up(worker, results, f"no answer within {self._seconds} s")

    def _give_up(self, worker: _Worker, results: list[Any], reason: str) -> None:
        _end(worker)
        self._workers.remove(worker)
        if worker.item is None:
            raise RuntimeError(f"a process for {self._function.__qualname__} did not start: {reason}")
        results[worker.item] = Failed(reason)

    def _refill(self, n: int) -> None:
        while len(self._workers) < n:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, self._function), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))


def _end(worker: _Worker) -> None:
    worker.connection.close()
    worker.process.kill()
    worker.process.join()
    worker.process.close()


def _serve(connection: Connection, function: Callable[..., Any]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    try:
        connection.send(None)  # ready
        while True:
            arguments = connection.recv()
            try:
                result = function(*arguments)
            except Exception as error:
                result = Failed(f"{type(error).__name__}: {error}")
            connection.send(result)
    except (EOFError, OSError, KeyboardInterrupt):
        return  # the parent has gone
