"""A solution in a process that can do nothing but compute: see `sandbox_child.py` for its locks."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import IO, Literal

from scalerl.rl.errors import UserError

_START = 60.0  # seconds that a process may take to lock itself in
_FILE_SIZE = 16 << 20  # bytes of a file, the output's too
_CHILD = files("scalerl.rl.tasks").joinpath("sandbox_child.py").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Ran:
    """status: `done` with exit code 0; `failed`: another exit code or a signal; `late`: killed at the time limit;
    `unlocked`: the locks could not be set, and the solution did not run. output: what it wrote, for `done`; else why
    it could not run."""

    status: Literal["done", "failed", "late", "unlocked"]
    output: str


@dataclass(frozen=True)
class Sandbox:
    """Runs Python source on the standard library. seconds: of wall time once locked in, and of CPU time rounded up.
    memory: MiB of address space.

    The process reads its input and nothing else of the caller: what it should put out stays in the caller's memory."""

    seconds: float
    memory: int

    def program(self, source: str, stdin: str) -> Ran:
        """As a program of its own, `stdin` its standard input."""
        return self._run(source, stdin, calls=False)

    def calls(self, source: str, expressions: list[str]) -> Ran:
        """As a module in which the expressions are evaluated in order. output: a JSON list of their `repr`s."""
        return self._run(source, json.dumps(expressions), calls=True)

    def check(self) -> None:
        """Raises UserError where this machine can't lock a process in."""
        ran = self.program("print(1)", "")
        if ran.status == "unlocked":
            raise UserError(
                f"solutions can't be run safely on this machine ({ran.output}): that needs Linux on x86-64 or AArch64, "
                "with Landlock (kernel 5.13 or newer) and seccomp"
            )

    def _run(self, source: str, stdin: str, *, calls: bool) -> Ran:
        with (
            tempfile.TemporaryDirectory(prefix="scalerl-", ignore_cleanup_errors=True) as folder,
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as taken,
            tempfile.TemporaryFile() as said,
        ):
            Path(folder, "solution.py").write_text(source, encoding="utf-8", errors="replace")
            given.write(stdin.encode("utf-8", errors="replace"))
            given.seek(0)
            ready, theirs = os.pipe()
            process = self._start(folder, given, taken, said, theirs, calls=calls)
            os.close(theirs)
            try:
                locked = _is_locked(ready)
                code = process.wait(self.seconds) if locked else None
            except subprocess.TimeoutExpired:
                return Ran("late", "")
            finally:
                os.close(ready)
                _end(process)
            if not locked:
                return Ran("unlocked", _read(said).strip().rpartition("\n")[2] or f"no start within {_START:.0f} s")
            return Ran("failed", "") if code else Ran("done", _read(taken))

    def _start(
        self, folder: str, given: IO[bytes], taken: IO[bytes], said: IO[bytes], ready: int, *, calls: bool
    ) -> subprocess.Popen[bytes]:
        limits = {
            "cpu_seconds": int(self.seconds) + 1,
            "memory": self.memory << 20,
            "file_size": _FILE_SIZE,
            "calls": calls,
        }
        python = getattr(sys, "_base_executable", sys.executable)  # a virtual environment's own is a link
        return subprocess.Popen(
            [python, "-I", "-S", "-B", "-c", _CHILD, json.dumps(limits), str(ready)],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": folder, "OMP_NUM_THREADS": "1"},
            stdin=given,
            stdout=taken,
            stderr=said,
            pass_fds=(ready,),
            start_new_session=True,
        )


def _is_locked(ready: int) -> bool:
    """Waits for the child's word that its locks are in place; its time begins then, however busy the machine is."""
    said = select.poll()
    said.register(ready, select.POLLIN)
    return bool(said.poll(_START * 1000)) and os.read(ready, 1) == b"1"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the process group, which is the process alone: it can't make another."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", errors="replace")
