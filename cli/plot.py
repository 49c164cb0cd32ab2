"""`scalerl plot`: figures of runs and their fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from scalerl.cli import fit_options as o
from scalerl.cli.errors import user_errors

if TYPE_CHECKING:
    from scalerl.fitting.curves import Curve, Settings

KINDS = ("curves", "recipes", "loo", "truncation")


def plot(
    inputs: o.Inputs,
    output: Annotated[str, typer.Option("--output", "-o", help="FILE.png, .svg or .pdf.")],
    kind: Annotated[
        str,
        typer.Option(
            help="`curves`; `recipes` adds each run's ceiling; `loo` adds the linearised view with one A, where slopes "
            "are B; `truncation` shows the truncation rate without fits."
        ),
    ] = "curves",
    title: Annotated[Optional[str], typer.Option(help="Title of the figure.")] = None,  # noqa: UP045
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
) -> None:
    """Draw runs on log compute: points, the fit solid to the end of its window and dotted beyond, its interval a band.

    `scalerl plot runs/base runs/dapo -o curves.pdf --extrapolate 2x`
    """
    with user_errors():
        from scalerl.cli.fit import check_outputs, fit_with_progress
        from scalerl.cli.fit_report import notes
        from scalerl.fitting import figures
        from scalerl.fitting.errors import InputError
        from scalerl.fitting.readers import read_runs

        if kind not in KINDS:
            raise InputError(f"--kind {kind}: one of {', '.join(KINDS)}")
        if form == "entropy":
            raise InputError("--form entropy has no compute axis to draw; use scalerl fit")
        check_outputs(inputs, None, None, output)
        settings = o.settings(r0, fit_min, fit_max, method, form, a_grid, cmid_grid, level, iid)
        runs = read_runs(
            inputs,
            x=x,
            y=(y or "truncation_rate") if kind == "truncation" else y,
            run=run,
            scale=scale,
            keep=keep,
            on_compute_reset=on_compute_reset,
            compute_per_step=compute_per_step,
            eval_set=eval_set,
            entropy=entropy,
        )
        notes(o.notes_of(runs))
        if kind == "truncation":
            figure = figures.truncation(runs, title=title)
        else:
            figure = _fitted(kind, fit_with_progress(runs, settings), settings, extrapolate, title)
        figures.save(figure, output)
        print(output)


def _fitted(
    kind: str, curves: list[Curve], settings: Settings, extrapolate: list[str] | None, title: str | None
) -> Any:
    """The figure of fitted runs."""
    from scalerl.fitting import figures

    until = max((c for curve in curves for c in o.targets(extrapolate, curve)), default=None)
    if kind != "loo":
        return figures.curves(curves, until=until, title=title, ceilings=kind == "recipes")
    from scalerl.cli.fit_report import common_fits

    return figures.leave_one_out(curves, common_fits(curves, settings), until=until, title=title)
