"""`python recorded.py RECORD MOMENT ARGUMENTS...`: the command `scalerl ARGUMENTS...`, which writes down the prompts of
every batch that it trains, and kills itself at a moment of MOMENTS."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from scalerl.cli.main import main
from scalerl.rl.engines.sglang.generator import SGLangGenerator
from scalerl.rl.engines.sglang.transfer import BroadcastTransfer
from scalerl.rl.run import Run


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at(owner: Any, name: str, nth: int, seconds: float = 0.0) -> None:
    """The nth call of a function kills, or `seconds` after it has begun."""
    original, calls = getattr(owner, name), itertools.count(1)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == nth:
            if not seconds:
                kill()
            threading.Timer(seconds, kill).start()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def within_an_update(nth: int) -> None:
    """The servers have been told of a broadcast, and wait for it."""
    original, calls = BroadcastTransfer._broadcast, itertools.count(1)

    async def wrapped(self: BroadcastTransfer, flat: Any) -> None:
        if next(calls) == nth:
            await asyncio.sleep(0.5)
            kill()
        await original(self, flat)

    BroadcastTransfer._broadcast = wrapped


MOMENTS = {
    "never": lambda: None,
    "as rollouts are waited for": lambda: at(SGLangGenerator, "_wait", 5, 0.02),
    "within an update": lambda: within_an_update(4),
    "in an evaluation": lambda: at(SGLangGenerator, "_evaluate", 2, 0.05),
}


def record(path: Path) -> None:
    finish = Run._finish_batch

    def wrapped(self: Run, groups: Any, prepared: Any, metrics: Any) -> None:
        row = {"step": self.ledger.step + 1, "groups": [[group.group, group.prompt.id] for group in groups]}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        finish(self, groups, prepared, metrics)

    Run._finish_batch = wrapped


if __name__ == "__main__":
    record(Path(sys.argv[1]))
    MOMENTS[sys.argv[2]]()
    sys.argv = ["scalerl", *sys.argv[3:]]
    main()
