"""CSV and JSONL, read line by line: memory grows with the evaluations that they hold, not with their size."""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from scalerl.fitting.errors import InputError
from scalerl.fitting.readers.columns import Wanted, is_compute, is_pass_rate
from scalerl.fitting.readers.table import Table

_LONGEST_LINE = 1 << 26  # characters; a longer one is no table row, and must not fill the memory
_DELIMITERS = (",", ";", "\t", "|")
_COMPANION = re.compile(r"(.*)__(?:MIN|MAX)")
_SERIES = re.compile(r"(.+) - (.+)")
_CHART_AXES = frozenset({"_step", "_runtime", "_timestamp"})  # companions of a series that are no metric


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    """The file as text, UTF-8 or, with its mark, UTF-16. Raises InputError where it can't be read."""
    try:
        with path.open("rb") as raw:
            mark = raw.read(2)
        encoding = "utf-16" if mark in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        with path.open(encoding=encoding, newline="") as file:
            yield file
    except UnicodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.__class__.__name__}); convert it to UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None


# --- JSONL ---


def read_jsonl(path: Path, wanted: Wanted) -> Table:
    """One JSON object a line, nested ones flattened with dots; a broken last line is reported, any other refused."""
    table = Table(str(path), "line", wanted.kind_of)
    broken: tuple[int, str] | None = None
    with _opened(path) as file:
        for line, text in _lines(file, path):
            if broken:
                raise InputError(f"{path} line {broken[0]}: {broken[1]}; mend or delete the line")
            record = _parse_json(text)
            if isinstance(record, str):
                broken = line, record
            else:
                table.add(line, flat(record))
    if broken and broken[0] == 1 and not table.names:
        raise InputError(f"{path} line 1: {broken[1]}")
    if broken:
        table.messages.append(f"{path} line {broken[0]}: truncated last line left out")
    if not table.names:
        raise InputError(f"{path} is empty")
    return table


def _lines(file: IO[str], path: Path) -> Iterator[tuple[int, str]]:
    line = 0
    while text := file.readline(_LONGEST_LINE):
        line += 1
        if len(text) == _LONGEST_LINE:
            raise InputError(f"{path} line {line}: longer than {_LONGEST_LINE >> 20} MB; write one JSON object a line")
        if not text.isspace():
            yield line, text


def _parse_json(text: str) -> dict[str, Any] | str:
    """The object, or what is wrong with the line."""
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        return f"not valid JSON (column {error.colno})"
    except (ValueError, RecursionError):
        return "not valid JSON (a number or a nesting too large)"
    if isinstance(record, dict):
        return record
    return f"a JSON {'array' if isinstance(record, list) else 'value'} where one object a line is needed"


def flat(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The cells of a nested record, named with dots."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


# --- CSV ---


def read_csv(path: Path, wanted: Wanted) -> Table:
    """Comma, semicolon, tab or bar separated, with a header; a W&B chart export becomes a long table of its series."""
    with _opened(path) as file:
        delimiter = _delimiter(file)
        rows = _rows(csv.reader(file, delimiter=delimiter, skipinitialspace=True), path)
        header = [name.strip().lstrip("\ufeff") for name in next(rows, (0, []))[1]]
        _check_header(header, path)
        series = _chart_series(header)
        table = Table(str(path), "line", wanted.kind_of)
        if series:
            _read_chart(table, wanted, header, series, _full_rows(table, rows, header))
        else:
            _refuse_twins(table, header)
            keep = [(i, name) for i, name in enumerate(header) if table.kind(name)]
            for line, fields in _full_rows(table, rows, header):
                table.add(line, [(name, fields[i]) for i, name in keep])
    return table


def _delimiter(file: IO[str]) -> str:
    """The one that cuts the header into most fields."""
    header = ""
    while not header.strip() and (header := file.readline(_LONGEST_LINE)):
        pass
    file.seek(0)
    try:
        return max(_DELIMITERS, key=lambda d: len(next(csv.reader([header], delimiter=d), [])))
    except csv.Error:
        return ","


def _rows(reader: Any, path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, fields) of each row that isn't blank."""
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise InputError(f"{path} line {reader.line_num}: {error}; not a CSV file?") from None
        if any(field.strip() for field in fields):
            yield reader.line_num, fields


def _check_header(header: list[str], path: Path) -> None:
    if not header:
        raise InputError(f"{path} is empty")
    if all(not name or _is_number(name) for name in header):
        raise InputError(f"{path} line 1: numbers where the names of the columns should stand; add a header line")


def _refuse_twins(table: Table, header: list[str]) -> None:
    for name, count in Counter(header).items():
        if count > 1 and table.kind(name):
            raise InputError(f"{table.path} line 1: {count} columns are called '{name}'; rename all but one")


def _full_rows(
    table: Table, rows: Iterator[tuple[int, list[str]]], header: list[str]
) -> Iterator[tuple[int, list[str]]]:
    """Rows as wide as the header. A repeated header and a short last row are reported, other widths refused."""
    short: tuple[int, int] | None = None
    for line, fields in rows:
        if short:
            raise InputError(
                f"{table.path} line {short[0]}: {short[1]} fields where the header has {len(header)}; mend or delete it"
            )
        if len(fields) > len(header):
            if any(field.strip() for field in fields[len(header) :]):
                raise InputError(
                    f"{table.path} line {line}: {len(fields)} fields where the header has {len(header)} "
                    "(a number with a thousands separator or decimal comma?)"
                )
        elif len(fields) < len(header):
            short = line, len(fields)
            continue
        if [field.strip() for field in fields[: len(header)]] == header:
            table.messages.append(f"{table.path} line {line}: repeats the header (a restart?), left out")
            continue
        yield line, fields
    if short:
        table.messages.append(f"{table.path} line {short[0]}: truncated last line left out")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


# --- W&B chart export ---


def _chart_series(header: list[str]) -> list[tuple[int, str, str]]:
    """(column, run, metric) of each series of a chart export, [] for any other table.

    The export names a series "RUN - METRIC" and gives it companions with __MIN and __MAX, which are no series.
    """
    companions = [bool((m := _COMPANION.fullmatch(name)) and m[1] in header) for name in header]
    named = {m[1] for name in header if (m := _COMPANION.fullmatch(name))}
    series = []
    for i, name in enumerate(header):
        match = _SERIES.fullmatch(name)
        if companions[i] or not (match or name in named):
            continue
        run, metric = (match[1], match[2]) if match else (name, "pass_rate")
        if any(companions) or is_pass_rate(metric) or is_compute(metric):
            series.append((i, run, metric))
    return series


def _read_chart(
    table: Table,
    wanted: Wanted,
    header: list[str],
    series: list[tuple[int, str, str]],
    rows: Iterator[tuple[int, list[str]]],
) -> None:
    """Melt the chart into one row for each line and run, its blank cells left out."""
    if wanted.run is not None:
        raise InputError(f"{table.path}: a chart export names its runs by its series; leave --run out")
    taken = {i for i, _, _ in series}
    named = [entry for entry in series if header[entry[0]] == wanted.y]
    series = [entry for entry in named or series if entry[2] not in _CHART_AXES]
    metrics = {metric for _, _, metric in series if not is_compute(metric)}
    if metrics and (named or (wanted.y is None and len(metrics) == 1)):
        table.only_metric = metrics.pop()
        table.names[table.only_metric] = "signal"
    table.run_column = "(run)"
    table.names[table.run_column] = "text"
    runs = _distinct(table, series)
    axes = [(i, name) for i, name in enumerate(header) if i not in taken and not _COMPANION.fullmatch(name)]
    axes = [(i, name) for i, name in axes if not _SERIES.fullmatch(name) and table.kind(name)]
    for line, fields in rows:
        shared = [(name, fields[i]) for i, name in axes]
        for run, columns in runs.items():
            cells = [(metric, fields[i]) for i, metric in columns if fields[i].strip()]
            if cells:
                table.add(line, [*shared, (table.run_column, run), *cells])


def _distinct(table: Table, series: list[tuple[int, str, str]]) -> dict[str, list[tuple[int, str]]]:
    """The columns of each run; of two runs with one name the second is called 'NAME (2)'."""
    runs: dict[str, list[tuple[int, str]]] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for i, run, metric in series:
        seen[run, metric] += 1
        copy = seen[run, metric]
        if copy > 1:
            table.messages.append(f"{table.path} line 1: two series of run '{run}'; one is now '{run} ({copy})'")
        runs.setdefault(run if copy == 1 else f"{run} ({copy})", []).append((i, metric))
    return runs
