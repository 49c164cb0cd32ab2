"""The generation side of a run on SGLang servers: the run's commands, carried out by a fleet in a thread of its own.

On the wall clock: the servers go on generating while the trainer works, whatever a command asks for. Batches are taken
in the order of dispatch and the schedule says how many groups are out, so the bounds on lag are those of the embedded
engine; which weights sample which token depends on speed, and no two runs are the same."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from scalerl.rl.config import RunConfig, SGLangEngineConfig
from scalerl.rl.engines.generator import torch_dtype
from scalerl.rl.engines.interface import Generator, Outcome
from scalerl.rl.engines.sglang.books import Book
from scalerl.rl.engines.sglang.client import Client
from scalerl.rl.engines.sglang.fleet import Fleet, Server
from scalerl.rl.engines.sglang.needs import Needs
from scalerl.rl.engines.sglang.probe import Probe
from scalerl.rl.engines.sglang.routing import Routing
from scalerl.rl.engines.sglang.server import server_processes
from scalerl.rl.engines.sglang.transfer import BroadcastTransfer, DiskTransfer, Transfer
from scalerl.rl.models.load import load_model
from scalerl.rl.types import CompletedGroup, Request, Sampling

T = TypeVar("T")


class SGLangGenerator(Generator):
    """Commands of `GeneratorCore` on servers. `begin("window")` begins nothing: generation never stops."""

    def __init__(self, config: RunConfig, model_path: Path, sampling: Sampling) -> None:
        """Starts the servers, or connects to them and gives them the weights in `model_path` as version 0. Raises
        UserError, with the server's own words, where one can't be had."""
        super().__init__()
        engine = config.engine
        assert isinstance(engine, SGLangEngineConfig)
        self.devices = engine.n_servers * engine.tensor_parallel
        routing = Routing.of_model(model_path) if sampling.return_experts else None
        self._eval_sampling = replace(sampling, return_experts=False)  # nothing is trained on them
        self._rollouts, self._evaluation = Book(sampling, routing), Book(self._eval_sampling)
        self._pending: tuple[str, tuple[Any, ...]] | None = None
        # Read again when a server that was started anew needs them: they are the trainer's own tensors, and it makes
        # no step while a command is waited for.
        self._state: Mapping[str, torch.Tensor] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang", daemon=True)
        self._thread.start()
        processes = [] if engine.urls else server_processes(config, engine, model_path)
        needs = Needs.of(config, engine, model_path, routing)
        self._fleet = self._call(_make_fleet(config, engine, processes, needs))
        try:
            self._call(self._fleet.start())
            if engine.urls:
                model = load_model(model_path)
                self._state = dict(model.named_parameters())
                self._call(self._fleet.update(self._state, 0, mend=False))
                self._call(self._fleet.check_model(Probe.of(model)))
            self._call(self._activate())
        except BaseException:
            self.close()
            raise

    def begin(self, command: str, *args: Any) -> None:
        self._pending = (command, args)

    def finish(self) -> Outcome:
        assert self._pending is not None, "finish without begin"
        (command, args), self._pending = self._pending, None
        groups: list[CompletedGroup] = []
        state, busy = None, 0.0
        if command == "save":
            state = self._call(self._save())
        elif command == "load":
            self._call(self._load(*args))
        elif command == "prefill_logprobs":
            state = self._call(self._fleet.prefill_logprobs(*args))
        elif command == "submit":
            self._call(self._submit(*args))
        elif command == "evaluate":
            groups = self._evaluate(*args)
        else:
            if command == "run_until":
                self._wait(args[0], self._rollouts)
            groups, busy = self._call(self._take())
        work, eval_work = self._rollouts.work, self._evaluation.work
        return Outcome(groups, replace(work), replace(eval_work), busy, state)

    def update_weights(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        self._state = state
        self._call(self._fleet.update(state, version))

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._call(self._fleet.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _wait(self, groups: Sequence[int], book: Book, *, to_the_end: bool = False) -> None:
        def given_up() -> bool:
            return bool(self._abandoned.value) and not to_the_end

        while not self._call(self._fleet.until(groups, book, given_up)):
            self._call(self._fleet.update(self._state, self._fleet.version, only_stale=True))

    def _evaluate(self, requests: Sequence[Request], version: int, to_the_end: bool) -> list[CompletedGroup]:
        """All requests under the current weights; nothing where it is abandoned before `to_the_end`. The rollouts in
        flight are landed before, and go on after it with their keys and values computed again: so the evaluation has
        one version, and its clock and theirs are apart."""
        assert version == self._fleet.version, "the servers have other weights than are to be evaluated"
        self._call(self._fleet.land())
        self._call(self._submit(requests, self._evaluation))
        self._call(self._activate(self._evaluation))
        self._wait([request.group for request in requests], self._evaluation, to_the_end=to_the_end)
        self._call(self._activate())
        if self._evaluation.requests:  # abandoned
            self._evaluation = Book(self._eval_sampling)
            return []
        groups = self._evaluation.take()
        mixed = [c for group in groups for c in group.completions if (c.versions != version).any()]
        assert not mixed, f"{len(mixed)} completions of the evaluation have tokens of other versions than {version}"
        return groups

    async def _activate(self, book: Book | None = None) -> None:
        self._fleet.activate(book or self._rollouts)

    async def _submit(self, requests: Sequence[Request], book: Book | None = None) -> None:
        book = book or self._rollouts
        book.submit(requests)
        if book is self._rollouts:
            for server in self._fleet.servers:
                server.take_busy()  # the training clock begins with a dispatch: what went before is not on it
            self._fleet.activate(book)

    async def _take(self) -> tuple[list[CompletedGroup], float]:
        servers = self._fleet.servers
        return self._rollouts.take(), sum(server.take_busy() for server in servers) / len(servers)

    async def _save(self) -> dict[str, Any]:
        """The groups that are out: complete ones that nobody has taken, and the others' requests, to be handed out
        again."""
        return {
            "requests": [self._rollouts.requests[group] for group in sorted(self._rollouts.requests)],
            "complete": list(self._rollouts.complete),
            "work": replace(self._rollouts.work),
            "eval_work": replace(self._evaluation.work),
        }

    async def _load(self, state: dict[str, Any]) -> None:
        self._rollouts.complete = list(state["complete"])
        self._rollouts.work, self._evaluation.work = state["work"], state["eval_work"]
        await self._submit(state["requests"])


async def _make_fleet(config: RunConfig, engine: SGLangEngineConfig, processes: Sequence[Any], needs: Needs) -> Fleet:
    """In the loop, to which its parts belong."""
    if engine.urls:
        servers = [Server(Client(url, engine.concurrency), None) for url in engine.urls]
    else:
        servers = [Server(Client(f"http://{engine.host}:{p.port}", engine.concurrency), p) for p in processes]
    return Fleet(servers, engine, _make_transfer(config, engine), needs)


def _make_transfer(config: RunConfig, engine: SGLangEngineConfig) -> Transfer:
    dtype, bucket_bytes = torch_dtype(config.model.dtype), engine.bucket_mb << 20
    if engine.transfer == "disk":
        return DiskTransfer(Path(config.run_dir) / "servers" / "weights", dtype, bucket_bytes, engine.transfer_limit)
    backend = "nccl" if engine.device == "cuda" else "gloo"
    device = config.trainer.device if backend == "nccl" else "cpu"
    return BroadcastTransfer(engine.host, backend, device, dtype, bucket_bytes, engine.transfer_limit)
