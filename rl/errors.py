"""Errors that are the user's to mend."""


class UserError(ValueError):
    """Bad input. The message is one line that names the file or key and the way out; the CLI prints it and exits 2."""


class RunEnded(Exception):
    """The run ended early with a complete log and no result beyond it (an empty prompt pool); the CLI exits 1."""


class Preempted(Exception):
    """A signal stopped the run at a checkpoint; the message says how to go on. The CLI prints it and exits 0."""
