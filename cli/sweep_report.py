"""`scalerl sweep report`: what a study says of its arms."""

from __future__ import annotations

import sys
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from scalerl.cli import fit_options as o
from scalerl.cli.errors import user_errors

if TYPE_CHECKING:
    from scalerl.sweeps.report import Report

_WIDTH = 170  # where stdout is no terminal
_WIDE = 150  # columns that the whole table takes; a narrower one leaves out B and C_mid of the free fits


def report(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="The study's folder, finished or not.")],
    target: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Compute at which arms are weighed; default twice the largest budget."),
    ] = None,
    fraction: Annotated[
        float, typer.Option(help="Share of a run's compute that is fitted to predict the rest of it.")
    ] = 0.5,
    fit_min: o.FitMin = None,
    r0: o.R0 = None,
    level: o.Level = 0.95,
    output: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--output", "-o", help="Folder of the report; default STUDY/report."),
    ] = None,
) -> None:
    """Fit every arm, compare it with the base, and say in a line each what the noise permits.

    Writes the table (CSV), the report (Markdown), the figures, and `index.html`, one page with all of them.
    """
    with user_errors():
        from scalerl.cli.fit_report import notes
        from scalerl.sweeps.report import report as build
        from scalerl.sweeps.write import write

        settings = o.settings(r0, fit_min, None, "continuous", "sigmoid", None, None, level, False)
        found = build(Path(study), target=target, fraction=fraction, settings=settings)
        notes(o.notes_of([curve.run for row in found.rows for curve in row.fit.curves]))
        show(found)
        folder = Path(output) if output is not None else Path(study) / "report"
        write(found, folder)
        print(f"written: {folder / 'index.html'}, with report.md, table.csv and the figures beside it")
        if not found.usable:
            raise typer.Exit(1)


def show(found: Report) -> None:
    """The table, a verdict a line, what is missing, and what it all rests on."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from scalerl.sweeps.tables import HEADERS, cells

    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    shown = [name not in ("B", "C_mid") or console.width >= _WIDE for name in HEADERS]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in compress(HEADERS, shown):
        table.add_column(name, justify="left" if name == "arm" else "right", overflow="fold")
    for row in found.rows:
        table.add_row(*map(Text, compress(cells(row), shown)))
    console.print(table)
    for row in found.rows:
        console.print(f"{row.name}: {row.verdict.text}", markup=False, soft_wrap=True)
    for line in found.troubles:
        console.print(f"not whole: {line}", markup=False, soft_wrap=True)
    for note in found.notes:
        console.print(note, markup=False, soft_wrap=True, style="dim")
