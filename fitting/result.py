"""What a fit returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from scalerl.fitting.least_squares import Floats

Pair = tuple[float, float]
Flags = tuple[bool, bool]

WITH_PARAMETERS = ("at-edge", "asymptote-open", "ok")


@dataclass(frozen=True)
class FitResult:
    """One fitted curve. Values are None where the status withholds them.

    status: `too-few-points`, `collapsed`, `flat`, `decreasing`, `at-edge`, `asymptote-open` or `ok`; message says it in
    words. An interval's end that is no end (`*_open`) is the bound: 1 for A, 0 or infinity for B and C_mid. n counts
    curve points, n_base the base evaluation (0 or 1). sd: residual standard deviation; rho: the autocorrelation that
    the intervals allow for. C80_interval: of fits with a held A, among which C80 is compared; else None. `edge` holds a
    grid method's refit on a wider grid. Forms other than the sigmoid put their own parameters into `extra`."""

    status: str
    message: str
    method: str
    form: str
    r0_rule: str
    n: int
    n_base: int
    level: float
    A: float | None = None
    B: float | None = None
    C_mid: float | None = None
    R0: float | None = None
    A_interval: Pair | None = None
    B_interval: Pair | None = None
    C_mid_interval: Pair | None = None
    C80_interval: Pair | None = None
    A_open: Flags | None = None
    B_open: Flags | None = None
    C_mid_open: Flags | None = None
    sd: float | None = None
    rho: float | None = None
    ssr: float | None = None
    warnings: tuple[str, ...] = ()
    edge: dict[str, Any] | None = None
    extra: dict[str, float] = field(default_factory=dict)
    # computes [K] -> values [K], or (values, lows, highs)
    predictor: Callable[[Floats], Any] | None = field(default=None, repr=False, compare=False)

    @property
    def C80(self) -> float | None:
        """Compute at which 80 % of the gain is reached: C_mid 4^(1/B)."""
        if self.B is None or self.C_mid is None:
            return None
        log = math.log(self.C_mid) + math.log(4) / self.B
        return math.exp(log) if log < 700 else math.inf

    def predict(self, C: ArrayLike) -> Any:
        """The curve at compute C (for the entropy law: at entropy C) and its interval, (value, low, high); the grid
        methods, without intervals, give the bare value. Floats for one C, arrays of C's shape for several.

        Raises ValueError where the status withholds the fit, and for a C that is no positive number."""
        if self.predictor is None:
            raise ValueError(f"no prediction: the fit's status is {self.status} ({self.message})")
        at = np.asarray(C, dtype=float)
        usable = ((at > 0) | ((at == 0) & (self.form == "entropy"))) & np.isfinite(at)
        if not usable.all():
            raise ValueError(f"no prediction at C={at[~usable].ravel()[0]:g}: compute is a positive number")
        found = self.predictor(at.ravel())
        shaped = [part.reshape(at.shape) if at.ndim else float(part[0]) for part in np.atleast_2d(found)]
        return tuple(shaped) if len(shaped) > 1 else shaped[0]

    def to_dict(self) -> dict[str, Any]:
        """Everything but the predictor, in plain types."""
        names = [name for name in self.__dataclass_fields__ if name not in ("predictor", "extra", "edge", "warnings")]
        record = {name: getattr(self, name) for name in names}
        return {**record, "C80": self.C80, "warnings": list(self.warnings), "edge": self.edge, **self.extra}
