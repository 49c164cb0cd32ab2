"""Scalars of a TensorBoard folder: every tag is a column, joined by step."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from scalerl.fitting.errors import InputError
from scalerl.fitting.readers.columns import Wanted, is_step
from scalerl.fitting.readers.table import Table

STEP = "step"


def read_tensorboard(folder: Path, wanted: Wanted) -> Table:
    """All event files of one folder, in the order in which they were written; a row is one event of one tag."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, TENSORS, EventAccumulator
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise InputError(f"{folder}: reading it needs tensorboard: pip install 'scalerl[tensorboard]'") from None
    # Its own rule for restarts would drop the earlier branch in silence, so purging is off.
    events = EventAccumulator(str(folder), size_guidance={SCALARS: 0, TENSORS: 0}, purge_orphaned_data=False)
    logger = logging.getLogger("tensorboard")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        events.Reload()
    except Exception as error:
        # Record, protobuf and file-system layers raise classes of their own.
        raise InputError(f"{folder}: TensorBoard can't read its event files ({error})") from None
    finally:
        logger.setLevel(level)
    table = Table(str(folder), "event", wanted.kind_of)
    table.names[STEP] = "number"
    tags: Any = events.Tags()
    for tag in tags["scalars"]:
        _add(table, tag, [(event.step, event.value) for event in events.Scalars(tag)])
    for tag in tags["tensors"]:
        if table.kind(tag):
            values = [(event.step, make_ndarray(event.tensor_proto)) for event in events.Tensors(tag)]
            _add(table, tag, [(step, value.item()) for step, value in values if value.ndim == 0])
    if len(table.names) == 1:
        raise InputError(f"{folder}: no scalars in its event files")
    return table


def _add(table: Table, tag: str, events: list[tuple[int, Any]]) -> None:
    if is_step(tag) or not table.kind(tag):
        return
    table.names[tag] = "signal"  # each tag has rows of its own
    for number, (step, value) in enumerate(events, start=1):
        table.add(number, [(STEP, step), (tag, value)])
