"""`scalerl fit`: fits, intervals and predictions of any runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from scalerl.cli import fit_options as o
from scalerl.cli.errors import user_errors

if TYPE_CHECKING:
    from scalerl.fitting.curves import Curve, Settings
    from scalerl.fitting.runs import Run


def fit(
    inputs: o.Inputs,
    extrapolate: o.Extrapolate = None,
    x: o.X = None,
    y: o.Y = None,
    run: o.RunColumn = None,
    entropy: o.Entropy = None,
    scale: o.Scale = None,
    keep: o.Keep = "last",
    on_compute_reset: o.OnComputeReset = "error",
    compute_per_step: o.ComputePerStep = None,
    eval_set: o.EvalSet = "held_out",
    fit_min: o.FitMin = None,
    fit_max: o.FitMax = None,
    r0: o.R0 = None,
    method: o.Method = "continuous",
    form: o.Form = "sigmoid",
    a_grid: o.AGrid = None,
    cmid_grid: o.CMidGrid = None,
    level: o.Level = 0.95,
    iid: o.Iid = False,
    compare: Annotated[bool, typer.Option("--compare", help="Which run leads, and with what probability.")] = False,
    backtest: Annotated[bool, typer.Option("--backtest", help="Fit the first half and predict the second.")] = False,
    json_file: Annotated[Optional[str], typer.Option("--json", help="JSON to a file, or `-` for stdout.")] = None,  # noqa: UP045
    csv_file: Annotated[Optional[str], typer.Option("--csv", help="CSV to a file, or `-` for stdout.")] = None,  # noqa: UP045
    plot: Annotated[Optional[str], typer.Option("--plot", help="Figure: FILE.png, .svg or .pdf.")] = None,  # noqa: UP045
) -> None:
    """Fit pass rate against compute, with honest intervals, and extrapolate.

    Fits R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B) to every run: A is the ceiling, B and C_mid the efficiency.

    `scalerl fit runs/base runs/dapo --extrapolate 2x --compare --plot curves.pdf`
    """
    with user_errors():
        from scalerl.fitting.errors import InputError
        from scalerl.fitting.readers import read_runs

        check_outputs(inputs, json_file, csv_file, plot)
        settings = o.settings(r0, fit_min, fit_max, method, form, a_grid, cmid_grid, level, iid)
        if form == "entropy" and (extrapolate or plot or backtest):
            raise InputError("--form entropy has no compute axis; leave out --extrapolate, --plot and --backtest")
        runs = read_runs(
            inputs,
            x=x,
            y=y,
            run=run,
            scale=scale,
            keep=keep,
            on_compute_reset=on_compute_reset,
            compute_per_step=compute_per_step,
            eval_set=eval_set,
            entropy=entropy,
        )
        curves = fit_with_progress(runs, settings)
        _report(curves, settings, extrapolate, compare, backtest, json_file, csv_file, plot)
        if not any(curve.result.A is not None for curve in curves):
            raise typer.Exit(1)


def fit_with_progress(runs: list[Run], settings: Settings) -> list[Curve]:
    """Fit all runs; a bar on a terminal, a line for each tenth of many runs elsewhere."""
    import os
    import sys

    from scalerl.fitting.curves import fit_runs

    processes = min(os.cpu_count() or 1, 8)
    if len(runs) < 10:
        return fit_runs(runs, settings)
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("fitting", total=len(runs))
            return fit_runs(runs, settings, processes=processes, on_fitted=lambda: progress.advance(bar))
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        if done * 10 // len(runs) > (done - 1) * 10 // len(runs):
            print(f"fitted {done} of {len(runs)} runs", file=sys.stderr)

    return fit_runs(runs, settings, processes=processes, on_fitted=count)


def check_outputs(inputs: Sequence[str], json_file: str | None, csv_file: str | None, plot: str | None) -> None:
    """Refuse, before any work, what could not be written after it, or would be lost by it."""
    from scalerl.fitting.errors import InputError

    if json_file == "-" and csv_file == "-":
        raise InputError("--json - and --csv - both want stdout; give one of them a file")
    if plot is not None:
        from scalerl.fitting.figures import check_path

        check_path(plot)
    for path in (json_file, csv_file, plot):
        if path is not None and path != "-":
            if not Path(path).parent.is_dir():
                raise InputError(f"{path}: can't be written, there is no folder {Path(path).parent}")
            if Path(path).is_dir():
                raise InputError(f"{path}: can't be written, it is a folder")
    outputs = [Path(path).resolve() for path in (json_file, csv_file, plot) if path not in (None, "-")]
    read = {Path(path).resolve() for text in inputs for path in (text, *text.partition("=")[2].split(",")) if path}
    for path in outputs:
        if path in read or outputs.count(path) > 1:
            raise InputError(f"{path.name} would be overwritten: it is {'read' if path in read else 'written'} too")
    if csv_file not in (None, "-") and _is_foreign(Path(csv_file)):
        raise InputError(f"{csv_file} holds something else than fits, and --csv would overwrite it; name another file")


def _is_foreign(table: Path) -> bool:
    """Whether a file is there whose first line is not that of `--csv`, as where an input was meant."""
    try:
        with table.open("rb") as file:
            return not file.readline().startswith((b"version,name,", b"\n")) and table.stat().st_size > 0
    except OSError:
        return False


def _report(
    curves: list[Curve],
    settings: Settings,
    extrapolate: list[str] | None,
    compare: bool,
    backtest: bool,
    json_file: str | None,
    csv_file: str | None,
    plot: str | None,
) -> None:
    from scalerl.cli import fit_report as report

    report.notes(o.notes_of([curve.run for curve in curves]))
    rows = [report.Row.of(curve, settings, o.targets(extrapolate, curve), backtest=backtest) for curve in curves]
    comparison = report.compared(curves, settings, extrapolate) if compare else None
    if "-" not in (json_file, csv_file):
        report.table(rows, settings)
        if comparison is not None:
            report.verdict(comparison)
    if json_file is not None:
        report.write(json_file, report.as_json(rows, settings, comparison))
    if csv_file is not None:
        report.write(csv_file, report.as_csv(rows, settings))
    if plot is not None:
        from scalerl.fitting import figures

        ends = [row.predictions[-1]["C"] for row in rows if row.predictions]
        figures.save(figures.curves(curves, until=max(ends, default=None)), plot)
