"""A study's figures: each arm's curves with their extrapolation, slopes at one ceiling, truncation and entropy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy.special import expit

from scalerl.fitting.curves import Curve
from scalerl.fitting.figures import STYLE, label_compute, linearised, look, plain, predicted
from scalerl.fitting.result import FitResult
from scalerl.fitting.runs import Floats
from scalerl.sweeps.gather import Training
from scalerl.sweeps.report import Report, Row
from scalerl.sweeps.verdicts import UNSTABLE_TRUNCATION, compute

_GREY = "#8a8a8a"
_DRAWN, _SMOOTHED = 200, 10
_ALARM = 0.05  # the truncation rate from which training warns


def all_figures(report: Report) -> dict[str, Figure]:
    """File name -> figure."""
    with matplotlib.rc_context(STYLE):
        return {
            "curves.png": curves(report),
            "slopes.png": slopes(report),
            "truncation.png": truncation(report),
            "entropy.png": entropy(report),
        }


def curves(report: Report) -> Figure:
    """A panel an arm, the base behind it in grey: points of all seeds, the fit of each solid to its last point and
    dotted to the target, with its interval, and dashed what the first part alone predicted."""
    base = next((row for row in report.rows if row.fit is report.comparison.arms[0]), report.rows[0])
    columns = min(3, len(report.rows))
    lines = math.ceil(len(report.rows) / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(5.6, 3.1 * columns), 2.5 * lines + 0.5), layout="constrained")
        panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
        for i, (axes, row) in enumerate(zip(panels.flat, report.rows, strict=False)):
            _behind(axes, base, report.comparison.target)
            _in_front(axes, row, look(i)[0], report.comparison.target)
            axes.set_title(plain(row.name), loc="left", pad=14)
            axes.text(0, 1.02, _ceiling(row), transform=axes.transAxes, fontsize=7.5, color="#555555")
        for axes in panels.flat[len(report.rows) :]:
            axes.set_visible(False)
        runs = [curve.run for row in report.rows for curve in row.fit.curves]
        label_compute(panels[0, 0], runs)
        label = panels[0, 0].get_xlabel()
        panels[0, 0].set_xlabel("")
        figure.supxlabel(label, fontsize=8.5)
        figure.supylabel("pass rate", fontsize=8.5)
        key = [
            ("-", "fit of all points"),
            (":", "extrapolated"),
            ("--", f"predicted from the first {report.fraction:.0%}"),
        ]
        handles = [Line2D([], [], color="#444444", ls=style, lw=1.3, label=text) for style, text in key]
        figure.legend(handles=handles, loc="outside upper left", ncols=3)
        _limit(panels[0, 0], report)
        return figure


def slopes(report: Report) -> Figure:
    """The arms tied on A made straight, with the ceiling that they share."""
    shown = [(i, row) for i, row in enumerate(report.rows) if row.fit.common is not None]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.5 + 0.16 * len(shown)), layout="constrained")
        axes = figure.add_subplot()
        axes.set_ylabel(r"$\log\,[(R - R_0)\,/\,(A - R)]$")
        handles = []
        for i, row in shown:
            common = row.fit.common
            assert common is not None
            for curve in common.curves:
                linearised(axes, curve, i)
            label = f"{plain(row.name)}: B {common.B.value:.2f}, C80 {compute(common.C80.value)}"
            handles.append(_handle(i, label))
        label_compute(axes, [curve.run for row in report.rows for curve in row.fit.curves])
        common_a = report.comparison.common_A
        axes.set_title("no two arms are tied on A" if common_a is None else f"with one A = {common_a:.3f}", loc="left")
        if handles:
            figure.legend(handles=handles, loc="outside lower left")
        return figure


def truncation(report: Report) -> Figure:
    """Share of truncated completions by training step, a line an arm, smoothed over 10 steps; shaded where training
    grows unstable (ScaleRL, arXiv 2510.13786, A.15)."""
    figure, axes, highest = _by_step(report, lambda training: training.truncation)
    top = max(0.12, 1.1 * highest)
    axes.axhline(_ALARM, color="#777777", lw=0.8, ls="--")
    axes.axhspan(UNSTABLE_TRUNCATION, top, color="#999999", alpha=0.15, lw=0)
    axes.set_ylim(0, top)
    axes.set_ylabel("truncation rate")
    return figure


def entropy(report: Report) -> Figure:
    """Entropy of the policy by training step, a line an arm, smoothed over 10 steps."""
    figure, axes, _ = _by_step(report, lambda training: training.entropy)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("entropy (nats a token)")
    return figure


def _behind(axes: Axes, base: Row, target: float) -> None:
    for curve in base.fit.curves:
        positive = curve.run.compute > 0
        axes.plot(curve.run.compute[positive], curve.run.pass_rate[positive], ".", ms=2, color=_GREY, alpha=0.35)
    for curve in base.fit.usable:
        grid = np.geomspace(curve.run.compute[curve.fitted].min(), target, _DRAWN)
        axes.plot(grid, _sigmoid(curve.result, grid), "-", lw=0.9, color=_GREY, alpha=0.8)


def _in_front(axes: Axes, row: Row, colour: str, target: float) -> None:
    cuts = [test.cut for test in row.backtests]
    cut = min(cuts, default=math.inf)
    for curve in row.fit.curves:
        compute_, rate = curve.run.compute, curve.run.pass_rate
        seen, unseen = (compute_ > 0) & (compute_ <= cut), compute_ > cut
        axes.plot(compute_[seen], rate[seen], "o", ms=2.4, mew=0, color=colour, alpha=0.75)
        axes.plot(compute_[unseen], rate[unseen], "x", ms=2.8, mew=0.8, color=colour, alpha=0.75)
    for curve in row.fit.usable:
        _extrapolated(axes, curve, colour, target)
    for test in row.backtests:
        if test.fitted.A is not None and len(test.predictions):
            grid = np.geomspace(test.cut, target, _DRAWN)
            axes.plot(grid, _sigmoid(test.fitted, grid), "--", lw=0.9, color=colour, zorder=3)


def _ceiling(row: Row) -> str:
    if row.fit.A is None:
        return row.fit.curves[0].result.status if row.fit.curves else "no data"
    if row.fit.is_open:
        return f"A at least {row.fit.A.low:.3f}"
    return f"A {row.fit.A.value:.3f} [{row.fit.A.low:.3f}, {row.fit.A.high:.3f}]"


def _limit(axes: Axes, report: Report) -> None:
    """A collapse may leave the panel: it would press all other curves flat."""
    rates = [curve.run.pass_rate for row in report.rows for curve in row.fit.usable]
    if rates:
        low, high = min(float(r.min()) for r in rates), max(float(r.max()) for r in rates)
        axes.set_ylim(bottom=max(axes.get_ylim()[0], low - 0.25 * (high - low)))


def _extrapolated(axes: Axes, curve: Curve, colour: str, target: float) -> None:
    fitted = curve.run.compute[curve.fitted]
    low, high = float(fitted.min()), float(fitted.max())
    grid = np.unique(np.append(np.geomspace(low, max(target, high), _DRAWN), high))
    value, band_low, band_high = predicted(curve.result, grid)
    axes.plot(grid[grid <= high], value[grid <= high], "-", lw=1.1, color=colour, zorder=3)
    axes.plot(grid[grid >= high], value[grid >= high], ":", lw=1.1, color=colour, zorder=3)
    if band_low is not None and band_high is not None:
        axes.fill_between(grid, band_low, band_high, color=colour, alpha=0.10, lw=0, zorder=1)


def _sigmoid(result: FitResult, grid: Floats) -> Floats:
    """Eq. (1) with the fit's parameters, [n]."""
    assert result.A is not None and result.R0 is not None and result.B is not None and result.C_mid is not None
    return result.R0 + (result.A - result.R0) * expit(result.B * (np.log(grid) - np.log(result.C_mid)))


def _by_step(report: Report, column: Callable[[Training], Floats]) -> tuple[Figure, Axes, float]:
    """A line an arm, the mean of its seeds at each step, smoothed; (figure, axes, highest value drawn)."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.3 + 0.16 * len(report.rows)), layout="constrained")
        axes = figure.add_subplot()
        highest, handles = 0.0, []
        for i, row in enumerate(report.rows):
            step, value = _mean_of_seeds([run.training for run in row.fit.runs], column)
            if len(step):
                axes.plot(step, value, lw=1.2, color=look(i)[0], ls=("-", "--", ":")[i // 7 % 3])
                handles.append(
                    Line2D([], [], color=look(i)[0], ls=("-", "--", ":")[i // 7 % 3], lw=1.4, label=plain(row.name))
                )
                highest = max(highest, float(value.max()))
        axes.set_xlabel("training step")
        if handles:
            figure.legend(handles=handles, loc="outside lower left", ncols=2)
        return figure, axes, highest


def _mean_of_seeds(trainings: Sequence[Training], column: Callable[[Training], Floats]) -> tuple[Floats, Floats]:
    """(step, value): the mean over the seeds that have the step, then over the last 10 steps."""
    steps = np.concatenate([t.step for t in trainings])
    values = np.concatenate([column(t) for t in trainings])
    finite = np.isfinite(steps) & np.isfinite(values)
    step, where = np.unique(steps[finite], return_inverse=True)
    if not len(step):
        return step, step
    mean = np.bincount(where, weights=values[finite]) / np.bincount(where)
    sums = np.cumsum(np.insert(mean, 0, 0.0))
    first = np.maximum(np.arange(len(mean)) + 1 - _SMOOTHED, 0)
    last = np.arange(len(mean)) + 1
    return step, (sums[last] - sums[first]) / (last - first)


def _handle(i: int, label: str) -> Line2D:
    colour, marker = look(i)
    return Line2D([], [], color=colour, marker=marker, ms=4, mew=0, lw=1.4, label=label)
