"""Ranks of a distributed test, each a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing.spawn import start_processes


def on_ranks(size: int, function: Callable[..., None], *arguments: Any) -> None:
    """function(rank, *arguments) on `size` ranks; a failure of one is raised here. The processes are no forks of this
    one: gloo, once used, keeps a thread that a fork lacks, and its ranks would wait for ever."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])  # they import `function` by its module
        start_processes(function, args=arguments, nprocs=size, start_method="forkserver")
