"""One clear line for the user's errors, never a traceback."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_CODES = (
    ("scalerl.rl.errors", "UserError", 2),
    ("scalerl.fitting.errors", "InputError", 2),
    ("scalerl.rl.errors", "RunEnded", 1),
    ("scalerl.rl.errors", "Preempted", 0),
)
_LABELS = {0: "preempted", 1: "ended", 2: "error"}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def user_errors() -> Iterator[None]:
    """Print a user's error as one line on stderr and exit 2; a run that ended without a usable result exits 1, one that
    a signal stopped at a checkpoint 0."""
    try:
        yield
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        print(f"{_LABELS[code]}: {_words(error)}", file=sys.stderr)
        raise SystemExit(code) from None


def _words(error: Exception) -> object:
    if not isinstance(error, OSError):
        return error
    if error.errno in _NO_ROOM:
        return f"{error}; make room and try again (a run or study with --resume)"
    return f"{error.filename} can't be used: {error.strerror}"


def _exit_code(error: Exception) -> int | None:
    if isinstance(error, OSError) and (error.errno in _NO_ROOM or error.filename is not None):
        return 2
    # A class whose module was never imported was never raised: nothing is loaded to tell.
    for module, name, code in _CODES:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(error, kind):
            return code
    return None
