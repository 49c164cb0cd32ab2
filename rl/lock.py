"""One process works on a run folder."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scalerl.rl.errors import UserError

LOCK = "lock"


@contextmanager
def lock_run(path: Path) -> Iterator[None]:
    """Inside, the run in `path` is this process's. Its file `lock` names the process, and stays.

    The lock is the system's and goes with the process, however that ends; children do not inherit it. Raises UserError
    where another process has it, or the folder can't be written."""
    try:
        file = (path / LOCK).open("a+")
    except OSError as error:
        raise UserError(f"run folder {path} can't be written ({error.strerror}); mend that first") from None
    with file:
        try:
            # A record lock: flock's would live on in a generator process that outlives its parent for a moment.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UserError(f"run {path} is being worked on by {holder}; end that first, or wait for it") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
