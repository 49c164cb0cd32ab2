"""From a table to the rows of its runs: by evaluation set, by run column, by seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from scalerl.fitting.errors import InputError
from scalerl.fitting.readers.columns import Chosen, Wanted, choose
from scalerl.fitting.readers.table import Table, TextColumn
from scalerl.fitting.runs import Floats, Source

Role = Literal["x", "y", "step", "entropy"]
Key = tuple[str, ...]

_FITTED = "train"
_BEYOND = frozenset({"extended", "extension", "extrapolated", "extrapolation"})
_DEFAULT_SET = "held_out"


@dataclass(frozen=True)
class Input:
    """One file, folder or address: its table, its run's name unless the table names runs, and what joins parts."""

    table: Table
    wanted: Wanted
    name: str
    key: Key
    sources: tuple[Source, ...]


@dataclass(frozen=True, eq=False)
class Part:
    """The rows [n] that one table holds of one run. `held_out` [n] marks those that the table keeps from the fit."""

    table: Table
    chosen: Chosen
    rows: NDArray[np.int64]
    held_out: NDArray[np.bool_]
    sources: tuple[Source, ...]
    arm: str | None = None  # the run's name without its seed

    def cells(self, role: Role) -> Floats | None:
        """The column of that role, [n], NaN for a blank cell and infinity for an odd one; None where there is none."""
        name = getattr(self.chosen, role)
        if name is None:
            return None
        cells = self.table.numbers(name)
        return cells if len(self.rows) == len(cells) else cells[self.rows]

    def required(self, role: Role) -> Floats:
        cells = self.cells(role)
        return np.broadcast_to(np.nan, len(self.rows)) if cells is None else cells

    def odd_text(self, role: Role, row: int) -> str:
        return self.table.column(getattr(self.chosen, role)).odd.get(row, "no finite number")


def cut(entry: Input, eval_set: str) -> Iterator[tuple[Key, str, Part]]:
    """(what joins it with parts elsewhere, name, rows) of each run in a table; InputError where sets or runs mix."""
    table = entry.table
    chosen = choose(table, entry.wanted)
    for name in (chosen.x, chosen.y, chosen.step):
        if name is not None:
            table.refuse_separators(table.column(name))
    evaluated = ~np.isnan(table.numbers(chosen.y))
    if not evaluated.any():
        raise InputError(f"{table.path}: {chosen.y} is blank in every row")
    beyond, sets = _sets(table, chosen.set, evaluated, eval_set)
    labels = _labels(table, chosen)
    codes = np.stack([label.numbers(len(table)) for label in labels] or [np.zeros(len(table), dtype=np.int32)])
    for set_name, in_set in sets:
        found = _distinct(codes[:, in_set & evaluated])
        if entry.key[0] == "named" and len(found) > 1:
            raise InputError(f"{table.path}: {entry.name}= names one run, and the table holds {len(found)}")
        for code in found:
            rows = np.flatnonzero(in_set & (codes == code[:, None]).all(axis=0))
            labelled = [_name(label, c) for label, c in zip(labels, code, strict=False)]
            key, name, arm = _identity(entry, chosen, labelled)
            if set_name:
                key, name, arm = (*key, set_name), f"{name}/{set_name}", arm and f"{arm}/{set_name}"
            yield key, name, Part(table, chosen, rows, beyond[rows], entry.sources, arm)


def _labels(table: Table, chosen: Chosen) -> list[TextColumn]:
    """The columns that tell runs apart. A seed does where there are several, here or under the same name in another
    table, so that no two seeds make one curve."""
    names = [chosen.run] if chosen.run is not None else []
    if chosen.seed not in (None, chosen.run) and (names or len(table.text(chosen.seed).names) > 1):
        names.append(chosen.seed)
    return [table.text(name) for name in names]


def _identity(entry: Input, chosen: Chosen, names: list[str]) -> tuple[Key, str, str | None]:
    """(what joins its parts, name, arm) of the run with these labels."""
    key, name, arm = entry.key, entry.name, None
    if key[0] == "named":
        return key, name, arm
    if chosen.run is not None:
        name = names.pop(0)
        key = (*entry.key, name) if entry.table.run_column else ("run", name)
    for seed in names:
        key, name, arm = (*key, seed), f"{name} seed {seed}", name
    return key, name, arm


def _sets(
    table: Table, column: str | None, evaluated: NDArray[np.bool_], eval_set: str
) -> tuple[NDArray[np.bool_], list[tuple[str, NDArray[np.bool_]]]]:
    """([n] rows kept from the fit, (name, [n] rows) of each evaluation set to read; the name is empty for held_out)."""
    everything = np.ones(len(table), dtype=bool)
    text = table.text(column) if column is not None else TextColumn("set")
    codes = text.numbers(len(table))
    names = {name: code for name, code in text.names.items() if (evaluated & (codes == code)).any()}
    asked = eval_set not in (_DEFAULT_SET, "all")
    if asked and eval_set not in names:
        raise InputError(f"{table.path}: no evaluation set '{eval_set}'; sets: {', '.join(names) or 'none are named'}")
    if not asked and _FITTED in names and names.keys() - {_FITTED} and names.keys() - {_FITTED} <= _BEYOND:
        return (codes != names[_FITTED]) & (codes >= 0), [("", everything)]
    if len(names) < 2:
        return ~everything, [("", everything)]
    if eval_set == "all":
        return ~everything, [("" if name == _DEFAULT_SET else name, codes == code) for name, code in names.items()]
    if eval_set not in names:
        raise InputError(f"{table.path}: {len(names)} evaluation sets ({', '.join(names)}); choose with --set")
    others = ", ".join(name for name in names if name != eval_set)
    table.messages.append(f"{table.path}: evaluation set {eval_set} is read; also there: {others}")
    return ~everything, [(eval_set if asked else "", codes == names[eval_set])]


def _distinct(codes: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    """The distinct columns of [k, n], in the order of their first appearance."""
    found, first = np.unique(codes, axis=1, return_index=True)
    return [found[:, i] for i in np.argsort(first)]


def _name(label: TextColumn, code: int) -> str:
    return list(label.names)[code] if code >= 0 else f"(no {label.name})"
