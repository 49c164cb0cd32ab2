"""Checkpoints on disk: a kill, or a machine that goes down, leaves the whole of one, or nothing.

A checkpoint is a folder `checkpoints/step_<n>`: the trainer's tensors as `torch.distributed.checkpoint` lays them out
(`.metadata` and one file a rank, loadable at any world size), and `state.pt` with everything else that the run depends
on. It is written beside as `step_<n>.tmp` and renamed into place when every byte is on the disk."""

from __future__ import annotations

import io
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from scalerl.rl.errors import RunEnded, UserError

_HALF, _REPLACED = ".tmp", ".old"
# Said at every write of one process, where nothing is amiss. The thread that writes could not lift it for itself alone.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass(frozen=True)
class Checkpoint:
    """A whole one: `folder` holds the trainer's tensors, `state` is the rest."""

    folder: Path
    state: dict[str, Any]


class CheckpointWriter:
    """Writes checkpoints with a thread while training goes on; at most one is in flight. `keep` stay on disk."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self._folder, self._keep = run_dir / "checkpoints", keep
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    def save(self, step: int, state: Mapping[str, Any], write_tensors: Callable[[Path], Future[Any]]) -> None:
        """Begin the checkpoint of `step`, when the one before is on the disk.

        `state` is pickled and `write_tensors` (into a folder) has copied its tensors when this returns, so that both
        may change. Raises RunEnded where the one before could not be written."""
        self.wait()
        beside = self._folder / f"step_{step}{_HALF}"
        try:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
        except OSError as error:
            raise self._failed(step, error) from None
        content = io.BytesIO()
        torch.save(dict(state), content)
        tensors = write_tensors(beside)
        self._pending = self._pool.submit(self._finish, step, beside, tensors, content.getbuffer())

    def wait(self) -> None:
        """Until the checkpoint in flight is on the disk; raises RunEnded if it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        self._pool.shutdown()

    def _finish(self, step: int, beside: Path, tensors: Future[Any], content: memoryview) -> None:
        try:
            tensors.result()
            with (beside / "state.pt").open("wb") as f:
                f.write(content)
                f.flush()
                os.fsync(f.fileno())
            _sync(beside)
            _move_into_place(beside, self._folder / f"step_{step}")
            for old in _whole(self._folder)[: -self._keep]:
                shutil.rmtree(old)
        except (OSError, CheckpointException) as error:
            raise self._failed(step, error) from None

    def _failed(self, step: int, error: BaseException) -> RunEnded:
        last = [path.name for path in _whole(self._folder)[-1:]] or ["the start"]
        return RunEnded(
            f"the checkpoint of step {step} in {self._folder} can't be written: {_reason(error)}. Mend that, and "
            f"--resume goes on from {last[0]}"
        )


def tidy_checkpoints(run_dir: Path) -> None:
    """Remove what a kill left half-done. Nobody else may be writing: see `lock_run`."""
    folder = run_dir / "checkpoints"
    for half in folder.glob(f"step_*{_HALF}"):
        shutil.rmtree(half)
    for replaced in folder.glob(f"step_*{_REPLACED}"):
        if replaced.with_suffix("").exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(replaced.with_suffix(""))


def load_last_checkpoint(run_dir: Path) -> Checkpoint | None:
    """The run's last whole checkpoint, None where there is none yet. Raises UserError where it can't be read."""
    found = _whole(run_dir / "checkpoints")
    if not found:
        return None
    try:
        # The file holds NumPy arrays and our own records beside tensors; it is as trusted as the run folder itself.
        state = torch.load(found[-1] / "state.pt", weights_only=False, map_location="cpu")
    except Exception as error:  # of damaged bytes a pickle may make anything
        raise UserError(
            f"{found[-1]} can't be read ({_reason(error)}); remove it to go on from the one before"
        ) from None
    return Checkpoint(found[-1], state)


def write_tensors(tensors: Mapping[str, Tensor], folder: Path, group: Any = None) -> None:
    """The trainer's tensors, each rank of `group` its own shards."""
    save(dict(tensors), checkpoint_id=folder, process_group=group, no_dist=group is None)


def read_tensors(tensors: Mapping[str, Tensor], folder: Path, group: Any = None) -> None:
    """Fill `tensors` in place with what `write_tensors` wrote, at whatever world size. Raises UserError where the
    folder doesn't hold them."""
    try:
        load(dict(tensors), checkpoint_id=folder, process_group=group, no_dist=group is None)
    except (OSError, CheckpointException) as error:
        raise UserError(f"{folder} can't be read ({_reason(error)}); remove it to go on from the one before") from None


def _reason(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1]


def _whole(folder: Path) -> list[Path]:
    found = (p for p in folder.glob("step_*") if p.name.removeprefix("step_").isdigit())
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))


def _move_into_place(beside: Path, final: Path) -> None:
    replaced = final.with_name(final.name + _REPLACED)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    beside.rename(final)
    _sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Put a folder's entries on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
