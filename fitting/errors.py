"""Errors in what the user handed to a reader or a fit."""


class InputError(ValueError):
    """Bad input. The message is one line that names file, line or column and the way out; the CLI exits 2."""
