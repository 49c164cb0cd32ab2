"""Answers a minute of the math task's verifier.

    python scripts/bench/math_verifier.py --answers 10000 --workers 2

Each prompt has --group answers, as in training, all different, half of them right and written another way than the data
set has them, so that nothing is compared once for many. `plain` answers (fractions, surds, intervals, tuples,
polynomials, products) are compared by their values; `symbolic` ones (sets, equations, units, roots, matrices, unions)
go to math-verify; `mixed` are three plain ones to one symbolic, a guess at what a data set has. Printed are the wall
time over the pool of processes and, since that depends on what else the machine does, the CPU time of one process."""

from __future__ import annotations

import argparse
import time

import numpy as np

from scalerl.rl.tasks.math_verifier import same_answer
from scalerl.rl.tasks.timed_pool import Failed, TimedPool

MIXES = ("plain", "symbolic", "mixed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--group", type=int, default=16, help="answers a prompt")
    parser.add_argument("--mix", choices=MIXES, nargs="*", default=MIXES)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print("| mix | answers | workers | wall, s | a minute | CPU, ms an answer | a minute and core | wrong | failed |")
    print("|---|---|---|---|---|---|---|---|---|")
    for mix in arguments.mix:
        pairs = [pair(mix, arguments.seed, i // arguments.group, i) for i in range(arguments.answers)]
        wall, found = in_processes(pairs, arguments.workers)
        each = cpu_seconds(pairs[: max(1, arguments.answers // 10)])
        wrong = sum(f is not right for f, (_, _, right) in zip(found, pairs, strict=True))
        failed = sum(isinstance(f, Failed) for f in found)
        print(
            f"| {mix} | {len(pairs):,} | {arguments.workers} | {wall:.1f} | {60 * len(pairs) / wall:,.0f} "
            f"| {1e3 * each:.2f} | {60 / each:,.0f} | {wrong} | {failed} |",
            flush=True,
        )


def in_processes(pairs: list[tuple[str, str, bool]], workers: int) -> tuple[float, list[bool | Failed]]:
    """(wall seconds, verdicts) of a pool that has started."""
    pool = TimedPool(same_answer, workers=workers, seconds=30.0, preload=["math_verify"])
    pool.map([(a, b) for a, b, _ in pairs[:workers]])
    start = time.perf_counter()
    found = pool.map([(a, b) for a, b, _ in pairs])
    wall = time.perf_counter() - start
    pool.close()
    return wall, found


def cpu_seconds(pairs: list[tuple[str, str, bool]]) -> float:
    """Of an answer, in this process, after one that loads the library."""
    same_answer("x=1", "x=2")
    start = time.process_time()
    for gold, answer, _ in pairs:
        same_answer(gold, answer)
    return (time.process_time() - start) / len(pairs)


def pair(mix: str, seed: int, prompt: int, i: int) -> tuple[str, str, bool]:
    """(gold, answer, whether they are the same): answer number i, to a prompt."""
    a, b = (int(v) for v in np.random.default_rng((seed, 0, prompt)).integers(2, 10_000, 2))
    rng = np.random.default_rng((seed, 1, i))
    k, right = int(rng.integers(2, 1_000_000)), bool(rng.random() < 0.5)
    off = 0 if right else k
    plain = [
        (rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{a * k + off}}}{{{b * k}}}"),
        (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b + k}-{k + off}}}"),
        (rf"[{a}, {a + b})", rf"[{a + k}-{k - off}, {a + b})"),
        (rf"({a}, {b})", rf"\left({a}, \frac{{{b * k + off}}}{{{k}}}\right)"),
        (rf"x^2+{a + b}x+{a * b}", rf"(x+{a})(x+{b})+{k}-{k + off}"),
        (str(a * b), rf"{a * b + k} - {k + off}"),
    ]
    symbolic = [
        (rf"\{{{a}, {b}\}}", rf"\{{{b}, {a + k}-{k + off}\}}"),
        (rf"y={a}x+{b}", rf"y = {b + k} - {k + off} + {a}x"),
        (str(a), rf"{a + off} \text{{ cm}}"),
        (rf"\sqrt[3]{{{a**3 * b}}}", rf"{a + off}\sqrt[3]{{{b}}}"),
        (matrix(a, b, a + b, 1), matrix(f"{a + k}-{k + off}", b, a + b, 1)),
        (rf"(-\infty,{a})\cup({a + b},\infty)", rf"({a + b + off},\infty)\cup(-\infty,{a})"),
    ]
    kinds = symbolic if mix == "symbolic" or (mix == "mixed" and prompt % 4 == 3) else plain
    return *kinds[prompt % len(kinds) if mix != "mixed" else (prompt // 4 + prompt) % len(kinds)], right


def matrix(a: object, b: object, c: object, d: object) -> str:
    return rf"\begin{{pmatrix}} {a} & {b} \\ {c} & {d} \end{{pmatrix}}"


if __name__ == "__main__":
    main()
