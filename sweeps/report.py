"""From a study's folder, finished or not, to verdicts, tables, figures and one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scalerl.fitting.backtest import Backtest, backtest
from scalerl.fitting.compare import MARGIN
from scalerl.fitting.curves import Curve, Settings, points
from scalerl.fitting.errors import InputError
from scalerl.sweeps.comparison import ArmFit, Comparison, compare_arms
from scalerl.sweeps.gather import StudyRun, gather
from scalerl.sweeps.plan import Plan, read_plan
from scalerl.sweeps.verdicts import Verdict, compute, verdict

UNITS = {"flops": "training FLOPs", "device_hours": "device-hours"}


@dataclass(frozen=True, eq=False)
class Row:
    """One arm. backtests: of its runs that have points beyond the cut. mae, coverage: means over those that gave a fit,
    None where none did."""

    fit: ArmFit
    verdict: Verdict
    backtests: tuple[Backtest, ...]

    @property
    def name(self) -> str:
        return self.fit.arm.name

    @property
    def mae(self) -> float | None:
        return _mean([b.mae for b in self.backtests])

    @property
    def coverage(self) -> float | None:
        return _mean([b.coverage for b in self.backtests])


@dataclass(frozen=True, eq=False)
class Report:
    """rows: the arms in the plan's order, of a study of kind `axis` by the swept value. fraction: of its compute that
    each run's prediction is fitted on. troubles: runs that are missing, unfinished or unreadable. notes: what the
    numbers rest on, one sentence each."""

    plan: Plan
    comparison: Comparison
    fraction: float
    rows: tuple[Row, ...]
    troubles: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def usable(self) -> bool:
        """Whether any arm gives parameters."""
        return any(row.fit.A is not None for row in self.rows)


def report(
    study: Path, *, target: float | None = None, fraction: float = 0.5, settings: Settings | None = None
) -> Report:
    """Fit and compare the arms of the study in `study`.

    target: compute at which the arms are weighed, by default twice the largest budget. fraction: of its own compute on
    which each run is fitted to predict the rest of it. settings: of the fits.

    Raises InputError where `study` is no study, and where none of its runs has an evaluation yet."""
    if not 0 < fraction < 1:
        raise InputError(f"fraction={fraction}: between 0 and 1, for example 0.5")
    settings = settings or Settings()
    plan = read_plan(study)
    runs = gather(study, plan)
    comparison = compare_arms(runs, settings, target=target)
    rows = [Row(arm, verdict(arm, comparison), _backtests(arm, fraction, settings)) for arm in comparison.arms]
    if plan.kind == "axis":
        rows.sort(key=lambda row: _swept(plan, row))
    notes = _notes(plan, comparison, fraction)
    return Report(plan, comparison, fraction, tuple(rows), tuple(_troubles(runs)), tuple(notes))


def _backtests(arm: ArmFit, fraction: float, settings: Settings) -> tuple[Backtest, ...]:
    return tuple(found for curve in arm.curves if (found := _backtest(curve, fraction, settings)) is not None)


def _backtest(curve: Curve, fraction: float, settings: Settings) -> Backtest | None:
    try:
        return backtest(*points(curve.run, settings), fraction=fraction, **settings.arguments())
    except InputError:  # no point beyond the cut: a run that has only begun
        return None


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else None


def _swept(plan: Plan, row: Row) -> float:
    """The number that a study of kind `axis` sweeps; the base's is what the others differ from."""
    arm = row.fit.arm
    value = arm.name.partition("=")[2]
    if arm is plan.arms[0]:
        axis = next((a.axis for a in plan.arms if a.axis is not None), None)
        before = [pair[0] for a in plan.arms for key, pair in a.difference.items() if _is_key(key, axis)]
        value = before[0] if before else ""
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("inf")  # a swept word, such as a model: the plan's order, with these last


def _is_key(key: str, axis: str | None) -> bool:
    return axis in (key, key.rpartition(".")[2])


def _troubles(runs: list[StudyRun]) -> list[str]:
    """One line a run that isn't whole."""
    return [f"{run.arm.name} seed {run.seed}: {run.trouble}" for run in runs if run.trouble is not None]


def _notes(plan: Plan, c: Comparison, fraction: float) -> list[str]:
    """What the numbers rest on, a paragraph each."""
    notes = [
        f"Arms are compared on {plan.x} ({UNITS.get(plan.x, 'a column of the evaluations')}), at the target "
        f"{compute(c.target)}."
    ]
    if plan.x == "flops":
        notes.append(
            "Runs that share cores slow each other down, so that hours would measure the neighbours; flops don't, but "
            "they show no idle time either."
        )
    if c.spread_A is None:
        notes.append(
            f"Tied on A: within {c.margin:.3f} of the highest, the published margin, since no arm has two seeds with a "
            f"fit. The run-to-run sd at the target is assumed, {c.run_sd:.3f}. One seed an arm can't tell a small "
            "effect from luck: such verdicts say perhaps."
        )
    else:
        why = "the published margin, above 2 sd" if c.margin <= MARGIN else "2 sd"
        notes.append(
            f"Seeds of one arm differ in A by an sd of {c.spread_A.sd:.4f} (pooled over the arms, {c.spread_A.df} "
            f"degrees of freedom). Tied on A: within {c.margin:.3f} of the highest ({why}). The run-to-run sd at the "
            f"target is {c.run_sd:.4f}, from the seeds."
        )
    if c.common_A is not None:
        notes.append(
            f"B and C80 (the compute of 80 % of the gain) are of refits with A = {c.common_A:.3f}, the mean of the "
            f"arms tied on A. Their brackets are {c.common_level:.1%} intervals, so that all comparisons with the base "
            f"together hold at {c.level:.0%}; a difference within both in quadrature is noise."
        )
    notes += [f"No arm {name}: {reason}." for name, reason in plan.skipped.items()]
    notes.append(
        f"Other brackets are {c.level:.0%} intervals. Each end is the wider of two: the fits' own, which is the noise "
        "of the evaluations, and where there are seeds the t interval between them."
    )
    notes.append(
        f"Each run was also fitted on the first {fraction:.0%} of its compute alone. MAE and the share inside the "
        "interval say how well that predicted the rest: the ground for believing an extrapolation, or for not."
    )
    return notes
