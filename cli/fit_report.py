"""How `scalerl fit` tells its results: a table for people, JSON and CSV for programs."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalerl.fitting.backtest import Backtest
    from scalerl.fitting.compare import Comparison
    from scalerl.fitting.curves import Curve, Settings
    from scalerl.fitting.result import FitResult

_WIDTH = 140  # where stdout is no terminal

_WINDOW_HINT = "fitted from the first point on; the published fits leave out about the first epoch (--fit-min)"

_FREE_HINT = "R0 free: there is no base evaluation (a row at compute 0), which would narrow the intervals"

STATUS_WORDS = {
    "ok": "ok",
    "asymptote-open": "ceiling not yet seen",
    "at-edge": "at the edge of the grid",
    "too-few-points": "too few points",
    "collapsed": "collapsed",
    "flat": "flat",
    "decreasing": "decreasing",
}


@dataclass(frozen=True)
class Row:
    """One run's result with everything that is told about it."""

    curve: Curve
    predictions: list[dict[str, Any]]
    held_out: dict[str, Any] | None  # errors of the prediction on the points kept from the fit
    backtest: Backtest | None

    @classmethod
    def of(cls, curve: Curve, settings: Settings, targets: Sequence[float], *, backtest: bool) -> Row:
        predictions, held_out, tested = [], None, None
        if curve.result.A is not None:
            predictions = [_prediction(curve.result, c) for c in targets]
            held_out = _held_out(curve) if settings.form != "entropy" else None
        if backtest:
            from scalerl.fitting.backtest import backtest as test
            from scalerl.fitting.curves import points
            from scalerl.fitting.errors import InputError

            try:
                tested = test(*points(curve.run, settings), **settings.arguments())
            except InputError as error:  # the other runs may have what this one lacks
                notes([f"run '{curve.run.name}': {error}"])
        return cls(curve, predictions, held_out, tested)


def _prediction(result: FitResult, c: float) -> dict[str, Any]:
    value = result.predict(c)
    if isinstance(value, tuple):
        return dict(zip(("C", "value", "low", "high"), (c, *value), strict=True))
    return {"C": c, "value": value, "low": None, "high": None}


def _held_out(curve: Curve) -> dict[str, Any] | None:
    beyond = curve.beyond & (curve.run.compute > 0)
    if not beyond.any():
        return None
    found = curve.result.predict(curve.run.compute[beyond])
    errors = (found[0] if isinstance(found, tuple) else found) - curve.run.pass_rate[beyond]
    return {"n": len(errors), "mae": float(abs(errors).mean()), "bias": float(errors.mean())}


def notes(messages: Sequence[str]) -> None:
    for message in messages:
        print(f"note: {message}", file=sys.stderr)


def table(rows: Sequence[Row], settings: Settings) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    console.print(_title(rows, settings), markup=False, soft_wrap=True)
    grid = Table(box=SIMPLE_HEAD, pad_edge=False)
    grid.add_column("run", overflow="fold")
    for name in ("A", "B", "C_mid", "R0", "A at R0 -/+ 0.02", "points"):
        grid.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        grid.add_row(*(Text(cell) for cell in _cells(row)))
    console.print(grid)
    for row in rows:
        for line in _lines(row):
            console.print(line, markup=False, soft_wrap=True)
    free = [row for row in rows if row.curve.result.r0_rule == "free" and row.curve.result.A is not None]
    if free and settings.r0 is None:
        console.print(_FREE_HINT, style="dim", soft_wrap=True)
    if settings.window[0] is None and settings.form == "sigmoid":
        console.print(_WINDOW_HINT, style="dim", soft_wrap=True)


def _title(rows: Sequence[Row], settings: Settings) -> str:
    runs = [row.curve.run for row in rows]
    y_names, x_names = (
        ", ".join(dict.fromkeys(names)) for names in zip(*((r.y_name, r.x_name) for r in runs), strict=True)
    )
    intervals = any(row.curve.result.A_interval is not None for row in rows)
    kind = f"{settings.level:.0%} intervals in brackets" if intervals else "no intervals"
    x_names = "entropy" if settings.form == "entropy" else x_names
    return f"{y_names} against {x_names}; form {settings.form}, method {settings.method}, {kind}"


def _cells(row: Row) -> list[str]:
    result, run = row.curve.result, row.curve.run
    name = f"{run.name}\n{STATUS_WORDS.get(result.status, result.status)}"
    counted = f"{result.n}" + (" + base" if result.n_base else "")
    if result.A is None:
        return [name, "-", "-", "-", "-", "-", counted]
    if result.status == "asymptote-open" and result.A_interval is not None:
        ceiling = f"at least {result.A_interval[0]:.3f}"
    else:
        ceiling = _with_interval(result.A, result.A_interval, ".3f")
    shifted = "-"
    if row.curve.A_at_R0 is not None:
        shifted = " / ".join("-" if a is None else f"{a:.3f}" for a in row.curve.A_at_R0)
    return [
        name,
        ceiling,
        _with_interval(result.B, result.B_interval, ".2f"),
        _with_interval(result.C_mid, result.C_mid_interval, ",.4g"),
        "-" if result.R0 is None else f"{result.R0:.3f}\n{result.r0_rule}",
        shifted,
        counted,
    ]


def _with_interval(value: float | None, interval: tuple[float, float] | None, style: str) -> str:
    if value is None:
        return "-"
    return number(value, style) + (f"\n[{', '.join(number(end, style) for end in interval)}]" if interval else "")


def number(value: float, style: str) -> str:
    if math.isinf(value):
        return "inf"
    if style == ",.4g":
        return f"{value:,.0f}" if 1000 <= value < 1e7 else f"{value:.4g}"
    return f"{value:{style}}"


def _lines(row: Row) -> list[str]:
    name = row.curve.run.name
    lines = [f"{name}: {_at(p)}" for p in row.predictions]
    lines += [f"{name}: {warning}" for warning in row.curve.result.warnings]
    if row.held_out is not None:
        held = row.held_out
        lines.append(f"{name}: {held['n']} held-out points, MAE {held['mae']:.4f}, bias {held['bias']:+.4f}")
    if row.curve.result.extra:
        lines.append(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in row.curve.result.extra.items()))
    if row.backtest is not None:
        lines.append(f"{name}: {row.backtest}")
    return lines


def compared(curves: Sequence[Curve], settings: Settings, extrapolate: list[str] | None) -> Comparison:
    """All runs against each other at the farthest target (default: twice the largest budget)."""
    from scalerl.cli.fit_options import targets
    from scalerl.fitting.compare import compare
    from scalerl.fitting.curves import points
    from scalerl.fitting.errors import InputError

    units = {curve.run.x_name.rpartition("/")[2].lower(): curve for curve in curves}
    if len(units) > 1:
        each = ", ".join(f"{curve.run.name} by {curve.run.x_name}" for curve in units.values())
        raise InputError(f"a comparison needs one axis of compute, and the runs have {each}; name one with --x")
    goals = [c for curve in curves for c in targets(extrapolate, curve)]
    runs = {curve.run.name: points(curve.run, settings) for curve in curves}
    arms = {curve.run.name: curve.run.arm for curve in curves if curve.run.arm is not None}
    return compare(runs, target=max(goals, default=None), arms=arms, **settings.arguments())


def verdict(comparison: Comparison) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    c = comparison
    common = "" if c.common_A is None else f", B and C80 with A at the tied runs' mean {c.common_A:.3f}"
    title = f"at {number(c.target, ',.4g')}: tied within {c.margin:.3f} of the highest A{common}"
    console.print(title, markup=False, soft_wrap=True)
    grid = Table(box=SIMPLE_HEAD, pad_edge=False)
    grid.add_column("run", overflow="fold")
    for name in ("value at target", "highest in", "tied on A", "B", "C80"):
        grid.add_column(name, justify="right", no_wrap=True)
    for run in c.runs:
        refit = run.common
        cells = [
            run.name,
            "-" if run.value is None else f"{run.value:.3f} [{run.low:.3f}, {run.high:.3f}]",
            "-" if run.probability is None else f"{run.probability:.1%}",
            "yes" if run.tied else "no",
            "-" if refit is None else _with_interval(refit.B, refit.B_interval, ".2f").replace("\n", " "),
            "-" if refit is None or refit.C80 is None else number(refit.C80, ",.4g"),
        ]
        grid.add_row(*(Text(cell) for cell in cells))
    console.print(grid)
    noise = "" if c.b_noise is None else f"; differences of B below {c.b_noise:.2f} are noise"
    console.print(f"run-to-run sd {c.run_sd:.3f} ({c.run_sd_source}){noise}", markup=False, soft_wrap=True)
    for arm in c.arms:
        ceiling = "their ceiling is not seen in every one"
        if arm.A is not None and arm.A_interval is not None:
            ceiling = f"A {arm.A:.3f} [{arm.A_interval[0]:.3f}, {arm.A_interval[1]:.3f}] by t"
        console.print(f"{arm.name}: {len(arm.runs)} seeds, {ceiling}", markup=False, soft_wrap=True)
    console.print(c.verdict, markup=False, soft_wrap=True)


def common_fits(curves: Sequence[Curve], settings: Settings) -> list[Curve]:
    """The refits with one A of the runs tied on A, as curves; none where fewer than two runs are tied."""
    refits = {run.name: run.common for run in compared(curves, settings, None).runs}
    pairs = [(curve, refits[curve.run.name]) for curve in curves]
    return [replace(curve, result=refit) for curve, refit in pairs if refit is not None]


def _at(prediction: dict[str, Any]) -> str:
    text = f"at {number(prediction['C'], ',.4g')} the curve is at {prediction['value']:.3f}"
    if prediction["low"] is not None:
        text += f" [{prediction['low']:.3f}, {prediction['high']:.3f}]"
    return text


def as_json(rows: Sequence[Row], settings: Settings, comparison: Comparison | None) -> str:
    document: dict[str, Any] = {"version": version("scalerl"), "runs": [_record(row, settings) for row in rows]}
    if comparison is not None:
        document["comparison"] = comparison.to_dict()
    return json.dumps(_strict(document), indent=2, allow_nan=False) + "\n"


def _record(row: Row, settings: Settings) -> dict[str, Any]:
    run = row.curve.run
    return {
        "name": run.name,
        **row.curve.result.to_dict(),
        "A_at_R0": row.curve.A_at_R0,
        "window": settings.window,
        "predictions": row.predictions,
        "held_out": row.held_out,
        "backtest": None if row.backtest is None else row.backtest.to_dict(),
        "x": run.x_name,
        "y": run.y_name,
        "sources": [asdict(source) for source in run.sources],
        "dropped": [asdict(dropped) for dropped in run.dropped],
        "n_dropped": run.n_dropped,
        "messages": run.messages,
    }


def _strict(value: Any) -> Any:
    """The same in types of JSON, with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {str(key): _strict(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(entry) for entry in value]
    if hasattr(value, "tolist"):  # numpy's scalars and arrays
        return _strict(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def as_csv(rows: Sequence[Row], settings: Settings) -> str:
    """One line a run and prediction, or a run without any."""
    out = io.StringIO()
    records = [
        flat | {f"prediction_{key}": value for key, value in prediction.items()}
        for row in rows
        for flat in [_flat(row, settings)]
        for prediction in (row.predictions or [{}])
    ]
    names = list(dict.fromkeys(name for record in records for name in record))
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def _flat(row: Row, settings: Settings) -> dict[str, Any]:
    """A run's record with pairs in two columns and lists joined; blank where there is no number."""
    record = _strict(_record(row, settings))
    flat: dict[str, Any] = {"version": version("scalerl")}
    for key, value in record.items():
        if key in ("predictions", "edge"):
            continue
        if key == "sources":
            flat["files"] = ";".join(source["path"] for source in value)
            flat["sha256"] = ";".join(source["sha256"] for source in value)
        elif key == "dropped":
            flat["dropped"] = ";".join(f"{entry['file']} {entry['line']}" for entry in value)
        elif key in ("held_out", "backtest"):
            flat |= {f"{key}_{name}": entry for name, entry in (value or {}).items()}
        elif key.endswith(("_interval", "_open")) or key in ("window", "A_at_R0"):
            flat[f"{key}_low"], flat[f"{key}_high"] = value or (None, None)
        else:
            flat[key] = "; ".join(map(str, value)) if isinstance(value, list) else value
    return flat


def write(path: str, text: str) -> None:
    """Write a result to a file or, for `-`, to stdout. Raises InputError where the file can't be written."""
    from scalerl.fitting.errors import InputError

    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: can't be written ({error.strerror or error})") from None
