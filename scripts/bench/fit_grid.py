"""The vectorised grid search against the published one, and the cost of a continuous fit with its intervals.

    python scripts/bench/fit_grid.py --sets 200

Data sets of 75, 36 and 17 points with random truths, half of them with AR(1) noise. Each is searched both ways; the
winning cells must be equal and the ratio of the summed CPU times (other work on the machine does not count), after a
warm-up, is printed. `paper` takes seconds a fit, so 200 sets take long; exit status 1 if a cell differs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import expit

from scalerl.fitting import fit, grid

POINTS = (75, 36, 17)
NOISE_SD, RHO = 0.0035, 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=200, help="data sets searched both ways")
    parser.add_argument("--curves", type=int, default=1000, help="curves of 75 points fitted by `continuous`")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    same = search(rng, arguments.sets) if arguments.sets else True
    if arguments.curves:
        continuous(rng, arguments.curves)
    sys.exit(0 if same else 1)


def search(rng: np.random.Generator, sets: int) -> bool:
    warm_up(rng)
    seconds = {"grid": 0.0, "paper": 0.0}
    different = 0
    for i in range(sets):
        compute, pass_rate, r0 = data_set(rng, POINTS[i % len(POINTS)], RHO * (i // len(POINTS) % 2))
        fast, seconds_grid = timed(lambda: grid.grid(compute, pass_rate, r0))  # noqa: B023
        slow, seconds_paper = timed(lambda: grid.paper(compute, pass_rate, r0))  # noqa: B023
        seconds["grid"] += seconds_grid
        seconds["paper"] += seconds_paper
        if (fast.a, fast.c_mid) != (slow.a, slow.c_mid):
            different += 1
            print(f"set {i}: grid {fast}, paper {slow}")
        print(f"{i + 1}/{sets}, {len(compute)} points, {seconds_paper / seconds_grid:.0f} x", file=sys.stderr)
    ratio = seconds["paper"] / seconds["grid"]
    print("| data sets | same cell | paper, CPU s a fit | grid, CPU ms a fit | ratio |")
    print("|---|---|---|---|---|")
    print(
        f"| {sets} | {sets - different} | {seconds['paper'] / sets:.2f} | {1e3 * seconds['grid'] / sets:.1f} "
        f"| {ratio:.0f} |",
        flush=True,
    )
    return different == 0


def continuous(rng: np.random.Generator, curves: int) -> None:
    """Wall time on one process: fits with the intervals of A, B and C_mid."""
    data = [data_set(rng, POINTS[0], RHO * (i % 2))[:2] for i in range(curves)]
    fit(*data[0])
    started = time.perf_counter()
    for i, (compute, pass_rate) in enumerate(data, 1):
        fit(compute, pass_rate)
        if i % 100 == 0:
            print(f"{i}/{curves}", file=sys.stderr)
    total = time.perf_counter() - started
    print(f"\ncontinuous with intervals: {curves} curves of {POINTS[0]} points in {total:.1f} s", end=", ")
    print(f"{1e3 * total / curves:.1f} ms a curve")


def warm_up(rng: np.random.Generator) -> None:
    compute, pass_rate, r0 = data_set(rng, POINTS[0], 0.0)
    grid.grid(compute, pass_rate, r0)
    grid.paper(compute, pass_rate, r0, grid.A_GRID[:3], grid.C_MID_GRID[:3])


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    started = time.process_time()
    result = call()
    return result, time.process_time() - started


def data_set(rng: np.random.Generator, points: int, rho: float) -> tuple[np.ndarray, np.ndarray, float]:
    """(compute, pass rate, R0) of a run to a random budget, evenly evaluated."""
    r0, a = rng.uniform(0.3, 0.42), rng.uniform(0.5, 0.75)
    b, c_mid = rng.uniform(1.0, 2.5), np.exp(rng.uniform(np.log(1000), np.log(20_000)))
    compute = np.linspace(0, rng.uniform(8_000, 100_000), points + 1)[1:]
    shocks = NOISE_SD * rng.standard_normal(points)
    noise = np.empty(points)
    noise[0] = shocks[0]
    for i in range(1, points):
        noise[i] = rho * noise[i - 1] + np.sqrt(1 - rho**2) * shocks[i]
    pass_rate = r0 + (a - r0) * expit(b * (np.log(compute) - np.log(c_mid))) + noise
    return compute, pass_rate, float(r0)


if __name__ == "__main__":
    main()
