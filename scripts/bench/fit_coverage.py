"""How often do nominal 95 % intervals hold the truth? Simulated curves, default settings of `fit`, no tuning.

    python scripts/bench/fit_coverage.py --curves 500

75 evaluations evenly spaced up to a compute of 100,000, of which the fit sees those within a window, and one at compute
0; noise of sd 0.0035 on all, independent or AR(1) with rho 0.5 from one evaluation to the next. Counted are A and the
value of the curve at twice the window's end; open intervals count like all others. Prints a Markdown table."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from scalerl.fitting import fit

TRUTHS = {  # R0, A, B, C_mid: rows of Table 1 of ScaleRL (arXiv 2510.13786)
    "batch 2048": (0.40, 0.645, 1.70, 10909.0),
    "ScaleRL": (0.40, 0.610, 1.92, 2542.0),
}
WINDOWS = (50_000.0, 25_000.0)
NOISE_SD = 0.0035
RHOS = {"iid": 0.0, "AR(1) 0.5": 0.5}


@dataclass
class Tally:
    """Of the curves of one setting that gave parameters."""

    fitted: int = 0
    open: int = 0
    held_a: int = 0
    held_value: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", type=int, default=500, help="of each setting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iid", action="store_true", help="without the widening for autocorrelation")
    arguments = parser.parse_args()
    settings = [(t, w, r) for t in TRUTHS for w in WINDOWS for r in RHOS]
    print("| truth | window | noise | curves fitted | A covered | value at twice the budget covered | asymptote-open |")
    print("|---|---|---|---|---|---|---|")
    for number, (truth, window, noise) in enumerate(settings, 1):
        started = time.perf_counter()
        tally = cover(TRUTHS[truth], window, RHOS[noise], arguments.curves, arguments.seed, not arguments.iid)
        share = [
            f"{100 * count / max(tally.fitted, 1):.1f} %" for count in (tally.held_a, tally.held_value, tally.open)
        ]
        print(f"| {truth} | {window:.0f} | {noise} | {tally.fitted} | {' | '.join(share)} |", flush=True)
        print(f"{number}/{len(settings)}, {time.perf_counter() - started:.1f} s", file=sys.stderr)


def cover(
    truth: tuple[float, float, float, float], window: float, rho: float, curves: int, seed: int, autocorrelation: bool
) -> Tally:
    rng, tally = np.random.default_rng(seed), Tally()
    compute = np.linspace(0, 100_000, 76)
    exact = curve(truth, compute)
    at_target = float(curve(truth, np.array([2 * window]))[0])
    for _ in range(curves):
        pass_rate = exact + NOISE_SD * noise(rng, len(compute), rho)
        result = fit(compute, pass_rate, window=(None, window), autocorrelation=autocorrelation)
        if result.A_interval is None:
            continue
        low, high = result.A_interval
        _, value_low, value_high = result.predict(2 * window)
        tally.fitted += 1
        tally.open += result.status == "asymptote-open"
        tally.held_a += low <= truth[1] <= high
        tally.held_value += value_low <= at_target <= value_high
    return tally


def curve(truth: tuple[float, float, float, float], compute: np.ndarray) -> np.ndarray:
    r0, a, b, c_mid = truth
    with np.errstate(divide="ignore"):
        return r0 + (a - r0) * expit(b * (np.log(compute) - np.log(c_mid)))


def noise(rng: np.random.Generator, n: int, rho: float) -> np.ndarray:
    """AR(1) of unit variance; [n]."""
    shocks = rng.standard_normal(n)
    series = np.empty(n)
    series[0] = shocks[0]
    for i in range(1, n):
        series[i] = rho * series[i - 1] + np.sqrt(1 - rho**2) * shocks[i]
    return series


if __name__ == "__main__":
    main()
