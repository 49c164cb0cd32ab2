"""The report's files."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib

from scalerl.fitting.errors import InputError
from scalerl.fitting.figures import STYLE
from scalerl.sweeps.figures import all_figures
from scalerl.sweeps.page import page
from scalerl.sweeps.report import Report
from scalerl.sweeps.tables import as_csv, as_markdown

_DPI = 180


def write(report: Report, folder: Path) -> list[Path]:
    """Write table.csv, report.md, the figures and index.html into `folder`, which is made; returns the paths.

    Raises InputError where that can't be."""
    pictures: dict[str, bytes] = {}
    with matplotlib.rc_context(STYLE):
        for name, figure in all_figures(report).items():
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=_DPI)
            pictures[name] = buffer.getvalue()
    texts = {"table.csv": as_csv(report), "report.md": as_markdown(report), "index.html": page(report, pictures)}
    contents = {**{name: text.encode() for name, text in texts.items()}, **pictures}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise InputError(f"{folder}: the report can't be written ({error.strerror or error})") from None
    return [folder / name for name in contents]
