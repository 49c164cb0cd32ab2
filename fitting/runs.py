"""The record that every reader returns and every fit takes: one run's held-out curve, and what was done to get it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_LISTED = 10_000  # dropped rows that are listed one by one; the rest are counted

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Source:
    """A file of a run. `sha256` is of its bytes; of the downloaded rows for a run that was read over the network."""

    path: str
    sha256: str


@dataclass(frozen=True)
class Dropped:
    """A row that was not used: its file, its line there (row or record, where the format has no lines), and why."""

    file: str
    line: int
    reason: str


@dataclass(frozen=True, eq=False)
class Run:
    """One curve, ready to fit: n evaluations in training order, compute never falling, pass rates in [0, 1].

    `compute` is cumulative, in the unit of the column `x_name`; a C = 0 entry is the base evaluation. `held_out` marks
    points that the input itself keeps from the fit (a `split` column). `step` and `entropy` (nats) are None where the
    input has none; `entropy` may hold NaN for single evaluations. `arm` is the run's name without its seed, where the
    input tells seeds apart. All arrays have shape [n].
    """

    name: str
    compute: Floats
    pass_rate: Floats
    held_out: NDArray[np.bool_]
    step: Floats | None = None
    entropy: Floats | None = None
    arm: str | None = None
    x_name: str = "compute"
    y_name: str = "pass_rate"
    sources: tuple[Source, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    n_dropped: int = 0
    messages: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.compute)
