"""Figures for a paper: fitted curves on log compute, and the leave-one-out view in which efficiency is a slope."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from scipy.interpolate import PchipInterpolator

from scalerl.fitting.curves import Curve
from scalerl.fitting.errors import InputError
from scalerl.fitting.result import FitResult
from scalerl.fitting.runs import Floats, Run

FORMATS = (".png", ".svg", ".pdf")

# Okabe and Ito's palette, told apart under every common form of colour blindness; its yellow is too pale on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "h")
STYLE: Any = {
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "legend.handlelength": 2.4,
    "pdf.fonttype": 42,  # text stays text
    "svg.fonttype": "none",
    "svg.hashsalt": "scalerl",  # the same figure gives the same bytes
}
_UNITS = {"device_hours": "device-hours", "gpu_hours": "GPU-hours", "flops": "training FLOPs", "samples": "samples"}
_DRAWN, _PROFILED = 200, 40  # points of a drawn curve, and those whose interval is profiled


def curves(
    fits: Sequence[Curve], *, until: float | None = None, title: str | None = None, ceilings: bool = False
) -> Figure:
    """Pass rate against log compute, one colour a run.

    Solid to the end of the fit window, dotted from there to `until` (default: the last point), with the interval's
    band; fitted points filled, points before the window hollow, held-out points as crosses. `ceilings` marks each
    fitted A at the right edge.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.6 + 0.16 * max(0, len(fits) - 3)), layout="constrained")
        axes = figure.add_subplot()
        _pass_rate_panel(axes, fits, until)
        if ceilings:
            _mark_ceilings(axes, fits)
        handles = [_handle(i, _legend(curve)) for i, curve in enumerate(fits)]
        figure.legend(handles=[*handles, *_key(fits)], loc="outside lower left", ncols=1 if len(fits) < 9 else 2)
        if title:
            axes.set_title(plain(title), loc="left")
        return figure


def leave_one_out(
    fits: Sequence[Curve], common: Sequence[Curve], *, until: float | None = None, title: str | None = None
) -> Figure:
    """Figure 7 of ScaleRL (arXiv 2510.13786) for any runs: their curves, and beside them the same points made straight.

    `common` are the fits of the runs tied on A, refitted with one A: log[(R - R0)/(A - R)] is then a line in log C
    whose slope is B. Points outside (R0, A) have no such logarithm; the right panel leaves them out and says how many.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.5 + 0.16 * max(0, len(fits) - 3)), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
        _pass_rate_panel(left, fits, until)
        if title:
            left.set_title(plain(title), loc="left")
        order = {curve.run.name: i for i, curve in enumerate(fits)}
        left_out = sum(linearised(right, curve, order[curve.run.name]) for curve in common)
        label_compute(right, [curve.run for curve in (common or fits)])
        right.set_ylabel(r"$\log\,[(R - R_0)\,/\,(A - R)]$")
        right.set_title(f"with one A = {common[0].result.A:.3f}" if common else "no two runs tied on A", loc="left")
        if left_out:
            note = f"{left_out} point{'s' if left_out > 1 else ''} outside ($R_0$, A) not shown"
            right.text(0.98, 0.03, note, transform=right.transAxes, ha="right", fontsize=7, color="#555555")
        slopes = {curve.run.name: f"slope B {curve.result.B:.2f} with one A" for curve in common}
        handles = [_handle(i, _legend(c, slopes.get(c.run.name))) for i, c in enumerate(fits)]
        figure.legend(handles=[*handles, *_key(fits)], loc="outside lower left", ncols=1 if len(fits) < 9 else 2)
        return figure


def truncation(runs: Sequence[Run], *, title: str | None = None) -> Figure:
    """Truncation rate against log compute, as read with it in place of the pass rate; shaded from the 10 % above which
    training grows unstable (ScaleRL, arXiv 2510.13786, A.15), with a line at the 5 % that training warns of."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.3 + 0.16 * max(0, len(runs) - 3)), layout="constrained")
        axes = figure.add_subplot()
        label_compute(axes, runs)
        for i, run in enumerate(runs):
            positive = run.compute > 0
            colour, marker = look(i)
            axes.plot(run.compute[positive], run.pass_rate[positive], marker=marker, ms=3, lw=1, mew=0, color=colour)
        highest = max(0.12, *(float(run.pass_rate.max(initial=0)) * 1.1 for run in runs))
        axes.axhline(0.05, color="#777777", lw=0.8, ls="--")
        axes.axhspan(0.10, highest, color="#999999", alpha=0.15, lw=0)
        axes.set_ylim(0, highest)
        axes.set_ylabel("truncation rate")
        figure.legend(handles=[_handle(i, plain(run.name)) for i, run in enumerate(runs)], loc="outside lower left")
        if title:
            axes.set_title(plain(title), loc="left")
        return figure


def save(figure: Figure, path: str | Path) -> None:
    """Write PNG (300 dpi), SVG or PDF by the file's ending. Raises InputError where it can't."""
    check_path(path)
    try:
        with matplotlib.rc_context(STYLE):
            metadata: Any = {"Date": None} if str(path).lower().endswith(".svg") else None
            figure.savefig(path, dpi=300, metadata=metadata)
    except OSError as error:
        raise InputError(f"{path}: can't be written ({error.strerror or error})") from None


def check_path(path: str | Path) -> None:
    """Raise InputError on an ending that no figure is written for, before any work is done."""
    if Path(path).suffix.lower() not in FORMATS:
        raise InputError(f"{path}: figures end in {', '.join(FORMATS)}")


def look(i: int) -> tuple[str, str]:
    """(colour, marker) of the i-th run; no two of the first 49 share both."""
    n = len(_COLOURS)
    return _COLOURS[i % n], _MARKERS[(i + i // n) % n]


def _pass_rate_panel(axes: Axes, fits: Sequence[Curve], until: float | None) -> None:
    label_compute(axes, [curve.run for curve in fits])
    for i, curve in enumerate(fits):
        _points(axes, curve, i)
        if curve.result.A is not None:
            _line(axes, curve, i, until)
    axes.set_ylabel("pass rate")


def _mark_ceilings(axes: Axes, fits: Sequence[Curve]) -> None:
    for i, curve in enumerate(fits):
        if curve.result.A is not None and curve.result.status != "asymptote-open":
            axes.axhline(curve.result.A, xmin=0.93, color=look(i)[0], lw=1.4, ls="--")


def _points(axes: Axes, curve: Curve, i: int) -> None:
    run, (colour, marker) = curve.run, look(i)
    positive = run.compute > 0
    before = positive & ~curve.fitted & ~curve.beyond
    beyond = positive & curve.beyond
    axes.plot(run.compute[curve.fitted], run.pass_rate[curve.fitted], marker, ms=3.2, color=colour, mew=0, alpha=0.85)
    axes.plot(run.compute[before], run.pass_rate[before], marker, ms=3.2, color=colour, mfc="white", mew=0.7)
    axes.plot(run.compute[beyond], run.pass_rate[beyond], "x", ms=4, color=colour, mew=1.1, zorder=4)
    for base in run.pass_rate[~positive]:
        # C = 0 has no place on a log axis: the base evaluation stands on the axis itself.
        axes.plot(0, base, ">", ms=4, color=colour, mew=0, transform=axes.get_yaxis_transform(), clip_on=False)


def _line(axes: Axes, curve: Curve, i: int, until: float | None) -> None:
    colour, _ = look(i)
    compute = curve.run.compute
    low, high = compute[curve.fitted].min(), compute[curve.fitted].max()
    last = max(high, until or 0.0, *compute[curve.beyond].tolist())
    if last <= low:
        return
    grid = np.unique(np.append(np.geomspace(low, last, _DRAWN), high))
    value, band_low, band_high = predicted(curve.result, grid)
    axes.plot(grid[grid <= high], value[grid <= high], "-", lw=1.4, color=colour, zorder=3)
    axes.plot(grid[grid >= high], value[grid >= high], ":", lw=1.4, color=colour, zorder=3)
    if band_low is not None and band_high is not None:
        axes.fill_between(grid, band_low, band_high, color=colour, alpha=0.15, lw=0, zorder=1)


def predicted(result: FitResult, grid: Floats) -> tuple[Floats, Floats | None, Floats | None]:
    """The curve on a grid [n], and its interval where the method gives one: profiled at some points, and smooth
    between them."""
    nodes = np.linspace(np.log(grid[0]), np.log(grid[-1]), _PROFILED)
    value, *ends = PchipInterpolator(nodes, np.atleast_2d(result.predict(np.exp(nodes))).T)(np.log(grid)).T
    return (value, ends[0], ends[1]) if ends else (value, None, None)


def linearised(axes: Axes, curve: Curve, i: int) -> int:
    """Draw one run of the linearised panel; returns how many of its points have no place there."""
    colour, marker = look(i)
    result, run = curve.result, curve.run
    a, r0, b, c_mid = result.A, result.R0, result.B, result.C_mid
    if a is None or r0 is None or b is None or c_mid is None:
        return 0
    shown = curve.fitted & (run.pass_rate > r0) & (run.pass_rate < a)
    compute, rate = run.compute[shown], run.pass_rate[shown]
    axes.plot(compute, np.log((rate - r0) / (a - rate)), marker, ms=3.2, color=colour, mew=0, alpha=0.6)
    ends = np.array([run.compute[curve.fitted].min(), run.compute[curve.fitted].max()])
    axes.plot(ends, b * np.log(ends / c_mid), "-", lw=1.4, color=colour, zorder=3)
    return int(curve.fitted.sum() - shown.sum())


def _legend(curve: Curve, slope: str | None = None) -> str:
    result = curve.result
    if result.A is None:
        return f"{plain(curve.run.name)}: {result.status}"
    if result.status == "asymptote-open" and result.A_interval is not None:
        ceiling = f"A at least {result.A_interval[0]:.3f}"
    elif result.A_interval is not None:
        ceiling = f"A {result.A:.3f} [{result.A_interval[0]:.3f}, {result.A_interval[1]:.3f}]"
    else:
        ceiling = f"A {result.A:.3f}"
    rest = [f"B {result.B:.2f}"] if result.B is not None else []
    rest += [rf"$C_{{mid}}$ {_full(result.C_mid)}"] if result.C_mid is not None else []
    return f"{plain(curve.run.name)}: " + ", ".join([ceiling, *rest, *([slope] if slope else [])])


def plain(text: str) -> str:
    """A dollar sign in a user's name opens no formula."""
    return text.replace("$", r"\$")


def _handle(i: int, label: str) -> Line2D:
    colour, marker = look(i)
    return Line2D([], [], color=colour, marker=marker, ms=4, mew=0, lw=1.4, label=label)


def _key(fits: Sequence[Curve]) -> list[Line2D]:
    """One entry that explains crosses and dots, where there are any."""
    if not any(curve.beyond.any() for curve in fits):
        return []
    return [Line2D([], [], color="#555555", ls=":", marker="x", ms=4, lw=1.4, label="extrapolation, held-out points")]


def label_compute(axes: Axes, runs: Sequence[Run]) -> None:
    names = list(dict.fromkeys(run.x_name for run in runs))
    axes.set_xscale("log")
    axes.set_xlabel(plain(" / ".join(_UNITS.get(name.rpartition("/")[2].lower(), name) for name in names)))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _full(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e6 else compact(value)


def compact(value: float) -> str:
    """1500 -> 1.5k, 2.4e6 -> 2.4M; powers of ten where no prefix is usual."""
    if value == 0:
        return "0"
    for size, suffix in ((1.0, ""), (1e3, "k"), (1e6, "M")):
        if 1 <= value / size < 1000:
            return f"{value / size:.3g}{suffix}"
    if 1e-3 <= value < 1:
        return f"{value:.2g}"
    power = int(np.floor(np.log10(value)))
    factor = f"{value / 10.0**power:.3g}"
    return rf"$10^{{{power}}}$" if factor == "1" else rf"${factor}\cdot10^{{{power}}}$"
