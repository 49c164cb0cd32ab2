"""What each process that computes sets up before it begins."""

from __future__ import annotations

import ctypes
import sys

import torch

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 1024**2
_NEVER = 2**31 - 1


def set_up_process(threads: int) -> None:
    """threads: of torch's operators on the CPU."""
    torch.set_num_threads(threads)
    keep_bars_to_terminals()
    _keep_freed_memory()


def keep_bars_to_terminals() -> None:
    """transformers draws a bar for every model that it reads or writes, into log files too."""
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()


def _keep_freed_memory() -> None:
    """By default glibc gives large freed blocks back to the kernel, which clears every page of the next step's
    activations again (`scripts/bench/cpu_update.py`). Blocks of more than 32 MB still go back."""
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
