"""Where runs are started: on this machine, or through Slurm. Both start `scalerl train` as anybody would."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from scalerl.fitting.errors import InputError
from scalerl.sweeps.state import run_state

_PR_SET_PDEATHSIG = 1
_GRACE = 30.0  # seconds that an ended run has to write its checkpoint


@dataclass(frozen=True)
class Order:
    """One run to make: its folder, its overrides, and the file for what it prints."""

    run: Path
    overrides: tuple[str, ...]
    log: Path

    def command(self) -> list[str]:
        """`scalerl train`, or its resumption where the folder holds a run already."""
        train = [sys.executable, "-m", "scalerl.cli", "train"]
        if run_state(self.run).state != "absent":
            return [*train, "--resume", str(self.run)]
        return [*train, "--run-dir", str(self.run), *self.overrides]


class Job(Protocol):
    def poll(self) -> int | None:
        """The exit code; None while it runs or waits."""
        ...

    def stop(self) -> None:
        """End it; it may save its state first."""
        ...


class Launcher(Protocol):
    jobs: int

    def start(self, order: Order) -> Job: ...


@dataclass
class Local:
    """`jobs` runs at a time on this machine, each with its own share of the cores and of the GPUs (their indices)."""

    jobs: int
    gpus: tuple[str, ...] = ()
    _slots: dict[int, LocalJob | None] = field(default_factory=dict)

    def start(self, order: Order) -> LocalJob:
        slot = next(i for i in range(self.jobs) if (job := self._slots.get(i)) is None or job.poll() is not None)
        cores = _share(sorted(os.sched_getaffinity(0)), slot, self.jobs)
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(_share(self.gpus, slot, self.jobs))
        order.log.parent.mkdir(parents=True, exist_ok=True)
        with order.log.open("ab") as log:
            process = subprocess.Popen(
                order.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # an interrupt of the study is not one of its runs, which are told to end
                preexec_fn=lambda: _settle(cores),
            )
        self._slots[slot] = LocalJob(process)
        return LocalJob(process)


@dataclass(frozen=True)
class LocalJob:
    process: subprocess.Popen[bytes]

    def poll(self) -> int | None:
        return self.process.poll()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _share(all_of_them: Sequence[Any], slot: int, slots: int) -> list[Any]:
    """The slot's part of the cores or GPUs; where there are fewer than slots, they are taken in turn."""
    n = len(all_of_them)
    if n < slots:
        return [all_of_them[slot % n]]
    return list(all_of_them[slot * n // slots : (slot + 1) * n // slots])


def _settle(cores: Sequence[int]) -> None:
    """In the child: stay on its cores, and die with the study, whose resumption would else start the run a second
    time beside it."""
    os.sched_setaffinity(0, cores)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass
class Slurm:
    """Every run a Slurm job through submitit, requeued where it is preempted. parameters: submitit's, such as
    slurm_partition; cluster: `local` runs the jobs as processes here, which is how the tests see the whole path."""

    folder: Path
    parameters: Mapping[str, Any]
    jobs: int
    cluster: str = "slurm"

    def start(self, order: Order) -> SlurmJob:
        return SlurmJob(self.executor().submit(Errand(order)))

    def executor(self) -> Any:
        """Raises InputError without submitit or Slurm, and for a parameter that submitit does not know."""
        try:
            import submitit
        except ImportError:
            raise InputError("--launcher slurm needs submitit: pip install 'scalerl[slurm]'") from None
        try:
            executor = submitit.AutoExecutor(folder=self.folder, cluster=self.cluster)
        except RuntimeError:
            raise InputError("--launcher slurm: there is no Slurm here (no srun); use --launcher local") from None
        try:
            executor.update_parameters(**self.parameters)
        except (NameError, TypeError, ValueError) as error:
            raise InputError(f"--slurm: {error}") from None
        return executor


class Errand:
    """What a Slurm job does: train or resume its run. submitit pickles it, and on preemption asks `checkpoint` what
    to queue again."""

    def __init__(self, order: Order) -> None:
        self.order = order

    def __call__(self) -> int:
        self.order.log.parent.mkdir(parents=True, exist_ok=True)
        with self.order.log.open("ab") as log:
            return subprocess.run(self.order.command(), stdout=log, stderr=subprocess.STDOUT).returncode

    def checkpoint(self) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


@dataclass(frozen=True)
class SlurmJob:
    job: Any

    def poll(self) -> int | None:
        if not self.job.done():
            return None
        error = self.job.exception()
        return 1 if error is not None else int(self.job.result())

    def stop(self) -> None:
        self.job.cancel()
