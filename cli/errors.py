"""One clear line for the user's errors, never a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def user_errors() -> Iterator[None]:
    """Print a user's error as one line on stderr and exit 2; a run that ended without a usable result exits 1."""
    try:
        yield
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        print(f"{'error' if code == 2 else 'ended'}: {error}", file=sys.stderr)
        raise SystemExit(code) from None


def _exit_code(error: Exception) -> int | None:
    # Imported here: neither package may slow down `--help`.
    from scalerl.fitting.errors import InputError
    from scalerl.rl.errors import RunEnded, UserError

    if isinstance(error, (UserError, InputError)):
        return 2
    return 1 if isinstance(error, RunEnded) else None
