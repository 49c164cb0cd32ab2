"""Runs of Weights & Biases: the folder that an offline run leaves, and a run on the server."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scalerl.fitting.errors import InputError
from scalerl.fitting.readers.columns import Wanted
from scalerl.fitting.readers.table import Table
from scalerl.fitting.readers.text_files import flat
from scalerl.fitting.runs import Source

_MISSING = "reading W&B runs needs wandb: pip install 'scalerl[wandb]'"

# A `.wandb` file is LevelDB's log format behind a header of its own: blocks of 32 KiB, in them chunks of
# (crc32 of kind and payload, payload's length, kind), a record being one FULL chunk or FIRST, MIDDLE..., LAST.
_BLOCK = 1 << 15
_FILE_HEADER = struct.Struct("<4sHB")
_CHUNK_HEADER = struct.Struct("<IHB")
_IDENT, _MAGIC = b":W&B", 0xBEE1
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


class _Damaged(Exception):
    pass


def read_offline(path: Path, wanted: Wanted) -> tuple[Table, str, str]:
    """The history of a `.wandb` file: (table, run id, display name). One that a crash cut short is read to the cut."""
    try:
        from wandb.proto import wandb_internal_pb2
    except ImportError:
        raise InputError(f"{path}: {_MISSING}") from None
    table = Table(str(path), "record", wanted.kind_of)
    messages: Any = wandb_internal_pb2  # its classes are made at import, out of a type checker's sight
    run_id, name = path.stem.removeprefix("run-"), ""
    number = 0
    try:
        for number, data in enumerate(_records(path), start=1):
            record = messages.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run_id, name = record.run.run_id or run_id, record.run.display_name or name
            elif kind == "history":
                table.add(number, _cells(record.history))
    except _Damaged as damage:
        table.messages.append(f"{path} record {number + 1}: {damage}; read up to there")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except Exception as error:
        # The protobuf runtime's own error class differs between its implementations.
        if type(error).__name__ != "DecodeError":
            raise
        table.messages.append(f"{path} record {number}: not a W&B record; read up to there")
    return table, run_id, name or run_id


def _records(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        header = file.read(_FILE_HEADER.size)
        if len(header) < _FILE_HEADER.size or _FILE_HEADER.unpack(header)[:2] != (_IDENT, _MAGIC):
            raise InputError(f"{path}: not a W&B run file")
        position, parts = _FILE_HEADER.size, []
        while True:
            rest = _BLOCK - position % _BLOCK
            if rest < _CHUNK_HEADER.size:
                position += len(file.read(rest))
                continue
            head = file.read(_CHUNK_HEADER.size)
            if not head.strip(b"\0"):
                break
            if len(head) < _CHUNK_HEADER.size:
                raise _Damaged("cut short by a crash")
            crc, length, kind = _CHUNK_HEADER.unpack(head)
            payload = file.read(length)
            if len(payload) < length:
                raise _Damaged("cut short by a crash")
            if zlib.crc32(bytes([kind]) + payload) != crc:
                raise _Damaged("damaged (checksum)")
            position += len(head) + length
            if kind in (_FULL, _FIRST):
                parts = []
            parts.append(payload)
            if kind in (_FULL, _LAST):
                yield b"".join(parts)
                parts = []
    if parts:
        raise _Damaged("cut short by a crash")


def _cells(history: Any) -> Iterator[tuple[str, Any]]:
    for item in history.item:
        name = item.key or ".".join(item.nested_key)
        try:
            value = json.loads(item.value_json)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield from flat(value, f"{name}.")
        else:
            yield name, value


def read_online(address: str, wanted: Wanted) -> tuple[Table, str, str, Source]:
    """The history of ENTITY/PROJECT/RUN_ID by wandb's public API: (table, run id, display name, source).

    Raises InputError where wandb is missing, refuses the login, or knows no such run.
    """
    try:
        import wandb
    except ImportError:
        raise InputError(f"{address}: {_MISSING}") from None
    table = Table(address, "record", wanted.kind_of)
    digest = hashlib.sha256()
    try:
        run = wandb.Api().run(address)
        for number, row in enumerate(run.scan_history(), start=1):
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
            table.add(number, ((name, value) for name, value in flat(row) if value is not None))
    except Exception as error:
        # Its network layers raise classes of their own that share no base.
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{address}: no such file or folder, and W&B doesn't give such a run ({first})") from None
    return table, run.id, run.name or run.id, Source(address, digest.hexdigest())
