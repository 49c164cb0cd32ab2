"""Readers of runs: any trainer's table, folder or tracker in, `Run` records out."""

from scalerl.fitting.readers.inputs import read_runs

__all__ = ["read_runs"]
