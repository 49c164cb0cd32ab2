"""From what the user named on the command line to runs."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

from scalerl.fitting.errors import InputError
from scalerl.fitting.readers.columns import Wanted
from scalerl.fitting.readers.cutting import Input, Part, cut
from scalerl.fitting.readers.parquet import read_parquet
from scalerl.fitting.readers.rules import Rules, assemble
from scalerl.fitting.readers.tensorboard_runs import read_tensorboard
from scalerl.fitting.readers.text_files import read_csv, read_jsonl
from scalerl.fitting.readers.wandb_runs import read_offline, read_online
from scalerl.fitting.runs import Run, Source

_READERS = {
    **dict.fromkeys((".csv", ".tsv"), read_csv),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), read_jsonl),
    **dict.fromkeys((".parquet", ".pq"), read_parquet),
}
_EVAL = "eval.jsonl"
_ONLINE = re.compile(r"(?:wandb:)?([^/\s:]+/[^/\s]+/[^/\s]+)")
_NAMED = re.compile(r"([^=/\\]+)=(.+)")


def read_runs(
    paths: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    x: str | None = None,
    y: str | None = None,
    run: str | None = None,
    scale: str | None = None,
    keep: str = "last",
    on_compute_reset: str = "error",
    compute_per_step: float | None = None,
    eval_set: str = "held_out",
    entropy: str | None = None,
) -> list[Run]:
    """Read held-out curves from run folders, CSV, JSONL, Parquet, W&B and TensorBoard.

    A path is a file, a run folder (or a folder of run folders), ENTITY/PROJECT/RUN_ID of a W&B run on the server, or
    NAME=PATH[,PATH...], which names a run and joins its files. `x`, `y`, `run` and `entropy` name columns that are
    otherwise recognised by their names. `scale`: "fraction" or "percent". `keep`: "last", "first" or "error", of rows
    with equal steps. `on_compute_reset`: "error" or "accumulate". `compute_per_step`: compute of one step, for tables
    that count in steps. `eval_set`: the evaluation set to read where a file holds several, or "all".

    Returns the runs in the order in which they were named. Raises InputError, with file and line, for anything that
    can't be read in one way only.
    """
    if isinstance(paths, (str, PathLike)):
        paths = [paths]
    rules = Rules(scale=scale, keep=keep, on_compute_reset=on_compute_reset, compute_per_step=compute_per_step)
    if x is not None and compute_per_step is not None:
        raise InputError("--x and --compute-per-step both say where compute comes from; give one")
    wanted = Wanted(x=x, y=y, run=run, entropy=entropy, compute_per_step=compute_per_step)
    gathered: dict[tuple[str, ...], tuple[str, list[Part]]] = {}
    for path in paths:
        for entry in _inputs(str(path), wanted):
            for key, name, part in cut(entry, eval_set):
                gathered.setdefault(key, (name, []))[1].append(part)
    if not gathered:
        raise InputError("no runs: name at least one file or folder")
    for key, (name, parts) in gathered.items():
        if key[0] == "named":
            _refuse_several_seeds(name, parts)
    named = _with_unique_names(_without_lone_seeds(list(gathered.values())))
    runs = [assemble(name, parts, rules) for name, parts in named]
    if not any(len(r) for r in runs):
        raise InputError(_nothing_usable(runs[0]))
    return runs


def _refuse_several_seeds(name: str, parts: Sequence[Part]) -> None:
    """Under NAME=, each file may hold one seed without telling runs apart by it; together they make one run."""
    seeds = {}
    for part in parts:
        if part.chosen.seed is not None:
            seeds |= dict.fromkeys(part.table.text(part.chosen.seed).names, part.table.path)
    if len(seeds) > 1:
        each = ", ".join(f"{path} of seed {seed}" for seed, path in seeds.items())
        raise InputError(
            f"{name}= joins the parts of one run, and these are several: {each}; give the files without it"
        )


def _inputs(text: str, wanted: Wanted) -> Iterator[Input]:
    named = _NAMED.fullmatch(text)
    if named and not Path(text).exists():
        name, parts = named[1], named[2].split(",")
        for part in parts:
            for entry in _inputs_of(part, wanted):
                yield replace(entry, name=name, key=("named", name))
    else:
        yield from _inputs_of(text, wanted)


def _inputs_of(text: str, wanted: Wanted) -> Iterator[Input]:
    path = Path(text)
    if path.is_dir():
        yield from _folder(path, wanted)
    elif path.exists():
        yield _file(path, wanted)
    elif (online := _ONLINE.fullmatch(text)) and (text.startswith("wandb:") or not path.suffix):
        table, run_id, name, source = read_online(online[1], wanted)
        yield Input(table, wanted, name, ("wandb", run_id), (source,))
    else:
        raise InputError(f"{text}: no such file or folder")


def _file(path: Path, wanted: Wanted) -> Input:
    if path.name == _EVAL:
        return _run_folder(path.parent, wanted)
    if path.suffix == ".wandb":
        table, run_id, name = read_offline(path, wanted)
        return Input(table, wanted, name, ("wandb", run_id), (_hashed(path),))
    if "tfevents" in path.name:
        raise InputError(f"{path}: name the folder that holds the event files, {path.parent}")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        known = ", ".join((*_READERS, ".wandb"))
        raise InputError(f"{path}: unknown kind of file '{path.suffix}'; known: {known}, run and TensorBoard folders")
    table = reader(path, wanted)
    if not len(table) and not table.names:
        raise InputError(f"{path} is empty")
    return Input(table, wanted, path.stem, ("file", str(path.resolve())), (_hashed(path),))


def _run_folder(folder: Path, wanted: Wanted) -> Input:
    """A run of `scalerl train`: device-hours unless --x names another axis of its ledger."""
    path = folder / _EVAL
    if wanted.x is None and wanted.compute_per_step is None:
        wanted = replace(wanted, x="device_hours")
    if wanted.y is None:
        wanted = replace(wanted, y="pass_rate")
    table = read_jsonl(path, wanted)
    return Input(table, wanted, folder.resolve().name, ("file", str(path.resolve())), (_hashed(path),))


def _folder(folder: Path, wanted: Wanted) -> Iterator[Input]:
    found = list(_known(folder, wanted))
    if not found:
        for child in sorted(p for p in folder.rglob("*") if p.is_dir() and not p.is_symlink()):
            found.extend(_known(child, wanted))
    if not found:
        tables = sorted(p.name for p in folder.iterdir() if p.suffix.lower() in _READERS)
        if tables:
            raise InputError(
                f"{folder} holds {len(tables)} tables ({', '.join(tables[:3])}...): name the files, each a run, or "
                "NAME=FILE,FILE for the parts of one"
            )
        raise InputError(f"{folder}: no {_EVAL}, .wandb or TensorBoard event file in it")
    yield from found


def _known(folder: Path, wanted: Wanted) -> Iterator[Input]:
    """The runs that lie directly in a folder."""
    events = sorted(p for p in folder.iterdir() if "tfevents" in p.name)
    if (folder / _EVAL).exists():
        yield _run_folder(folder, wanted)
    elif wandb_files := sorted(folder.glob("*.wandb")):
        for path in wandb_files:
            yield _file(path, wanted)
    elif events:
        table = read_tensorboard(folder, wanted)
        yield Input(table, wanted, folder.resolve().name, ("file", str(folder.resolve())), tuple(map(_hashed, events)))


def _without_lone_seeds(runs: list[tuple[str, list[Part]]]) -> list[tuple[str, list[Part]]]:
    """Where no arm has several seeds, each is a run of the arm's name."""
    arms = [parts[0].arm for _, parts in runs]
    if len(set(arms) - {None}) < len(arms) - arms.count(None):
        return runs
    return [(parts[0].arm or name, [replace(part, arm=None) for part in parts]) for name, parts in runs]


def _with_unique_names(groups: Sequence[tuple[str, list[Part]]]) -> list[tuple[str, list[Part]]]:
    """Two runs that would have one name get their folder before it, and where that is not enough their path."""
    named = list(groups)
    for longer in (_with_folder, _with_path):
        counts = Counter(name for name, _ in named)
        named = [(longer(name, parts) if counts[name] > 1 else name, parts) for name, parts in named]
    return named


def _with_folder(name: str, parts: list[Part]) -> str:
    return f"{Path(parts[0].table.path).resolve().parent.name}/{name}"


def _with_path(name: str, parts: list[Part]) -> str:
    return f"{name} ({parts[0].table.path})"


def _nothing_usable(run: Run) -> str:
    first = f"; {run.messages[-1]}" if run.n_dropped else ""
    return f"{run.sources[0].path}: no row with a usable {run.x_name} and {run.y_name}{first}"


def _hashed(path: Path) -> Source:
    try:
        with path.open("rb") as file:
            return Source(str(path), hashlib.file_digest(file, "sha256").hexdigest())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
