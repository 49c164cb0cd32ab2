"""SIGTERM and SIGINT: the first stops the run where it can be resumed, the second ends the process at once.

Under torchrun the second counts for nothing: Slurm signals every process, and torchrun hands on what it gets itself.
torchrun kills ranks that take longer than its `--shutdown-timeout`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Inside `with`, `requested` turns true at the first signal, and `on_request` is called from its handler.

    Outside the main thread, where Python can't handle signals, it stays false."""

    def __init__(self) -> None:
        self.requested = False
        self.on_request: Callable[[], None] = lambda: None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and "TORCHELASTIC_RUN_ID" in os.environ:
            return
        if self.requested:
            if sys.stderr.isatty():
                sys.stderr.write("\x1b[?25h")  # a live progress line hides the cursor
                sys.stderr.flush()
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.requested = True
        self.on_request()


def leave_signals_to_parent() -> None:
    """In a child process: a terminal and Slurm signal the whole group, but the parent decides when to end."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
