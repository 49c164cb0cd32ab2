"""The interval of C80 at a held ceiling."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import f as f_distribution

from scalerl.fitting import fit
from tests.fitting.simulated import SCALERL, noisy, sigmoid

COMPUTE = np.linspace(400, 16_000, 40)


def test_c80_interval_by_a_search_of_its_own():
    """With A and R0 held, C80 and B are the curve: SSR minimised over B alone rises by the same amount at both ends."""
    y = noisy(SCALERL, COMPUTE, seed=3)
    found = fit(COMPUTE, y, fixed_A=0.61, r0=0.40, autocorrelation=False)
    assert found.C80 is not None and found.C80_interval is not None and found.ssr is not None

    def ssr(log_c80: float) -> float:
        def at(b: float) -> float:
            return float(np.sum((sigmoid((0.40, 0.61, b, np.exp(log_c80) / 4 ** (1 / b)), COMPUTE) - y) ** 2))

        return minimize_scalar(at, bounds=(0.5, 6.0), method="bounded", options={"xatol": 1e-10}).fun  # pyright: ignore

    threshold = found.ssr * (1 + f_distribution.ppf(0.95, 1, 38) / 38)
    middle = float(np.log(found.C80))
    low = brentq(lambda c: ssr(c) - threshold, middle - 0.5, middle)
    high = brentq(lambda c: ssr(c) - threshold, middle, middle + 0.5)
    assert np.log(found.C80_interval) == pytest.approx((low, high), abs=1e-5)


def test_free_fits_have_none():
    assert fit(COMPUTE, noisy(SCALERL, COMPUTE, seed=3)).C80_interval is None


def test_c80_interval_covers():
    truth = SCALERL[3] * 4 ** (1 / SCALERL[2])
    compute = np.append(0.0, COMPUTE)
    inside = 0
    for seed in range(80):
        interval = fit(compute, noisy(SCALERL, compute, seed, sd=0.0035), fixed_A=SCALERL[1]).C80_interval
        assert interval is not None
        inside += interval[0] <= truth <= interval[1]
    assert inside >= 71  # 95 % of 80 is 76, sd 2
