"""A table in memory of only the columns that a fit can need, eight bytes a cell, filled while the file streams by."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from scalerl.fitting.errors import InputError
from scalerl.fitting.runs import MAX_LISTED, Floats

Kind = Literal["signal", "number", "text"]  # a signal is a column without which a row is of no interest

BLANK = float("nan")
ODD = float("inf")  # a cell with something in it that is no finite number; its text is in `Column.odd`

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_PERCENT = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)) ?%", re.ASCII)
_COMMAS = re.compile(r"[+-]?\d{1,3}([,' \u00a0\u202f]\d{3})+(\.\d+)?|[+-]?\d+,\d+", re.ASCII)


class Column:
    """Numbers of one column, with NaN for a blank cell and infinity for an odd one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cells = array("d")
        self.odd: dict[int, str] = {}
        self.percent_row: int | None = None  # first row written with a percent sign
        self.all_percent = True  # every number so far is written so

    def put(self, row: int, value: Any) -> None:
        number, text = _parse(value)
        if number != number and text is None:
            return
        if text is not None and len(self.odd) < MAX_LISTED and number == ODD:
            self.odd[row] = text
        if text != "%":
            self.all_percent = False
        elif self.percent_row is None:
            self.percent_row = row
        _pad(self.cells, row, BLANK)
        self.cells.append(number)

    def extend(self, start: int, values: Floats, blank: NDArray[np.bool_]) -> None:
        """Append a block of floats whose NaN and infinities are values; `blank` marks the empty cells."""
        self.all_percent = False
        odd = ~np.isfinite(values) & ~blank
        for i in np.flatnonzero(odd)[: max(0, MAX_LISTED - len(self.odd))].tolist():
            self.odd[start + i] = str(values[i])
        _pad(self.cells, start, BLANK)
        self.cells.frombytes(np.where(blank, BLANK, np.where(odd, ODD, values)).astype(np.float64).tobytes())

    def numbers(self, n_rows: int) -> Floats:
        """All cells, [n_rows]."""
        _pad(self.cells, n_rows, BLANK)
        return np.frombuffer(self.cells, dtype=np.float64) if n_rows else np.empty(0)


class TextColumn:
    """Names of one column (runs, sets, seeds), each stored once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.codes = array("i")
        self.names: dict[str, int] = {}

    def put(self, row: int, value: Any) -> None:
        text = str(value).strip()
        if value is None or not text:
            return
        _pad(self.codes, row, -1)
        self.codes.append(self.names.setdefault(text, len(self.names)))

    def numbers(self, n_rows: int) -> np.ndarray:
        """The code of each row's name, [n_rows], -1 where the cell is blank."""
        _pad(self.codes, n_rows, -1)
        return np.frombuffer(self.codes, dtype=np.int32) if n_rows else np.empty(0, dtype=np.int32)


class Table:
    """What one file gave: `lines` [n_rows] says where each kept row stands, in `unit`s of the file.

    `kind_of` says for a column's name whether to keep it. A row without any signal is not kept.
    """

    def __init__(self, path: str, unit: str, kind_of: Callable[[str], Kind | None]) -> None:
        self.path = path
        self.unit = unit
        self.lines = array("q")
        self.columns: dict[str, Column] = {}
        self.texts: dict[str, TextColumn] = {}
        self.names: dict[str, Kind | None] = {}
        self.messages: list[str] = []
        self.only_metric: str | None = None  # of a chart that shows one metric, whatever its name
        self.run_column: str | None = None  # where the format itself says which column names the run
        self._kind_of = kind_of

    def __len__(self) -> int:
        return len(self.lines)

    def kind(self, name: str) -> Kind | None:
        if name not in self.names:
            self.names[name] = self._kind_of(name)
        return self.names[name]

    def add(self, line: int, cells: Iterable[tuple[str, Any]]) -> None:
        kept = {name: value for name, value in cells if self.kind(name) and not _is_blank(value)}
        if not any(self.names[name] == "signal" for name in kept):
            return
        row = len(self.lines)
        for name, value in kept.items():
            if self.names[name] == "text":
                self.text(name).put(row, value)
            else:
                self.column(name).put(row, value)
        self.lines.append(line)

    def column(self, name: str) -> Column:
        return self.columns.setdefault(name, Column(name))

    def text(self, name: str) -> TextColumn:
        return self.texts.setdefault(name, TextColumn(name))

    def numbers(self, name: str) -> Floats:
        return self.column(name).numbers(len(self))

    def where(self, row: int) -> str:
        return f"{self.path} {self.unit} {self.lines[row]}"

    def refuse_separators(self, column: Column) -> None:
        """Raise InputError on 1,500 or 0,45: which of the two a comma means is not ours to guess."""
        for row, text in column.odd.items():
            if _COMMAS.fullmatch(text.strip("'\"")):
                raise InputError(
                    f"{self.where(row)}: {column.name} is {text}; write numbers without thousands separators "
                    "and with a decimal point (1500.5)"
                )


def _parse(value: Any) -> tuple[float, str | None]:
    """(number, None), (BLANK, None), (ODD, its text), or (number, "%") where it was written with a percent sign."""
    if type(value) is float or type(value) is int:
        return _finite(value, str(value))
    if isinstance(value, str):
        text = value.strip()
        if _NUMBER.fullmatch(text):
            return _finite(text, text)
        if not text:
            return BLANK, None
        if match := _PERCENT.fullmatch(text):
            return float(match[1]), "%"
        return ODD, repr(text[:60])
    if value is None or isinstance(value, bool):
        return ODD, {None: "null", True: "true", False: "false"}[value]
    try:
        return _finite(value, str(value)[:60])
    except (TypeError, ValueError):
        return ODD, f"a {type(value).__name__}"


def _finite(value: Any, text: str) -> tuple[float, str | None]:
    try:
        number = float(value)
    except OverflowError:
        return ODD, "too large a number"
    return (number, None) if abs(number) < ODD else (ODD, text)


def _is_blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()


def _pad(cells: array[Any], n: int, filler: float) -> None:
    if len(cells) < n:
        cells.extend([filler] * (n - len(cells)))
