"""New weights for the servers: broadcast in flattened buckets, or through files.

Every phase has a time limit, and what a server says when it refuses stands in the error. A transfer that failed leaves
its servers with weights of which nothing is known: they must be started again, or given all weights anew."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import GroupName, PrefixStore, _new_process_group_helper

from scalerl.rl.engines.sglang.client import Client, ConnectionBroken, Features, ServerFault, ServerRefusal

Member = tuple[Client, Features]
_NAMED_WITHIN = 5.0  # seconds that a server has to say itself why a collective failed


class TransferFailed(Exception):
    """`client`: the server that failed, or None where it was our side."""

    def __init__(self, client: Client | None, words: str) -> None:
        super().__init__(words)
        self.client = client


class Transfer(ABC):
    """Sends weights, named as in the Hugging Face model, to servers that are paused or idle."""

    _if_broken = ""  # what it may mean that a server breaks off

    def __init__(self, dtype: torch.dtype, bucket_bytes: int, limit: float) -> None:
        """bucket_bytes: of weights that are in hand at once, or one tensor where that is larger."""
        self.dtype, self._bucket_bytes, self._limit = dtype, bucket_bytes, limit

    @abstractmethod
    async def send(self, members: Sequence[Member], state: Mapping[str, Tensor], version: int, *, flush: bool) -> None:
        """flush: the servers forget all keys and values. Raises TransferFailed."""

    @abstractmethod
    def forget(self) -> None:
        """A server has failed, and will come back as another: what connects to it is worth nothing."""

    @abstractmethod
    async def close(self) -> None:
        """Give back what the transfers held."""

    async def _all(self, members: Sequence[Member], path: str, bodies: Sequence[Mapping[str, Any]]) -> None:
        """POST to every member at once; raises TransferFailed with the first failure."""
        posts = [self._post(client, path, body) for (client, _), body in zip(members, bodies, strict=True)]
        await _together(posts)

    async def _post(self, client: Client, path: str, body: Mapping[str, Any]) -> None:
        try:
            await client.post(path, body, limit=self._limit)
        except ConnectionBroken as error:
            raise TransferFailed(client, f"{error}{self._if_broken}") from None
        except (ServerFault, ServerRefusal) as error:
            raise TransferFailed(client, str(error)) from None


class DiskTransfer(Transfer):
    """Through a folder that the servers see too; of it only the last version stays."""

    _if_broken = (
        "; SGLang ends a server over weights that don't fit its model: if it has ended, see its log, and start it with "
        "the run's model, as scalerl serve does"
    )

    def __init__(self, folder: Path, dtype: torch.dtype, bucket_bytes: int, limit: float) -> None:
        super().__init__(dtype, bucket_bytes, limit)
        self._folder = folder.resolve()

    async def send(self, members: Sequence[Member], state: Mapping[str, Tensor], version: int, *, flush: bool) -> None:
        path = await asyncio.to_thread(self._write, state, version)
        body = {"model_path": str(path), "weight_version": str(version), "flush_cache": flush}
        await self._all(members, "/update_weights_from_disk", [body] * len(members))

    def forget(self) -> None:
        """Files connect to nothing."""

    async def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, state: Mapping[str, Tensor], version: int) -> Path:
        path, beside = self._folder / f"version_{version}", self._folder / "writing"
        try:
            shutil.rmtree(self._folder, ignore_errors=True)
            beside.mkdir(parents=True)
            for number, bucket in enumerate(_buckets(state, self.dtype, "cpu", self._bucket_bytes)):
                save_file(bucket, beside / f"model-{number:05d}.safetensors")
            beside.rename(path)
        except Exception as error:  # safetensors has an exception of its own for a full disk
            shutil.rmtree(self._folder, ignore_errors=True)
            raise TransferFailed(None, f"weights can't be written to {self._folder}: {error}") from None
        return path


class BroadcastTransfer(Transfer):
    """A process group of this process, rank 0, and the servers' workers; made anew when the servers change."""

    def __init__(self, host: str, backend: str, device: str, dtype: torch.dtype, bucket_bytes: int, limit: float):
        super().__init__(dtype, bucket_bytes, limit)
        self._host, self._backend, self._device = host, backend, device
        self._members: tuple[Client, ...] = ()
        self._usable = False
        self._name = ""
        self._group: Any = None
        self._store: Any = None
        self._numbers = itertools.count()

    async def send(self, members: Sequence[Member], state: Mapping[str, Tensor], version: int, *, flush: bool) -> None:
        bracketed = [member for member in members if member[1].bracketed_updates]
        try:
            if not self._usable or self._members != tuple(client for client, _ in members):
                await self._form(members)
            await self._all(bracketed, "/begin_weight_update", [{}] * len(bracketed))
            buckets = _buckets(state, self.dtype, self._device, self._bucket_bytes)
            bucket = await asyncio.to_thread(next, buckets, None)
            while bucket is not None:
                following = await asyncio.to_thread(next, buckets, None)
                last = following is None
                await self._bucket(members, bucket, version if last else None, flush=flush and last)
                bucket = following
            await self._all(bracketed, "/end_weight_update", [{}] * len(bracketed))
        except TransferFailed:
            self.forget()
            # Else the next could not begin.
            await self._farewell([client for client, _ in bracketed], "/end_weight_update", {})
            raise

    def forget(self) -> None:
        """The next transfer makes a new group; a collective that hangs in this one ends with its own time limit."""
        self._usable = False

    async def close(self) -> None:
        if self._group is not None:
            await self._farewell(self._members, "/destroy_weights_update_group", {"group_name": self._name})
            self._members, self._group, self._store = (), None, None

    async def _farewell(self, clients: Sequence[Client], path: str, body: Mapping[str, Any]) -> None:
        """A last word to servers of which some may be gone, or refuse it."""
        posts = [client.post(path, body, limit=_NAMED_WITHIN) for client in clients]
        await asyncio.gather(*posts, return_exceptions=True)

    async def _form(self, members: Sequence[Member]) -> None:
        await self.close()
        self._name = f"scalerl-{time.time_ns()}-{next(self._numbers)}"
        limit = timedelta(seconds=self._limit)
        sizes = [features.tensor_parallel for _, features in members]
        world = 1 + sum(sizes)
        try:
            # Port 0: the store takes a free one itself, so that nobody else can in between.
            self._store = TCPStore(self._host, 0, world, True, timeout=limit, wait_for_workers=False)
        except RuntimeError as error:
            words = f"engine.host={self._host}: weights can't be offered there ({str(error).splitlines()[0]})"
            raise TransferFailed(None, words) from None
        bodies = [
            {
                "master_address": self._host,
                "master_port": self._store.port,
                "rank_offset": 1 + sum(sizes[:number]),
                "world_size": world,
                "group_name": self._name,
                "backend": self._backend,
            }
            for number in range(len(members))
        ]
        await _together([self._join(world, limit), self._all(members, "/init_weights_update_group", bodies)])
        self._members, self._usable = tuple(client for client, _ in members), True

    async def _join(self, world: int, limit: timedelta) -> None:
        store, name = self._store, self._name

        def join() -> Any:
            # The servers make theirs with the same two lines; the public new_group would need a group of all processes.
            prefixed = PrefixStore(name, store)
            group, _ = _new_process_group_helper(
                world, 0, [], self._backend, prefixed, group_name=GroupName(name), timeout=limit
            )
            return group

        try:
            self._group = await asyncio.to_thread(join)
        except RuntimeError as error:
            raise TransferFailed(None, f"the process group for weights can't be made: {error}") from None

    async def _bucket(
        self, members: Sequence[Member], bucket: Mapping[str, Tensor], version: int | None, *, flush: bool
    ) -> None:
        flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in bucket.values()])
        body = {
            "names": list(bucket),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()],
            "shapes": [list(tensor.shape) for tensor in bucket.values()],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": flush,
        }
        if version is not None:
            body["weight_version"] = str(version)
        posts = self._all(members, "/update_weights_from_distributed", [body] * len(members))
        told = asyncio.ensure_future(posts)
        try:
            await _together([asyncio.shield(told), self._broadcast(flat)])
        except TransferFailed as error:
            if error.client is None:  # the collective noticed first: let the server that broke it be named
                await asyncio.wait([told], timeout=_NAMED_WITHIN)
                if told.done():
                    told.result()
            raise
        finally:
            told.cancel()
            await asyncio.gather(told, return_exceptions=True)

    async def _broadcast(self, flat: Tensor) -> None:
        """A server that refuses never joins: the wait is here, where it can be given up, not in the collective."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        end = time.monotonic() + self._limit
        work = self._group.broadcast([flat], options)
        while not work.is_completed():
            if time.monotonic() > end:
                raise TransferFailed(None, f"weights: the broadcast did not end within {self._limit:g} s")
            await asyncio.sleep(0.001)
        try:
            work.wait()
        except RuntimeError as error:
            raise TransferFailed(None, f"weights: the broadcast failed: {error}") from None


async def _together(parts: Sequence[Awaitable[None]]) -> None:
    """All at once; with the first failure the others are given up, and it is raised."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        for done in asyncio.as_completed(tasks):
            await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _buckets(state: Mapping[str, Tensor], dtype: torch.dtype, device: str, size: int) -> Iterator[dict[str, Tensor]]:
    """The tensors as they are sent, in turn: together at most `size` bytes, or one that is larger."""
    bucket: dict[str, Tensor] = {}
    filled = 0
    for name in state:
        tensor = state[name].detach().to(device=device, dtype=dtype).contiguous()
        if bucket and filled + tensor.nbytes > size:
            yield bucket
            bucket, filled = {}, 0
        bucket[name] = tensor
        filled += tensor.nbytes
    if bucket:
        yield bucket
