"""Which run leads, by how much, and how sure one may be (ScaleRL, arXiv 2510.13786, sections 4 and A.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import t as t_distribution

from scalerl.fitting.errors import InputError
from scalerl.fitting.fit import fit
from scalerl.fitting.least_squares import Floats
from scalerl.fitting.result import FitResult, Pair

MARGIN = 0.02  # runs within it of the highest A are tied (three seeds of the paper differed by about that)
RUN_SD = 0.01  # run-to-run sd where no seeds tell (after the paper's +-0.015)
DRAWS = 10_000
ONE_SD = 0.6827  # level of an interval whose ends lie one sd away


Options = Mapping[str, Any]  # of `fit`


class HasCurve(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def compute(self) -> Floats: ...
    @property
    def pass_rate(self) -> Floats: ...


@dataclass(frozen=True)
class Compared:
    """One run among others. common: its refit with A fixed at the tied runs' mean; None where it is not tied. value,
    low, high: the curve at the target, with its interval. probability: the share of draws with the run highest."""

    name: str
    result: FitResult
    tied: bool
    common: FitResult | None
    value: float | None
    low: float | None
    high: float | None
    probability: float | None


@dataclass(frozen=True)
class Arm:
    """Seeds of one arm: mean A with its t interval, the sd between the runs' values at the target, and the share of
    draws in which the mean of its seeds is the highest of all arms (a run without one stands for itself). A and its
    interval are None where a seed's A has no upper end: it is no estimate, and no mean of such is."""

    name: str
    runs: tuple[str, ...]
    A: float | None
    A_interval: Pair | None
    run_sd: float
    probability: float


@dataclass(frozen=True)
class Comparison:
    """runs in the order given. A run whose A has no upper end is neither highest nor tied: its ceiling isn't known.
    common_A: of the tied runs. b_noise: half-width that a difference of two B must exceed at the level of the
    intervals. run_sd: between runs that differ in their seed only, and where it is from."""

    target: float
    margin: float
    run_sd: float
    run_sd_source: str
    common_A: float | None
    b_noise: float | None
    runs: tuple[Compared, ...]
    arms: tuple[Arm, ...]
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        runs = [
            {
                "name": r.name,
                "status": r.result.status,
                "A": r.result.A,
                "tied": r.tied,
                "common_A_B": None if r.common is None else r.common.B,
                "common_A_B_interval": None if r.common is None else r.common.B_interval,
                "common_A_C_mid": None if r.common is None else r.common.C_mid,
                "common_A_C80": None if r.common is None else r.common.C80,
                "value": r.value,
                "low": r.low,
                "high": r.high,
                "probability": r.probability,
            }
            for r in self.runs
        ]
        names = ("target", "margin", "run_sd", "run_sd_source", "common_A", "b_noise", "verdict")
        return {**{n: getattr(self, n) for n in names}, "runs": runs, "arms": [vars(a) for a in self.arms]}


def compare(
    runs: Mapping[str, tuple[ArrayLike, ArrayLike]] | Sequence[HasCurve],
    *,
    target: float | None = None,
    arms: Mapping[str, str] | None = None,
    margin: float | None = None,
    run_sd: float | None = None,
    draws: int = DRAWS,
    seed: int = 0,
    **options: Any,
) -> Comparison:
    """Fit all runs freely, refit those tied on A with one A, and weigh them at the target compute.

    runs: name -> (compute, pass_rate), or records with these attributes. target: compute; default twice the largest
    budget. arms: run name -> arm name; an arm of several runs is one recipe under several seeds, which gives the margin
    (twice the sd of A between seeds, at least MARGIN) and the run-to-run sd unless they are given. options: of `fit`.

    Raises InputError for fewer than two runs, an arm of a run that is not there, and methods without intervals."""
    curves = _curves(runs)
    if len(curves) < 2:
        raise InputError(f"a comparison needs at least two runs (have {len(curves)})")
    if unknown := [name for name in arms or {} if name not in curves]:
        raise InputError(f"arms names '{unknown[0]}', which is no run here; the runs are {', '.join(curves)}")
    if options.get("method", "continuous") != "continuous" or options.get("form", "sigmoid") != "sigmoid":
        raise InputError("a comparison needs intervals: use method=continuous and form=sigmoid")
    results = {name: fit(x, y, **options) for name, (x, y) in curves.items()}
    usable = [name for name, r in results.items() if r.A is not None]
    budgets = [float(np.max(x[np.isfinite(x)], initial=0)) for x, _ in curves.values()]
    goal = float(target) if target is not None else 2 * max(budgets)
    if not (goal > 0 and np.isfinite(goal)):
        raise InputError(f"target={goal}: compute is a positive number")
    values = {name: results[name].predict(goal) for name in usable}
    seeds = _seeds(arms or {}, usable)
    source = "given"
    closed = [names for names in seeds.values() if not any(_is_open(results[n]) for n in names)]
    if run_sd is None:
        run_sd, source = _pooled([_sd([values[n][0] for n in names]) for names in closed], [len(n) for n in closed])
    if margin is None:
        margin = max([MARGIN, *(2 * _sd([results[n].A for n in names]) for names in closed)])
    tied = _tied(results, usable, margin)
    common_a = _mean([results[n].A for n in tied]) if tied else None
    at_common = {**options, "fixed_A": common_a}
    common = {n: fit(*curves[n], **at_common) for n in tied} if len(tied) > 1 else {}
    samples = {n: draws_at(curves[n], goal, run_sd, draws, (seed, i), options) for i, n in enumerate(usable)}
    probability = shares_leading(samples)
    recipes = shares_leading(_recipes(samples, seeds))
    compared = tuple(
        Compared(name, result, name in tied, common.get(name), value, low, high, probability.get(name))
        for name, result in results.items()
        for value, low, high in [values.get(name, (None, None, None))]
    )
    level = options.get("level", 0.95)
    seeded = tuple(_arm(arm, n, results, values, recipes[arm], level) for arm, n in seeds.items())
    noise = _b_noise(list(common.values()))
    verdict = "; ".join([*_leader(recipes, seeds, values, goal), *_ceilings(compared, noise), *_withheld(compared)])
    return Comparison(goal, margin, run_sd, source, common_a, noise, compared, seeded, verdict)


def _curves(runs: Mapping[str, tuple[ArrayLike, ArrayLike]] | Sequence[HasCurve]) -> dict[str, tuple[Floats, Floats]]:
    pairs = list(runs.items()) if isinstance(runs, Mapping) else [(r.name, (r.compute, r.pass_rate)) for r in runs]
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise InputError(
            f"two runs are named '{next(n for n in names if names.count(n) > 1)}'; give them names of their own"
        )
    return {name: (np.asarray(x, dtype=float), np.asarray(y, dtype=float)) for name, (x, y) in pairs}


def _tied(results: Mapping[str, FitResult], usable: Sequence[str], margin: float) -> list[str]:
    """Within the margin of the highest A, of those with an upper end: an open A is no estimate."""
    ceilings = {name: a for name in usable if (a := results[name].A) is not None and not _is_open(results[name])}
    return [name for name, a in ceilings.items() if a >= max(ceilings.values()) - margin]


def _seeds(arms: Mapping[str, str], usable: Sequence[str]) -> dict[str, list[str]]:
    """Arm -> its runs, of arms with two usable runs or more."""
    found: dict[str, list[str]] = {}
    for name in usable:
        if name in arms:
            found.setdefault(arms[name], []).append(name)
    return {arm: names for arm, names in found.items() if len(names) > 1}


def draws_at(
    curve: tuple[Floats, Floats], goal: float, run_sd: float, draws: int, seed: tuple[int, int], options: Options
) -> Floats:
    """Values of one run (compute, pass rate) at the target, [draws]: a two-piece normal whose sds are the distances to
    the 68 % profile ends, plus the run-to-run sd. The run's fit must give parameters."""
    value, low, high = fit(*curve, **{**options, "level": ONE_SD}).predict(goal)
    return two_piece(value, low, high, run_sd, draws, np.random.default_rng(seed))


def two_piece(value: float, low: float, high: float, run_sd: float, draws: int, rng: np.random.Generator) -> Floats:
    """[draws] of a two-piece normal about `value` whose sds are the distances to `low` and `high` (68 % profile ends),
    plus the run-to-run sd."""
    below, above = max(value - low, 1e-12), max(high - value, 1e-12)
    z = np.abs(rng.standard_normal(draws))
    down = rng.random(draws) < below / (below + above)
    return value + np.where(down, -below, above) * z + run_sd * rng.standard_normal(draws)


def _recipes(samples: Mapping[str, Floats], seeds: Mapping[str, Sequence[str]]) -> dict[str, Floats]:
    """The draws of each arm's mean, and of the runs that stand alone."""
    inside = {name for names in seeds.values() for name in names}
    means = {arm: np.mean([samples[n] for n in names], axis=0) for arm, names in seeds.items()}
    return means | {name: sample for name, sample in samples.items() if name not in inside}


def shares_leading(samples: Mapping[str, Floats]) -> dict[str, float]:
    """The share of draws in which each is highest."""
    if not samples:
        return {}
    winners = np.argmax(list(samples.values()), axis=0)
    shares = np.bincount(winners, minlength=len(samples)) / len(winners)
    return dict(zip(samples, shares.tolist(), strict=True))


def _arm(
    arm: str,
    names: Sequence[str],
    results: Mapping[str, FitResult],
    values: Mapping[str, Any],
    probability: float,
    level: float,
) -> Arm:
    between = _sd([values[n][0] for n in names])
    if any(_is_open(results[n]) for n in names):
        return Arm(arm, tuple(names), None, None, between, probability)
    ceilings = [results[n].A for n in names]
    mean = _mean(ceilings)
    half = float(t_distribution.ppf((1 + level) / 2, len(names) - 1) * _sd(ceilings) / np.sqrt(len(names)))
    return Arm(arm, tuple(names), mean, (max(0.0, mean - half), min(1.0, mean + half)), between, probability)


def _mean(values: Sequence[float | None]) -> float:
    return float(np.mean(np.array(values, dtype=float)))


def _sd(values: Sequence[float | None]) -> float:
    return float(np.std(np.array(values, dtype=float), ddof=1))


def _pooled(sds: Sequence[float], counts: Sequence[int]) -> tuple[float, str]:
    if not sds:
        return RUN_SD, "assumed"
    weights = np.array(counts, dtype=float) - 1
    return float(np.sqrt(np.average(np.square(sds), weights=weights))), "seeds"


def _b_noise(common: Sequence[FitResult]) -> float | None:
    """The half-width of the interval of a difference of two B: half-widths of the two largest, in quadrature."""
    widths = sorted((r.B_interval[1] - r.B_interval[0]) / 2 for r in common if r.B_interval is not None)
    widths = [w for w in widths if np.isfinite(w)]
    return float(np.hypot(*widths[-2:])) if len(widths) > 1 else None


def _is_open(result: FitResult) -> bool:
    return result.A_open is not None and result.A_open[1]


def _ceiling(result: FitResult) -> str:
    if result.status == "asymptote-open" and result.A_interval is not None:
        return f"at least {result.A_interval[0]:.3f}"
    return f"{result.A:.3f}"


def _leader(
    recipes: Mapping[str, float], seeds: Mapping[str, Sequence[str]], values: Mapping[str, Any], goal: float
) -> list[str]:
    if not recipes:
        return ["no run gives a usable fit"]
    lead = max(recipes, key=lambda name: recipes[name])
    share, value = recipes[lead], _mean([values[n][0] for n in seeds.get(lead, [lead])])
    if len(recipes) == 1:
        return [f"at {goal:.4g} only {lead} gives a value, {value:.3f}"]
    strength = "leads" if share >= 0.95 else "probably leads" if share >= 0.75 else "is not told apart from the others"
    of_seeds = f" (mean of {len(seeds[lead])} seeds)" if lead in seeds else ""
    return [f"at {goal:.4g} {lead}{of_seeds} {strength}: highest in {share:.0%} of draws, curve {value:.3f}"]


def _ceilings(runs: Sequence[Compared], noise: float | None) -> list[str]:
    """What is known of A, and where it ties, of B."""
    lines = []
    tied = [(r.name, r.common.B, r.common.C80) for r in runs if r.common is not None and r.common.B is not None]
    fitted = [r for r in runs if r.result.A is not None]
    seen, still_open = ([r for r in fitted if _is_open(r.result) == is_open] for is_open in (False, True))
    if len(tied) > 1 and noise is not None:
        tied.sort(key=lambda run: -run[1])
        each = ", ".join(f"{name} B {b:.2f}, C80 {c80:.4g}" for name, b, c80 in tied)
        beyond = "beyond" if tied[0][1] - tied[-1][1] > noise else "within"
        lines.append(f"tied on A: {each}; the B differ {beyond} their noise ({noise:.2f})")
    highest = max((r.result.A_interval[1] for r in seen if r.result.A_interval is not None), default=1.0)
    above = [r for r in still_open if r.result.A_interval is not None and r.result.A_interval[0] > highest]
    if above:
        lines.append("highest ceiling: " + ", ".join(f"{r.name}, A {_ceiling(r.result)}" for r in above))
    elif seen and not lines:
        best = max(seen, key=lambda r: r.result.A or 0.0)
        lines.append(f"highest ceiling: {best.name}, A {_ceiling(best.result)}")
    return lines + [f"{r.name}'s is open, A {_ceiling(r.result)}" for r in still_open if r not in above]


def _withheld(runs: Sequence[Compared]) -> list[str]:
    return [f"{r.name} gives no fit ({r.result.status})" for r in runs if r.value is None]
