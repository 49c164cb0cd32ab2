"""The report as text: the table's cells, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import math
from typing import Any

from scalerl.sweeps.comparison import Estimate
from scalerl.sweeps.report import Report, Row
from scalerl.sweeps.verdicts import compute, truncation_peak

HEADERS = ("arm", "runs", "A", "B", "C_mid", "half predicts rest", "tied", "B, one A", "C80", "at target", "leads")
FIGURES = {
    "curves.png": "Held-out pass rate on log compute. Solid: the fit of all points; dotted: its extrapolation to the "
    "target, with its interval; dashed: what the first part alone predicted; crosses: the points that it did not see. "
    "Grey: the base.",
    "slopes.png": "The arms tied on A, with one A: log[(R - R0)/(A - R)] is a line in log C whose slope is B; farther "
    "to the right is slower. Points outside (R0, A) have no such logarithm and are left out.",
    "truncation.png": "Truncated completions in training, mean of 10 steps. Above 5 % (dashed) training warns, above "
    "10 % (shaded) it grows unstable.",
    "entropy.png": "Entropy of the policy in training, mean of 10 steps.",
}


def cells(row: Row) -> list[str]:
    """One arm's cells under HEADERS; an interval stands on a line of its own."""
    fit = row.fit
    runs = f"{len(fit.usable)} of {len(fit.runs)}"
    half = "-" if row.mae is None else f"MAE {row.mae:.4f}"
    if row.mae is not None and row.coverage is not None:
        half += f"\n{row.coverage:.0%} inside"
    common = fit.common
    ceiling = _estimate(fit.A, ".3f")
    if fit.is_open and fit.A is not None:
        ceiling = f"at least {fit.A.low:.3f}"
    return [
        row.name,
        runs,
        ceiling,
        _estimate(fit.B, ".2f"),
        _compute(fit.C_mid),
        half,
        "yes" if fit.tied else "no",
        "-" if common is None else _estimate(common.B, ".2f"),
        "-" if common is None else _compute(common.C80),
        _estimate(fit.value, ".3f"),
        "-" if fit.leads is None else f"{fit.leads:.0%}",
    ]


def as_csv(report: Report) -> str:
    """One line an arm; blank where there is no number."""
    records = [_record(report, row) for row in report.rows]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def as_markdown(report: Report) -> str:
    """The whole report but for what only pictures say."""
    plan = report.plan
    parts = [f"# Study {plan.name} ({plan.kind})", f"Made by `{plan.command}`.", "## Verdicts"]
    parts.append("\n".join(f"- **{row.name}**: {row.verdict.text}" for row in report.rows))
    if report.troubles:
        parts += ["## Runs that are not whole", "\n".join(f"- {line}" for line in report.troubles)]
    parts += ["## Table", _markdown_table(HEADERS, [cells(row) for row in report.rows])]
    parts += ["## What the numbers rest on", "\n".join(f"- {note}" for note in report.notes)]
    changes = differences(report)
    if changes:
        parts += ["## What each arm changes", _markdown_table(("arm", "key", "base", "arm's"), changes)]
    parts += ["## Figures", *(f"![{caption}]({name})\n\n{caption}" for name, caption in FIGURES.items())]
    return "\n\n".join(parts) + "\n"


def differences(report: Report) -> list[list[str]]:
    """(arm, key, the base's value, the arm's) of every key in which an arm differs."""
    return [
        [row.name, key, _plain(before), _plain(after)]
        for row in report.rows
        for key, (before, after) in row.fit.arm.difference.items()
    ]


def _record(report: Report, row: Row) -> dict[str, Any]:
    fit, c = row.fit, report.comparison
    record: dict[str, Any] = {
        "arm": row.name,
        "axis": fit.arm.axis,
        "runs": len(fit.runs),
        "runs_with_fit": len(fit.usable),
        "statuses": ";".join(curve.result.status for curve in fit.curves),
        "x": report.plan.x,
    }
    for name, estimate in (("A", fit.A), ("B", fit.B), ("C_mid", fit.C_mid)):
        record |= _ends(name, estimate)
    record |= {"ceiling_open": fit.is_open, "tied": fit.tied, "margin": c.margin}
    record["common_A"] = fit.common and fit.common.A
    record |= _ends("common_A_B", fit.common and fit.common.B) | _ends("common_A_C80", fit.common and fit.common.C80)
    record |= {"target": c.target, **_ends("value", fit.value), "leads": fit.leads, "ahead_of_base": fit.ahead}
    record |= {"half_mae": row.mae, "half_coverage": row.coverage}
    record["truncation_peak"] = max((truncation_peak(run) for run in fit.runs), default=None)
    return record | {"verdict_kind": row.verdict.kind, "sure": row.verdict.sure, "verdict": row.verdict.text}


def _ends(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    if estimate is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    values = zip((name, f"{name}_low", f"{name}_high"), (estimate.value, estimate.low, estimate.high), strict=True)
    return {key: value if math.isfinite(value) else None for key, value in values}


def _estimate(e: Estimate | None, style: str) -> str:
    return "-" if e is None else f"{e.value:{style}}\n[{e.low:{style}}, {e.high:{style}}]"


def _compute(e: Estimate | None) -> str:
    return "-" if e is None else f"{compute(e.value)}\n[{compute(e.low)}, {compute(e.high)}]"


def _markdown_table(headers: tuple[str, ...], rows: list[list[str]]) -> str:
    def line(texts: list[str]) -> str:
        return "| " + " | ".join(text.replace("\n", " ").replace("|", "\\|") for text in texts) + " |"

    return "\n".join([line(list(headers)), line(["---"] * len(headers)), *map(line, rows)])


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
