"""One policy over many processes: FSDP2 (`fully_shard`) under `torchrun`, and how rank 0 leads the others.

Rank 0 drives engine, schedule and log; the other ranks only hold their shards of the trainer and repeat its calls."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from scalerl.rl.errors import UserError

# Ranks wait on the control group while rank 0 generates, which may take as long as it likes: a rank that dies breaks
# the connection, and torchrun ends the others.
_PATIENCE = timedelta(days=30)
_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class World:
    """The processes that share the trainer. control carries objects between them, writing the checkpoints' plans beside
    it from a thread; both are gloo groups, None in a world of one."""

    rank: int = 0
    size: int = 1
    control: Any = None
    writing: Any = None

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.control)
        return found

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        if self.size == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0, group=self.control)
        return held[0]

    def leave(self) -> None:
        """The last call of a process. Ends the groups' threads: one that still holds a tensor when the interpreter ends
        aborts the process ("terminate called without an active exception"), and torchrun calls the run failed."""
        if self.size > 1:
            dist.destroy_process_group()


def launched() -> tuple[int, int]:
    """(rank, size) of the world that torchrun has put this process in."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def join_world(device: str) -> World:
    """Meet the other ranks. After anything that forks: it starts threads."""
    rank, size = launched()
    if size == 1:
        return World()
    if not dist.is_initialized():
        if "cuda" in device:
            torch.cuda.set_device(local_device(device))
        dist.init_process_group("cpu:gloo,cuda:nccl" if "cuda" in device else "gloo")
    control, writing = (dist.new_group(backend="gloo", timeout=_PATIENCE) for _ in range(2))
    return World(rank, size, control, writing)


def local_device(device: str) -> torch.device:
    """The device of this rank: `cuda` is the GPU with the rank's local number."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if device == "cuda" else torch.device(device)


def require_device(key: str, device: str) -> None:
    """Raises UserError where `device`, the value of the option `key`, can't be had."""
    if device == "cpu":
        return
    n = torch.cuda.device_count()
    if local_device(device).index >= n:
        raise UserError(f"{key}={device}: torch sees {n} GPUs here (counted from 0); {key}=cpu does without")


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The blocks of a Hugging Face model that it says must stay whole."""
    names = getattr(model, "_no_split_modules", None) or ()
    return [module for module in model.modules() if type(module).__name__ in names]


def checkpoint_activations(model: nn.Module) -> None:
    """Keep each block's inputs only, and compute the rest again in the backward pass."""
    for layer in decoder_layers(model):
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def shard(policy: nn.Module, model: nn.Module, world: World, device: torch.device, dtype: torch.dtype) -> None:
    """Shard the parameters over the world, block by block, in place; nothing in a world of one.

    Shards, gradients and their sums over ranks are fp32; blocks are gathered, and computed with, in `dtype`. Gradients
    are summed, not averaged: the objective has the global counts in it."""
    if world.size == 1:
        return
    mesh = init_device_mesh(device.type, (world.size,))
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=True
    )
    for module in [*decoder_layers(model), policy]:
        fully_shard(module, mesh=mesh, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum


def whole(tensor: Tensor) -> Tensor:
    """A tensor of all its shards; collective where it has any."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Gathered(Mapping[str, Tensor]):
    """Tensors by name, each made by a call of `gather` when it is looked up."""

    def __init__(self, names: Iterable[str], gather: Callable[[str], Tensor]) -> None:
        self._names, self._gather = dict.fromkeys(names), gather

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._gather(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def collective(method: _Method) -> _Method:
    """A method of the trainer that all ranks run: where rank 0 calls it, the others are told to."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.world.rank == 0:
            self.world.broadcast((method.__name__, args, kwargs))
        return method(self, *args, **kwargs)

    return call  # pyright: ignore[reportReturnType]
