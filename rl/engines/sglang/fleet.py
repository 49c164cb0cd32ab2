"""The servers of a run: completions spread over them, weights sent to them, and their failures mended.

Everything here runs in one asyncio loop. A server is *ready* (works), *stale* (answers, but doesn't have the current
weights), *starting*, or *lost*."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from torch import Tensor

from scalerl.rl.config import SGLangEngineConfig
from scalerl.rl.engines.sglang.books import Book
from scalerl.rl.engines.sglang.checksums import difference, read_checksums
from scalerl.rl.engines.sglang.client import Client, Features, ServerFault, ServerRefusal
from scalerl.rl.engines.sglang.flight import Flight
from scalerl.rl.engines.sglang.needs import Needs
from scalerl.rl.engines.sglang.probe import Probe
from scalerl.rl.engines.sglang.server import ServerProcess
from scalerl.rl.engines.sglang.transfer import Transfer, TransferFailed
from scalerl.rl.errors import UserError

_EMPTY_ANSWERS = 5  # in a row, without a token, after which a completion can't be had
_CHECK_EVERY = 1.0  # seconds between looks at the processes
_LAND_EVERY = 0.2  # seconds between calls to give up what is in progress
_FAREWELL = 5.0  # seconds that a server which goes on without us gets to answer


class Server:
    """One server as the fleet sees it. `process` is None for one that was given by its URL."""

    def __init__(self, client: Client, process: ServerProcess | None) -> None:
        self.client, self.process = client, process
        self.status: Literal["starting", "stale", "ready", "lost"] = "starting"
        self.features: Features | None = None
        self.open: dict[asyncio.Task[None], tuple[Flight, Book]] = {}
        self.restarts = 0
        self.paused_at = 0.0  # when its last weight update began or ended
        self._busy, self._since = 0.0, 0.0

    @property
    def url(self) -> str:
        return self.client.url

    def fly(self, task: asyncio.Task[None], flight: Flight, book: Book) -> None:
        if not self.open:
            self._since = time.perf_counter()
        self.open[task] = (flight, book)

    def land(self, task: asyncio.Task[None]) -> None:
        del self.open[task]
        if not self.open:
            self._busy += time.perf_counter() - self._since

    def take_busy(self) -> float:
        """Seconds with anything in progress since the last call."""
        now = time.perf_counter()
        if self.open:
            self._busy += now - self._since
            self._since = now
        busy, self._busy = self._busy, 0.0
        return busy

    def alive(self) -> bool:
        return self.process is None or self.process.alive

    async def free(self, limit: float) -> None:
        """Undo what a run leaves behind that ends in the middle: a pause, completions in progress, an open update."""
        for path, body in (
            ("/continue_generation", {}),
            ("/abort_request", {"abort_all": True}),
            ("/end_weight_update", {}),
        ):
            try:
                await self.client.post(path, body, limit=limit)
            except ServerRefusal:  # there was none
                continue
            except ServerFault:  # it isn't there (yet)
                return

    def words(self, error: object) -> str:
        """The error, with what the server itself printed last where that can be known."""
        if self.process is None:
            return str(error)
        return f"{error}; its log {self.process.log} ends: {self.process.last_words()}"


class Fleet:
    """Takes groups from the active `Book` and gives them to the servers with the fewest completions in progress."""

    def __init__(self, servers: Sequence[Server], engine: SGLangEngineConfig, transfer: Transfer, needs: Needs) -> None:
        self.servers = list(servers)
        self._needs = needs
        self.version = 0
        # A server may have keys and values of another run, whose versions have the same numbers.
        self._run = uuid.uuid4().hex
        self._engine, self._transfer = engine, transfer
        self._active: Book | None = None
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the servers that are ours, wait for all, and read what they can do. Raises UserError."""
        for server in self.servers:
            if server.process is not None:
                server.process.start()
        try:
            await asyncio.gather(*(self._connect(server) for server in self.servers))
        except (ServerFault, ServerRefusal) as error:
            raise UserError(str(error)) from None
        for server in self.servers:
            server.status = "stale" if server.process is None else "ready"
            self._keep(self._watch(server))

    async def close(self) -> None:
        tasks = [*self._tasks, *(task for server in self.servers for task in server.open)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._transfer.close()
        await asyncio.gather(*(server.free(_FAREWELL) for server in self.servers if server.process is None))
        for server in self.servers:
            await server.client.close()
            if server.process is not None:
                server.process.stop()

    def activate(self, book: Book | None) -> None:
        """From now on work on this book's groups; what is in progress of another goes on."""
        self._active = book
        self._pump()

    async def land(self) -> None:
        """Stop what is in progress: it waits in its book with what it has, and will be computed from there."""
        self.activate(None)
        while any(server.open for server in self.servers):
            give_up = [s.client.post("/abort_request", {"abort_all": True}, limit=10.0) for s in self.servers if s.open]
            await asyncio.gather(*give_up, return_exceptions=True)
            await self._change(_LAND_EVERY)

    async def until(self, groups: Sequence[int], book: Book, given_up: Callable[[], bool]) -> bool:
        """Wait until the groups are complete, or until it is given up, then True; False as soon as a server needs the
        weights that it lacks. Raises what keeps the groups from ever being complete."""
        while book.missing(groups) and not given_up():
            if self._failure is not None:
                raise self._failure
            if any(server.status == "stale" for server in self.servers):
                return False
            await self._change(_CHECK_EVERY)
        return True

    async def prefill_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """As of `GeneratorCore`, by the first server. Raises UserError where it can't say."""
        server = self.servers[0]
        found = await asyncio.gather(*(self._prefill_logprobs(server, ids, 1) for ids in sequences))
        return [logprob for (logprob,) in found]

    async def check_model(self, probe: Probe) -> None:
        """Raises UserError for a server that doesn't compute the model of the weights that it was given."""
        for server in self.servers:
            probe.check(server.url, await self._prefill_logprobs(server, probe.ids, len(probe.logprobs)))

    async def _prefill_logprobs(self, server: Server, ids: Sequence[int], n: int) -> list[float]:
        try:
            return await server.client.prefill_logprobs(ids, n, self._salt(server))
        except (ServerFault, ServerRefusal) as error:
            raise UserError(str(error)) from None

    def _salt(self, server: Server) -> str | None:
        """Keeps keys and values of these weights apart in the server's prefix cache."""
        assert server.features is not None
        return f"{self._run}.{self.version}" if server.features.salted_cache else None

    async def update(
        self, state: Mapping[str, Tensor], version: int, *, only_stale: bool = False, mend: bool = True
    ) -> None:
        """Give the servers new weights, or those the current weights that lack them.

        A server that fails is started again, and stale until the next update; without `mend` that is an error. Raises
        UserError where it is no server's fault, or where none is left."""
        self.version = version
        wanted = ("stale",) if only_stale else ("stale", "ready")
        while members := [server for server in self.servers if server.status in wanted]:
            try:
                await self._update(members, state, version)
            except TransferFailed as error:
                words = f"weight update to version {version} failed: {error}"
                guilty = [server for server in members if server.client is error.client]
                if not guilty or not mend:
                    raise UserError(words) from None
                self._fault(guilty[0], words)
                continue
            break
        if self._failure is not None:
            raise self._failure
        self._pump()

    async def _update(self, members: Sequence[Server], state: Mapping[str, Tensor], version: int) -> None:
        mode, active = self._engine.update, self._active
        if mode == "drained":
            self.activate(None)
            while any(server.open for server in members):
                await self._change(None)
            self._active = active
        now = time.monotonic()
        for server in members:
            server.paused_at = now + self._engine.transfer_limit
        pairs = [(server.client, server.features) for server in members if server.features is not None]
        if mode != "drained":
            await self._control(members, "/pause_generation", {"mode": mode})
        await self._transfer.send(pairs, state, version, flush=mode != "in_place")
        if self._engine.check_weights:
            await self._compare(members, state)
        if mode != "drained":
            await self._control(members, "/continue_generation", {})
        for server in members:
            server.status, server.paused_at = "ready", time.monotonic()

    async def _compare(self, members: Sequence[Server], state: Mapping[str, Tensor]) -> None:
        """Raises TransferFailed for a server that doesn't hold `state`, and UserError where that can't be known."""
        limit = self._engine.transfer_limit

        async def ask(server: Server) -> tuple[str, list[dict[str, str]]]:
            try:
                answer = await server.client.post("/weights_checker", {"action": "checksum"}, limit=limit)
            except ServerFault as error:
                raise TransferFailed(server.client, str(error)) from None
            return server.url, read_checksums(answer)

        try:
            answers = await asyncio.gather(*map(ask, members))
            found = difference(answers, state, self._transfer.dtype, self._engine.device)
        except (ServerRefusal, ValueError) as error:
            raise UserError(f"engine.check_weights=true: {error}") from None
        if found is not None:
            number, words = found
            raise TransferFailed(members[number].client, f"{members[number].url}: {words}")

    async def _control(self, members: Sequence[Server], path: str, body: Mapping[str, str]) -> None:
        async def one(server: Server) -> None:
            try:
                await server.client.post(path, body, limit=self._engine.transfer_limit)
            except (ServerFault, ServerRefusal) as error:
                raise TransferFailed(server.client, str(error)) from None

        await asyncio.gather(*(one(server) for server in members))

    def _pump(self) -> None:
        """Hand out as much as the servers have room for."""
        while self._active is not None:
            room = [s for s in self.servers if s.status == "ready" and len(s.open) < self._engine.concurrency]
            if not room or (flight := self._active.next()) is None:
                return
            server = min(room, key=lambda s: len(s.open))
            task = asyncio.get_running_loop().create_task(self._fly(server, flight, self._active))
            server.fly(task, flight, self._active)

    async def _fly(self, server: Server, flight: Flight, book: Book) -> None:
        task = asyncio.current_task()
        assert task is not None and server.features is not None
        body = flight.body(salt=self._salt(server), most_kept=server.features.most_kept)
        try:
            answer = await server.client.generate(body)
        except ServerFault as error:
            self._fault(server, error)  # takes this flight back too
            return
        except ServerRefusal as error:
            self._fail(UserError(str(error)))
            return
        server.land(task)
        book.take_in(flight, answer, self.version)
        if flight.empty_answers >= _EMPTY_ANSWERS:
            self._fail(UserError(f"{server.url}: {_EMPTY_ANSWERS} answers in a row without a token ({answer.reason})"))
        self._notify()
        self._pump()

    def _fault(self, server: Server, why: object) -> None:
        """Take back what the server was working on and begin to mend it."""
        if server.status in ("starting", "lost"):
            return
        server.status = "starting"
        self._transfer.forget()
        current = asyncio.current_task()
        for task, (flight, book) in list(server.open.items()):
            if task is not current:
                task.cancel()
            server.land(task)
            book.put_back(flight)
        self._keep(self._mend(server, server.words(why)))
        self._pump()

    async def _mend(self, server: Server, why: str) -> None:
        """Start a server of ours again, or wait for another's to answer again; then it is stale."""
        while server.restarts < self._engine.max_restarts:
            server.restarts += 1
            what = "waiting for it" if server.process is None else "starting it again"
            print(f"warning: {why}; {what} ({server.restarts}/{self._engine.max_restarts})", file=sys.stderr)
            if server.process is not None:
                await asyncio.to_thread(server.process.stop)
                server.process.start()
            try:
                await self._connect(server)
            except (ServerFault, ServerRefusal, UserError) as error:
                why = str(error)
                continue
            server.status = "ready" if server.process is not None and self.version == 0 else "stale"
            self._notify()
            self._pump()
            return
        server.status = "lost"
        print(f"warning: {why}; given up after {server.restarts} restarts", file=sys.stderr)
        if all(s.status == "lost" for s in self.servers):
            self._fail(UserError(f"no server is left; the last one: {why}"))

    async def _connect(self, server: Server) -> None:
        engine = self._engine
        if server.process is None:  # paused, it would never be ready
            await server.free(min(_FAREWELL, engine.start_limit))
        try:
            await server.client.wait_until_ready(engine.start_limit, server.alive)
            server.features = await server.client.features(engine.start_limit)
        except ServerFault as error:
            raise ServerFault(server.words(error)) from None
        self._needs.check(server.url, server.features)

    async def _watch(self, server: Server) -> None:
        """Find a server that has died, or that has been silent for `stall_limit` seconds."""
        checked = time.monotonic()
        while server.status != "lost":
            await asyncio.sleep(_CHECK_EVERY)
            if server.status not in ("ready", "stale"):
                continue
            if not server.alive():
                self._fault(server, f"{server.url} has died")
            elif time.monotonic() - checked > self._engine.stall_limit / 4:
                checked = time.monotonic()
                try:
                    await server.client.wait_until_ready(self._engine.stall_limit, server.alive)
                except ServerFault as error:
                    if server.paused_at < checked:  # a paused server makes no tokens
                        self._fault(server, f"no sign of life for {self._engine.stall_limit:g} s ({error})")

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._notify()

    def _notify(self) -> None:
        self._changed.set()

    async def _change(self, limit: float | None) -> None:
        """Wait until something has changed, or for `limit` seconds."""
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), limit)
        except TimeoutError:
            return

    def _keep(self, coroutine: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)  # pyright: ignore
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
