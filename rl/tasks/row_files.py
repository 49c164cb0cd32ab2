"""Rows of JSONL and Parquet files in batches, each with its place in the file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from scalerl.rl.errors import UserError

_BATCH = 16384  # rows that are Python objects at once
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")


class Batch(NamedTuple):
    """lines: 1-based places in the file [n]. values: [n] of each column asked for; None where a row lacks it."""

    lines: Sequence[int]
    values: dict[str, list[Any]]


def place(path: Path, line: int) -> str:
    return f"{path}, {'row' if path.suffix == '.parquet' else 'line'} {line}"


def first_row(path: Path) -> dict[str, Any]:
    """The first row, with every column. Raises UserError where there is none, or the file can't be read."""
    rows = _parquet(path, None, 1) if path.suffix == ".parquet" else _json(path, None, 1)
    for batch in rows:
        return {name: values[0] for name, values in batch.values.items()}
    raise UserError(f"{path} has no rows; give a file with prompts")


def batches(path: Path, columns: Sequence[str]) -> Iterator[Batch]:
    """Every row's `columns`. Raises UserError that names the file, and the line where one can't be read."""
    return (_parquet if path.suffix == ".parquet" else _json)(path, columns, _BATCH)


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(1-based number, line) of the lines of a UTF-8 file that are not blank."""
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise UserError(f"{place(path, number)} is not UTF-8 text; mend or remove it") from None
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror})") from None


def _parquet(path: Path, columns: Sequence[str] | None, size: int) -> Iterator[Batch]:
    start = 1
    try:
        with path.open("rb") as opened, pq.ParquetFile(opened) as file:
            for batch in file.iter_batches(batch_size=size, columns=columns):
                values = {name: batch.column(name).to_pylist() for name in batch.schema.names}
                yield Batch(range(start, start + batch.num_rows), values)
                start += batch.num_rows
    except pa.ArrowException as error:
        raise UserError(f"{path} can't be read as Parquet: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror or error})") from None


def _json(path: Path, columns: Sequence[str] | None, size: int) -> Iterator[Batch]:
    if path.suffix not in _JSON_SUFFIXES:
        raise UserError(f"{path}: rows are read from .parquet and .jsonl files (one object a line)")
    lines = text_lines(path)
    while some := list(islice(lines, size)):
        objects = [_object(path, number, line) for number, line in some]
        names = columns or list(objects[0])
        values = {name: [row.get(name) for row in objects] for name in names}
        yield Batch([number for number, _ in some], values)


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place(path, number)} is not valid JSON ({error.msg}); mend or remove it") from None
    if not isinstance(row, dict):
        raise UserError(f"{place(path, number)} is no JSON object; each line holds one, with its columns")
    return row
