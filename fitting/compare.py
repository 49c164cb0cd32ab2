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
_ONE_SD = 0.6827


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
    """Seeds of one arm: mean A with its t interval, and the sd between the runs' values at the target."""

    name: str
    runs: tuple[str, ...]
    A: float
    A_interval: Pair
    run_sd: float


@dataclass(frozen=True)
class Comparison:
    """runs in the order given. common_A: of the tied runs. b_noise: half-width that a difference of two B must exceed
    at the level of the intervals. run_sd: between runs that differ in their seed only, and where it is from."""

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

    Raises InputError for fewer than two runs, and for methods without intervals."""
    curves = _curves(runs)
    if len(curves) < 2:
        raise InputError(f"a comparison needs at least two runs (have {len(curves)})")
    if options.get("method", "continuous") != "continuous" or options.get("form", "sigmoid") != "sigmoid":
        raise InputError("a comparison needs intervals: use method=continuous and form=sigmoid")
    results = {name: fit(x, y, **options) for name, (x, y) in curves.items()}
    usable = [name for name, r in results.items() if r.A is not None]
    goal = float(target) if target is not None else 2 * max(float(np.max(x, initial=0)) for x, _ in curves.values())
    if not (goal > 0 and np.isfinite(goal)):
        raise InputError(f"target={goal}: compute is a positive number")
    values = {name: results[name].predict(goal) for name in usable}
    seeded = _arms(arms or {}, results, {n: v[0] for n, v in values.items()}, options.get("level", 0.95))
    source = "given"
    if run_sd is None:
        run_sd, source = _pooled([arm.run_sd for arm in seeded], [len(arm.runs) for arm in seeded])
    if margin is None:
        margin = max([MARGIN, *(2 * _sd([results[n].A for n in arm.runs]) for arm in seeded)])
    tied = _tied(results, usable, margin)
    common_a = _mean([results[n].A for n in tied]) if tied else None
    at_common = {**options, "fixed_A": common_a}
    common = {n: fit(*curves[n], **at_common) for n in tied} if len(tied) > 1 else {}
    probability = _leading(curves, usable, goal, run_sd, draws, seed, options)
    compared = tuple(
        Compared(name, result, name in tied, common.get(name), value, low, high, probability.get(name))
        for name, result in results.items()
        for value, low, high in [values.get(name, (None, None, None))]
    )
    noise = _b_noise(list(common.values()))
    verdict = _verdict(compared, goal, noise)
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
    ceilings = {name: a for name in usable if (a := results[name].A) is not None}
    if not ceilings:
        return []
    highest = max(ceilings.values())
    return [name for name, a in ceilings.items() if a >= highest - margin]


def _leading(
    curves: Mapping[str, tuple[Floats, Floats]],
    usable: Sequence[str],
    goal: float,
    run_sd: float,
    draws: int,
    seed: int,
    options: Mapping[str, Any],
) -> dict[str, float]:
    """The share of draws in which each run is highest at the target. A draw: a two-piece normal whose sds are the
    distances to the 68 % profile ends, plus the run-to-run sd."""
    if not usable:
        return {}
    one_sd: dict[str, Any] = {**options, "level": _ONE_SD}
    rng, samples = np.random.default_rng(seed), []
    for name in usable:
        value, low, high = fit(*curves[name], **one_sd).predict(goal)
        below, above = max(value - low, 1e-12), max(high - value, 1e-12)
        z = np.abs(rng.standard_normal(draws))
        down = rng.random(draws) < below / (below + above)
        samples.append(value + np.where(down, -below, above) * z + run_sd * rng.standard_normal(draws))
    winners = np.bincount(np.argmax(samples, axis=0), minlength=len(usable))
    return dict(zip(usable, (winners / draws).tolist(), strict=True))


def _arms(
    arms: Mapping[str, str], results: Mapping[str, FitResult], values: Mapping[str, float], level: float
) -> tuple[Arm, ...]:
    found = []
    for arm in dict.fromkeys(arms.values()):
        names = tuple(n for n, a in arms.items() if a == arm and n in values)
        ceilings = [results[n].A for n in names]
        if len(names) < 2:
            continue
        mean = _mean(ceilings)
        half = float(t_distribution.ppf((1 + level) / 2, len(names) - 1)) * _sd(ceilings) / np.sqrt(len(names))
        interval = (max(0.0, mean - half), min(1.0, mean + half))
        found.append(Arm(arm, names, mean, interval, _sd([values[n] for n in names])))
    return tuple(found)


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


def _verdict(runs: Sequence[Compared], goal: float, noise: float | None) -> str:
    usable = [r for r in runs if r.value is not None and r.probability is not None]
    withheld = [f"{r.name} gives no fit ({r.result.status})" for r in runs if r.value is None]
    if not usable:
        return "no run gives a usable fit: " + "; ".join(withheld)
    lead = max(usable, key=lambda r: r.probability or 0.0)
    share = lead.probability or 0.0
    strength = "leads" if share >= 0.95 else "probably leads" if share >= 0.75 else "is not told apart from the others"
    lines = [f"at {goal:.4g} {lead.name} {strength}: highest in {share:.0%} of draws, curve {lead.value:.3f}"]
    tied = [r for r in usable if r.common is not None]
    if len(tied) > 1 and noise is not None:
        order = sorted(tied, key=lambda r: -((r.common and r.common.B) or 0.0))
        steepness = ", ".join(
            f"{r.name} B {r.common.B:.2f}, C80 {r.common.C80:.4g}"
            for r in order
            if r.common and r.common.B and r.common.C80
        )
        bs = [r.common.B for r in order if r.common and r.common.B]
        beyond = "beyond" if max(bs) - min(bs) > noise else "within"
        lines.append(f"tied on A: {steepness}; the B differ {beyond} their noise ({noise:.2f})")
    else:
        best = max(usable, key=lambda r: r.result.A or 0.0)
        lines.append(f"highest ceiling: {best.name}, A {best.result.A:.3f}")
    return "; ".join(lines + withheld)
