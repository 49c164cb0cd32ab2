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

from scalerl.rl.engines.sglang.client import Client, Features, ServerFault, ServerRefusal

Member = tuple[Client, Features]
_NAMED_WITHIN = 5.0  # seconds that a server has to say itself why a collective failed


class TransferFailed(Exception):
    """`client`: the server that failed, or None where it was our side."""

    def __init__(self, client: Client | None, words: str) -> None:
        super().__init__(words)
        self.client = client


class Transfer(ABC):
    """Sends weights, named as in the Hugging Face model, to servers that are paused or idle."""

    def __init__(self, dtype: torch.dtype, limit: float) -> None:
        self._dtype, self._limit = dtype, limit

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
        except (ServerFault, ServerRefusal) as error:
            raise TransferFailed(client, str(error)) from None


class DiskTransfer(Transfer):
    """Through a folder that the servers see too; of it only the last version stays."""

    def __init__(self, folder: Path, dtype: torch.dtype, limit: float) -> None:
        super().__init__(dtype, limit)
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
            # "pt": the format that the servers' loaders expect to be named
            save_file({name: _whole(t, self._dtype, "cpu") for name, t in state.items()}, beside / "model.safetensors")
            beside.rename(path)
        except Exception as error:  # safetensors has an exception of its own for a full disk
            shutil.rmtree(self._folder, ignore_errors=True)
            raise TransferFailed(None, f"weights can't be written to {self._folder}: {error}") from None
        return path


class BroadcastTransfer(Transfer):
    """A process group of this process, rank 0, and the servers' workers; made anew when the servers change."""

    def __init__(self, host: str, backend: str, device: str, bucket_bytes: int, dtype: torch.dtype, limit: float):
        super().__init__(dtype, limit)
        self._host, self._backend, self._device, self._bucket_bytes = host, backend, device, bucket_bytes
        self._members: tuple[Client, ...] = ()
        self._usable = False
        self._name = ""
        self._group: Any = None
        self._store: Any = None
        self._numbers = itertools.count()

    async def send(self, members: Sequence[Member], state: Mapping[str, Tensor], version: int, *, flush: bool) -> None:
        try:
            if not self._usable or self._members != tuple(client for client, _ in members):
                await self._form(members)
            bracketed = [member for member in members if member[1].bracketed_updates]
            await self._all(bracketed, "/begin_weight_update", [{}] * len(bracketed))
            buckets = list(_buckets(state, self._dtype, self._bucket_bytes))
            for number, names in enumerate(buckets, 1):
                last = number == len(buckets)
                await self._bucket(members, state, names, version if last else None, flush=flush and last)
            await self._all(bracketed, "/end_weight_update", [{}] * len(bracketed))
        except TransferFailed:
            self.forget()
            raise

    def forget(self) -> None:
        """The next transfer makes a new group; a collective that hangs in this one ends with its own time limit."""
        self._usable = False

    async def close(self) -> None:
        if self._group is not None:
            farewell = [
                client.post("/destroy_weights_update_group", {"group_name": self._name}, limit=5.0)
                for client in self._members
            ]
            await asyncio.gather(*farewell, return_exceptions=True)
            self._members, self._group, self._store = (), None, None

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
        self,
        members: Sequence[Member],
        state: Mapping[str, Tensor],
        names: list[str],
        version: int | None,
        *,
        flush: bool,
    ) -> None:
        whole = [_whole(state[name], self._dtype, self._device) for name in names]
        flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in whole])
        body = {
            "names": names,
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in whole],
            "shapes": [list(tensor.shape) for tensor in whole],
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


def _whole(tensor: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    """One parameter as it is sent."""
    return tensor.detach().to(device=device, dtype=dtype).contiguous()


def _buckets(state: Mapping[str, Tensor], dtype: torch.dtype, size: int) -> Iterator[list[str]]:
    """Names whose tensors make up at most `size` bytes, or one larger tensor."""
    names: list[str] = []
    filled = 0
    for name, tensor in state.items():
        n = tensor.numel() * dtype.itemsize
        if names and filled + n > size:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += n
    if names:
        yield names
