"""Options that `scalerl fit` and `scalerl plot` share, and what they say in the terms of `scalerl.fitting`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

if TYPE_CHECKING:
    from scalerl.fitting.curves import Curve, Settings
    from scalerl.fitting.runs import Run

# typer reads these at run time, where it knows Optional and not `X | None`.
Inputs = Annotated[
    list[str],
    typer.Argument(
        help="Run folders, CSV, JSONL, Parquet, W&B and TensorBoard folders, ENTITY/PROJECT/RUN_ID of W&B; "
        "NAME=FILE,FILE joins the files of one run.",
        show_default=False,
    ),
]
Extrapolate = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(help="Predict at this compute, or at a multiple of the fitted budget (`2x`). May be repeated."),
]
X = Annotated[Optional[str], typer.Option("--x", help="Column with the compute.")]  # noqa: UP045
Y = Annotated[Optional[str], typer.Option("--y", help="Column with the pass rate.")]  # noqa: UP045
RunColumn = Annotated[Optional[str], typer.Option("--run", help="Column that names the run in a long table.")]  # noqa: UP045
Entropy = Annotated[Optional[str], typer.Option(help="Column with the entropy, for `--form entropy`.")]  # noqa: UP045
Scale = Annotated[Optional[str], typer.Option(help="`percent` for pass rates of 0..100.")]  # noqa: UP045
Keep = Annotated[str, typer.Option(help="Of rows with one step keep the `last` or `first` written, or stop (`error`).")]
OnComputeReset = Annotated[str, typer.Option(help="`accumulate` adds the value before each fall of the compute.")]
ComputePerStep = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(help="Compute of one step, for tables that only count steps."),
]
EvalSet = Annotated[str, typer.Option("--set", help="Evaluation set to read, or `all`.")]
FitMin = Annotated[Optional[float], typer.Option(help="Start of the fit window, in the unit of the compute.")]  # noqa: UP045
FitMax = Annotated[Optional[float], typer.Option(help="End of the fit window; later points are held out.")]  # noqa: UP045
R0 = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--r0",
        help="Start of the curve: `base` (the evaluation at zero compute, the default where there is one), `first`, "
        "`free` (the default elsewhere) or a number.",
    ),
]
Method = Annotated[str, typer.Option(help="`continuous`, or the published grid: `grid` (fast), `paper` (literal).")]
Form = Annotated[str, typer.Option(help="`sigmoid`, `power`, `exponential` or `entropy`.")]
AGrid = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--a-grid", help="LO:HI:STEP or LO:HI:N of the grid methods; a whole number is N, any other STEP."),
]
CMidGrid = Annotated[Optional[str], typer.Option("--cmid-grid", help="The same for C_mid.")]  # noqa: UP045
Level = Annotated[float, typer.Option(help="Level of the intervals.")]
Iid = Annotated[bool, typer.Option("--iid", help="Don't widen the intervals for autocorrelated checkpoints.")]

METHODS = ("continuous", "grid", "paper")
FORMS = ("sigmoid", "power", "exponential", "entropy")


def settings(
    r0: str | None,
    fit_min: float | None,
    fit_max: float | None,
    method: str,
    form: str,
    a_grid: str | None,
    cmid_grid: str | None,
    level: float,
    iid: bool,
) -> Settings:
    """Raises InputError on a value that no fit takes."""
    from scalerl.fitting.curves import Settings
    from scalerl.fitting.errors import InputError

    for option, value, known in (("--method", method, METHODS), ("--form", form, FORMS)):
        if value not in known:
            raise InputError(f"{option} {value}: one of {', '.join(known)}")
    if not 0 < level < 1:
        raise InputError(f"--level {level:g}: between 0 and 1, for example 0.95")
    if fit_min is not None and fit_max is not None and fit_min >= fit_max:
        raise InputError(f"--fit-min {fit_min:g} is not below --fit-max {fit_max:g}")
    grids = {"a_grid": _grid("--a-grid", a_grid), "c_mid_grid": _grid("--cmid-grid", cmid_grid)}
    grids = {name: grid for name, grid in grids.items() if grid is not None}
    if grids and method == "continuous":
        raise InputError("--a-grid and --cmid-grid go with --method grid or paper")
    return Settings(
        r0=_r0(r0),
        window=(fit_min, fit_max),
        method=method,
        form=form,
        level=level,
        autocorrelation=not iid,
        grids=grids,
    )


def _r0(text: str | None) -> float | str | None:
    from scalerl.fitting.errors import InputError

    if text is None or text in ("base", "first", "free"):
        return text
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise InputError(f"--r0 {text}: base, first, free or a number from 0 to below 1")
    return value


def _grid(option: str, text: str | None) -> Any:
    import numpy as np

    from scalerl.fitting.errors import InputError

    if text is None:
        return None
    try:
        low, high, third = text.split(":")
        start, stop, step = float(low), float(high), float(third)
        if not (0 < start < stop and step > 0 and np.isfinite(stop)):
            raise ValueError
        count = int(third) if third.isdigit() else int((stop - start) / step + 1e-9) + 1
    except ValueError:
        raise InputError(f"{option} {text}: LO:HI:STEP or LO:HI:N with 0 < LO < HI") from None
    if not 2 <= count <= 10_000:
        raise InputError(f"{option} {text}: {count} values; 2 to 10000 are searched")
    return np.linspace(start, start + (count - 1) * step if not third.isdigit() else stop, count)


def targets(extrapolate: list[str] | None, curve: Curve) -> list[float]:
    """The computes at which to predict one run. Raises InputError on a text that is neither a number nor Nx."""
    from scalerl.fitting.errors import InputError

    found = []
    for text in extrapolate or []:
        times = text.lower().endswith("x")
        by = curve.budget if times and curve.budget is not None else 1.0
        try:
            value = float(text[:-1] if times else text)
        except ValueError:
            value = -1.0
        if not 0 < value * by < float("inf"):
            raise InputError(f"--extrapolate {text}: a compute above 0, or a multiple of the budget such as 2x")
        if not times or curve.budget is not None:
            found.append(value * by)
    return found


def notes_of(runs: list[Run]) -> list[str]:
    """What the readers did to the input, each said once."""
    return list(dict.fromkeys(message for run in runs for message in run.messages))
