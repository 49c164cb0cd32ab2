"""Arms against the base: parameters pooled over seeds, ties on the ceiling, efficiency at a common ceiling, and the
probability that each leads at the target (ScaleRL, arXiv 2510.13786, sections 4 and A.5).

A parameter of an arm is the mean over its seeds (C_mid and C80: the geometric mean). Each end of its interval is the
wider of two: the seeds' mean profile interval over sqrt(n), which is the noise of the evaluations, and the t interval
whose sd between seeds is pooled over all arms that have several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.stats import t as t_distribution

from scalerl.fitting.compare import MARGIN, RUN_SD, draws_at, shares_leading
from scalerl.fitting.curves import Curve, Settings, points
from scalerl.fitting.errors import InputError
from scalerl.fitting.fit import fit
from scalerl.fitting.result import Pair
from scalerl.fitting.runs import Floats
from scalerl.sweeps.gather import StudyRun
from scalerl.sweeps.plan import Arm

_DRAWS = 10_000


@dataclass(frozen=True)
class Estimate:
    """A value with its interval; an end that is no end is 0, 1 or infinite."""

    value: float
    low: float
    high: float

    def log(self) -> Estimate:
        return Estimate(*(math.log(v) if v > 0 else -math.inf for v in (self.value, self.low, self.high)))

    def exp(self) -> Estimate:
        return Estimate(*(math.exp(v) if v < 700 else math.inf for v in (self.value, self.low, self.high)))

    def disjoint(self, other: Estimate) -> bool:
        return self.high < other.low or other.high < self.low

    def noise(self, other: Estimate) -> float:
        """What the difference from `other` must exceed: the half-widths that face each other, in quadrature."""
        lower, upper = (self, other) if self.value < other.value else (other, self)
        return math.hypot(lower.high - lower.value, upper.value - upper.low)


@dataclass(frozen=True)
class Spread:
    """Standard deviation between runs that differ in their seed only, pooled over arms, and its degrees of freedom."""

    sd: float
    df: int


@dataclass(frozen=True, eq=False)
class Efficiency:
    """B and C80 of an arm's runs, refitted with the ceiling held at A; curves: these refits. seeds: whether seeds took
    part in the noise."""

    A: float
    B: Estimate
    C80: Estimate
    seeds: bool
    curves: tuple[Curve, ...]


@dataclass(frozen=True, eq=False)
class ArmFit:
    """One arm. curves: free fits of its runs that have a curve. A, B, C_mid, value (at the target): None where no run
    gives parameters. is_open: a run's ceiling isn't seen. tied: A within the margin of the highest. common: refit with
    the A of the tied arms. against: (this arm's, the base's) refit at one A where the two are tied with each other.
    leads, ahead: probability of the highest value at the target, of all arms and of the base and this one."""

    arm: Arm
    runs: tuple[StudyRun, ...]
    curves: tuple[Curve, ...]
    A: Estimate | None = None
    B: Estimate | None = None
    C_mid: Estimate | None = None
    value: Estimate | None = None
    is_open: bool = False
    tied: bool = False
    common: Efficiency | None = None
    against: tuple[Efficiency, Efficiency] | None = None
    leads: float | None = None
    ahead: float | None = None

    @property
    def usable(self) -> list[Curve]:
        return [curve for curve in self.curves if curve.result.A is not None]


@dataclass(frozen=True, eq=False)
class Comparison:
    """The arms of a study, the base first. spread_A: between seeds, None where no arm has two. margin: of ties on A.
    run_sd: at the target. level: of all intervals; common_level: of those of B and C80, which allows for as many
    comparisons as are made (Bonferroni). common_A: mean of the tied arms, None where fewer than two are."""

    target: float
    level: float
    common_level: float
    margin: float
    spread_A: Spread | None
    run_sd: float
    run_sd_from_seeds: bool
    common_A: float | None
    arms: tuple[ArmFit, ...]


def compare_arms(
    runs: Sequence[StudyRun], settings: Settings, *, target: float | None = None, draws: int = _DRAWS, seed: int = 0
) -> Comparison:
    """Fit all runs freely, pool them by arm, refit the tied arms at one ceiling, and weigh all at the target compute
    (default: twice the largest budget). runs: of the plan, by arm, the base first.

    Raises InputError where no run has a curve, and for a target that is no compute."""
    curves = {run.folder: _fitted(run, settings) for run in runs if run.run is not None and len(run.run)}
    if not curves:
        raise InputError("no run of the study has an evaluation yet; start or resume it first")
    goal = target if target is not None else 2 * max(float(curve.run.compute.max()) for curve in curves.values())
    if not (goal > 0 and math.isfinite(goal)):
        raise InputError(f"target={goal}: compute is a positive number")
    names = list(dict.fromkeys(run.arm.name for run in runs))
    arms = [_arm([run for run in runs if run.arm.name == name], curves) for name in names]
    spreads = _spreads(arms, goal)
    arms = [_estimated(arm, spreads, goal, settings.level) for arm in arms]
    spread = spreads["A"]
    margin = MARGIN if spread is None else max(MARGIN, 2 * spread.sd)
    between = spreads["value"]
    run_sd = RUN_SD if between is None else between.sd
    arms = _with_ties(arms, margin)
    arms, common_a, common_level = _at_common_ceilings(arms, margin, settings)
    arms = _weighed(arms, goal, run_sd, draws, seed, settings)
    return Comparison(
        goal, settings.level, common_level, margin, spread, run_sd, between is not None, common_a, tuple(arms)
    )


def _fitted(run: StudyRun, settings: Settings) -> Curve:
    assert run.run is not None
    return Curve(run.run, fit(*points(run.run, settings), **settings.arguments()), settings.window)


def _arm(runs: Sequence[StudyRun], curves: Mapping[str, Curve]) -> ArmFit:
    found = tuple(curves[run.folder] for run in runs if run.folder in curves)
    is_open = any(curve.result.status == "asymptote-open" for curve in found)
    return ArmFit(runs[0].arm, tuple(runs), found, is_open=is_open)


def between_seeds(groups: Sequence[Sequence[float]]) -> Spread | None:
    """Pooled over the groups of two values or more; None where there is none."""
    several = [np.asarray(group, dtype=float) for group in groups if len(group) > 1]
    df = sum(len(group) - 1 for group in several)
    if not df:
        return None
    return Spread(math.sqrt(sum(float(((group - group.mean()) ** 2).sum()) for group in several) / df), df)


def _spreads(arms: Sequence[ArmFit], goal: float) -> dict[str, Spread | None]:
    """Between seeds, of the arms whose ceiling is seen: an open A is no estimate. One that is the base by construction
    would count the base's seeds twice."""
    seen = [[c.result for c in arm.usable] for arm in arms if not arm.is_open and arm.arm.identical is None]
    return {
        "A": between_seeds([[_known(r.A) for r in results] for results in seen]),
        "B": between_seeds([[_known(r.B) for r in results] for results in seen]),
        "C_mid": between_seeds([[math.log(_known(r.C_mid)) for r in results] for results in seen]),
        "value": between_seeds([[r.predict(goal)[0] for r in results] for results in seen]),
    }


def pooled(estimates: Sequence[Estimate], spread: Spread | None, level: float) -> Estimate:
    """The mean of the seeds' estimates; each end the wider of profile and t interval (see above)."""
    n = len(estimates)
    value = float(np.mean([e.value for e in estimates]))
    below = sum(e.value - e.low for e in estimates) / n / math.sqrt(n)
    above = sum(e.high - e.value for e in estimates) / n / math.sqrt(n)
    half = 0.0
    if spread is not None:
        half = float(t_distribution.ppf((1 + level) / 2, spread.df)) * spread.sd / math.sqrt(n)
    return Estimate(value, value - max(below, half), value + max(above, half))


def _estimated(arm: ArmFit, spreads: Mapping[str, Spread | None], goal: float, level: float) -> ArmFit:
    results = [curve.result for curve in arm.usable]
    if not results:
        return arm
    a = pooled([_with(r.A, r.A_interval) for r in results], spreads["A"], level)
    b = pooled([_with(r.B, r.B_interval) for r in results], spreads["B"], level)
    c_mid = pooled([_with(r.C_mid, r.C_mid_interval).log() for r in results], spreads["C_mid"], level)
    value = pooled([Estimate(*r.predict(goal)) for r in results], spreads["value"], level)
    return replace(arm, A=_clipped(a), B=replace(b, low=max(b.low, 0.0)), C_mid=c_mid.exp(), value=_clipped(value))


def _clipped(e: Estimate) -> Estimate:
    return replace(e, low=max(e.low, 0.0), high=min(e.high, 1.0))


def _with_ties(arms: Sequence[ArmFit], margin: float) -> list[ArmFit]:
    ceilings = [arm.A.value for arm in arms if arm.A is not None and not arm.is_open]
    least = max(ceilings, default=math.inf) - margin
    return [replace(arm, tied=arm.A is not None and not arm.is_open and arm.A.value >= least) for arm in arms]


def _at_common_ceilings(
    arms: Sequence[ArmFit], margin: float, settings: Settings
) -> tuple[list[ArmFit], float | None, float]:
    """The tied arms refitted with A at their mean, and each arm that is tied with the base refitted with it: where both
    are tied with the highest those are the same fits, elsewhere A is the mean of the two."""
    base = arms[0]
    near = {arm.arm.name for arm in arms[1:] if arm.arm.identical is None and _near(arm, base, margin)}
    level = 1 - (1 - settings.level) / (2 * max(1, len(near)))  # two numbers, B and C80, for each of them
    at_level = replace(settings, level=level)
    tied = [arm for arm in arms if arm.tied and arm.arm.identical is None]
    common = _refitted(tied, at_level) if len(tied) > 1 else {}
    found = []
    for arm in arms:
        pair = common
        if arm.arm.name in near and not (arm.tied and base.tied):
            pair = _refitted([base, arm], at_level)
        mine, bases = pair.get(arm.arm.name), pair.get(base.arm.name)
        against = (mine, bases) if arm.arm.name in near and mine is not None and bases is not None else None
        found.append(replace(arm, common=common.get(arm.arm.name), against=against))
    return found, next((e.A for e in common.values()), None), level


def _near(arm: ArmFit, base: ArmFit, margin: float) -> bool:
    if arm.A is None or base.A is None or arm.is_open or base.is_open:
        return False
    return abs(arm.A.value - base.A.value) <= margin


def _refitted(arms: Sequence[ArmFit], settings: Settings) -> dict[str, Efficiency]:
    """Arm -> its efficiency with A held at the mean of these arms."""
    ceiling = float(np.mean([_known(arm.A and arm.A.value) for arm in arms]))
    at_ceiling = {**settings.arguments(), "fixed_A": ceiling}
    refits: dict[str, list[Curve]] = {}
    for arm in arms:
        curves = [replace(c, result=fit(*points(c.run, settings), **at_ceiling)) for c in arm.usable]
        if curves := [c for c in curves if c.result.B is not None]:
            refits[arm.arm.name] = curves
    spread_b = between_seeds([[_known(c.result.B) for c in curves] for curves in refits.values()])
    spread_c = between_seeds([[math.log(_known(c.result.C80)) for c in curves] for curves in refits.values()])
    found = {}
    for name, curves in refits.items():
        results = [c.result for c in curves]
        b = pooled([_with(r.B, r.B_interval) for r in results], spread_b, settings.level)
        c80 = pooled([_with(r.C80, r.C80_interval).log() for r in results], spread_c, settings.level).exp()
        b = replace(b, low=max(b.low, 0.0))
        found[name] = Efficiency(ceiling, b, c80, spread_b is not None, tuple(curves))
    return found


def _weighed(
    arms: Sequence[ArmFit], goal: float, run_sd: float, draws: int, seed: int, settings: Settings
) -> list[ArmFit]:
    """Draws of the mean of each arm's seeds at the target; an arm that is the base by construction does not compete."""
    options = settings.arguments()
    samples: dict[str, Floats] = {}
    for i, arm in enumerate(arms):
        each = [
            draws_at(points(curve.run, settings), goal, run_sd, draws, (seed, 1000 * i + j), options)
            for j, curve in enumerate(arm.usable)
        ]
        if each and arm.arm.identical is None:
            samples[arm.arm.name] = np.mean(each, axis=0)
    leads = shares_leading(samples)
    base = samples.get(arms[0].arm.name)
    ahead = {name: float(np.mean(s > base)) for name, s in samples.items() if base is not None and s is not base}
    return [replace(arm, leads=leads.get(arm.arm.name), ahead=ahead.get(arm.arm.name)) for arm in arms]


def _with(value: float | None, interval: Pair | None) -> Estimate:
    return Estimate(_known(value), *(interval or (math.nan, math.nan)))


def _known(value: Any) -> float:
    """A number that the status does not withhold."""
    assert value is not None
    return float(value)
