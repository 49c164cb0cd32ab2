"""Parquet, read in batches and only the columns that a fit can need."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from scalerl.fitting.errors import InputError
from scalerl.fitting.readers.columns import Wanted
from scalerl.fitting.readers.table import Table


def read_parquet(path: Path, wanted: Wanted) -> Table:
    """Rows are counted from 1. A null is a blank cell; NaN and infinities are values, dropped and listed later."""
    try:
        with pq.ParquetFile(path) as file:
            return _read(file, path, wanted)
    except pa.ArrowException as error:
        raise InputError(f"{path}: not a Parquet file that can be read ({str(error).splitlines()[0]})") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None


def _read(file: pq.ParquetFile, path: Path, wanted: Wanted) -> Table:
    table = Table(str(path), "row", wanted.kind_of)
    schema = file.schema_arrow
    for name in {name for name in schema.names if schema.names.count(name) > 1 and table.kind(name)}:
        raise InputError(f"{path}: several columns are called '{name}'; rename all but one")
    table.names.update((field.name, None) for field in schema if pa.types.is_nested(field.type))
    keep = [name for name in schema.names if table.kind(name)]
    for batch in file.iter_batches(batch_size=1 << 16, columns=keep):
        _append(table, batch)
    return table


def _append(table: Table, batch: pa.RecordBatch) -> None:
    start = len(table)
    table.lines.extend(range(start + 1, start + 1 + batch.num_rows))
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        kind = column.type
        if table.kind(name) != "text" and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            blank = column.is_null().to_numpy(zero_copy_only=False)
            values = column.cast(pa.float64(), safe=False).fill_null(0.0).to_numpy(zero_copy_only=False)
            table.column(name).extend(start, values, np.asarray(blank, dtype=bool))
            continue
        cells = table.text(name) if table.kind(name) == "text" else table.column(name)
        for i, value in enumerate(column.to_pylist()):
            if value is not None:
                cells.put(start + i, value)
