"""Answers a minute of the math task's verifier.

    python scripts/bench/math_verifier.py --answers 10000 --workers 2

Each prompt has --group answers, as in training, all different (fractions, surds, intervals, tuples, polynomials,
products; half of them right, and written another way than the data set has them), so that nothing is compared once for
many. Printed are the wall time over the
pool of processes and, since that depends on what else the machine does, the CPU time of one process for a tenth of
them."""

from __future__ import annotations

import argparse
import time

import numpy as np

from scalerl.rl.tasks.math_verifier import same_answer
from scalerl.rl.tasks.timed_pool import Failed, TimedPool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--group", type=int, default=16, help="answers a prompt")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    pairs = [pair(arguments.seed, i // arguments.group, i) for i in range(arguments.answers)]
    pool = TimedPool(same_answer, workers=arguments.workers, seconds=5.0, preload=["math_verify"])
    pool.map([(a, b) for a, b, _ in pairs[: arguments.workers]])
    start = time.perf_counter()
    found = pool.map([(a, b) for a, b, _ in pairs])
    wall = time.perf_counter() - start
    pool.close()
    sample = pairs[: max(1, arguments.answers // 10)]
    same_answer(*sample[0][:2])
    cpu = time.process_time()
    for gold, answer, _ in sample:
        same_answer(gold, answer)
    each = (time.process_time() - cpu) / len(sample)
    wrong = sum(f is not right for f, (_, _, right) in zip(found, pairs, strict=True))
    failed = sum(isinstance(f, Failed) for f in found)
    print("| answers | workers | wall, s | answers a minute | CPU, ms an answer | a minute and core | wrong | failed |")
    print("|---|---|---|---|---|---|---|---|")
    print(
        f"| {len(pairs):,} | {arguments.workers} | {wall:.1f} | {60 * len(pairs) / wall:,.0f} | {1e3 * each:.1f} "
        f"| {60 / each:,.0f} | {wrong} | {failed} |"
    )


def pair(seed: int, prompt: int, i: int) -> tuple[str, str, bool]:
    """(gold, answer, whether they are the same): answer number i, to a prompt."""
    a, b = (int(v) for v in np.random.default_rng((seed, 0, prompt)).integers(2, 10_000, 2))
    rng = np.random.default_rng((seed, 1, i))
    k, right = int(rng.integers(2, 1_000_000)), bool(rng.random() < 0.5)
    off = 0 if right else k
    kinds = [
        (rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{a * k + off}}}{{{b * k}}}"),
        (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b + k}-{k + off}}}"),
        (rf"[{a}, {a + b})", rf"[{a + k}-{k - off}, {a + b})"),
        (rf"({a}, {b})", rf"\left({a}, \frac{{{b * k + off}}}{{{k}}}\right)"),
        (rf"x^2+{a + b}x+{a * b}", rf"(x+{a})(x+{b})+{k}-{k + off}"),
        (str(a * b), rf"{a * b + k} - {k + off}"),
    ]
    return *kinds[prompt % len(kinds)], right


if __name__ == "__main__":
    main()
