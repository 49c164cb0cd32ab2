"""Which column is which: compute, pass rate, step, entropy, run, evaluation set."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from scalerl.fitting.errors import InputError
from scalerl.fitting.readers.table import Kind, Table

_HARDWARE = r"(?:device|accelerator|gpu|tpu|chip|card|node|core|cpu|[abhvl]\d{2,3})"
_COMPUTE = re.compile(
    rf"(?:(?:total|train|training|cumulative|cum)_)*(?:{_HARDWARE}_?(?:hours|hour|hrs|h|days)|compute(?:_(?:hours|h|days|units?))?|pfs?_?days)|.*flo(?:p)?s"
)
_RATE = re.compile(r"(?!total|cum).*(?:[kmgtp]flops|flops?_?per.*|flops_(?:s|rate))")  # throughput, no running total
_NOT_TRAINING = re.compile(r"(?:eval|wasted|checkpoint|idle)_.*")  # ledger columns beside the training axis
_PASS_RATE = re.compile(r"pass_rate|acc(?!um|el|ept|ess|ount)|mean@")
_NOT_A_MEAN = re.compile(
    r"(?<![a-z])std|err(?:or)?(?:$|[^a-z])|variance|best@|worst@|maj@|(?<![a-z])count(?![a-z])|n_prompts"
)
_STEPS = (
    *("step", "steps", "global_step", "global_steps", "train_step", "training_step", "train_steps"),
    *("iteration", "iter", "update", "_step"),
)
_RUNS = (
    "run",
    "run_name",
    "run_id",
    "experiment",
    "experiment_name",
    "exp",
    "exp_name",
    "arm",
    "name",
    "recipe",
    "method",
)
_SETS = ("set", "split")


def _plain(name: str) -> str:
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def _last(name: str) -> str:
    return re.split(r"[/.]", _plain(name))[-1]


def is_compute(name: str) -> bool:
    last = _last(name)
    return bool(_COMPUTE.fullmatch(last)) and not _NOT_TRAINING.fullmatch(last) and not _RATE.fullmatch(last)


def is_pass_rate(name: str) -> bool:
    return bool(_PASS_RATE.search(_plain(name))) and not _NOT_A_MEAN.search(_plain(name))


def is_step(name: str) -> bool:
    return _last(name) in _STEPS


def is_entropy(name: str) -> bool:
    return "entropy" in _last(name) and not _NOT_A_MEAN.search(_last(name))


def is_run(name: str) -> bool:
    return _plain(name) in _RUNS


def is_set(name: str) -> bool:
    return _plain(name) in _SETS


def is_seed(name: str) -> bool:
    return _last(name) == "seed"


@dataclass(frozen=True)
class Wanted:
    """The columns that the user named; None where a column is recognised by its name."""

    x: str | None = None
    y: str | None = None
    run: str | None = None
    entropy: str | None = None
    compute_per_step: float | None = None

    def kind_of(self, name: str) -> Kind | None:
        """What to keep of a column while its file streams by."""
        if name == self.run or (self.run is None and is_run(name)) or is_set(name) or is_seed(name):
            return "text"
        if name == self.y or (self.y is None and is_pass_rate(name)):
            return "signal"
        if name == self.x or (self.x is None and self.compute_per_step is None and is_compute(name)):
            return "signal"
        if is_step(name) or name == self.entropy or (self.entropy is None and is_entropy(name)):
            return "number"
        return None


@dataclass(frozen=True)
class Chosen:
    """The columns of one table by role. `x` is None where compute is counted in steps."""

    x: str | None
    y: str
    step: str | None
    entropy: str | None
    run: str | None
    seed: str | None
    set: str | None


def choose(table: Table, wanted: Wanted) -> Chosen:
    """Pick the columns. Raises InputError that lists the candidates where a name doesn't settle it."""
    y = _settle(table, wanted.y, is_pass_rate, "pass-rate", "--y") if table.only_metric is None else table.only_metric
    if not len(table):
        raise InputError(f"{table.path}: no rows with numbers in it")
    step = _best_step(table, y)
    if wanted.compute_per_step is not None:
        x = None
        if step is None:
            raise InputError(f"{table.path}: --compute-per-step needs a step column; columns: {_listed(table.names)}")
    else:
        x = _compute(table, wanted.x, step)
    return Chosen(
        x=x,
        y=y,
        step=step,
        entropy=_entropy(table, wanted.entropy),
        run=_run(table, wanted.run),
        seed=next((name for name in table.texts if is_seed(name)), None),
        set=next((name for name in table.texts if is_set(name)), None),
    )


def _compute(table: Table, given: str | None, step: str | None) -> str:
    if given is None and not any(kind and is_compute(name) for name, kind in table.names.items()):
        way_out = "--compute-per-step VALUE (the compute of one step)" if step else "--x COLUMN"
        raise InputError(f"{table.path}: no compute column; give {way_out}; columns: {_listed(table.names)}")
    return _settle(table, given, is_compute, "compute", "--x")


def _settle(table: Table, given: str | None, matches: Callable[[str], bool], role: str, option: str) -> str:
    if given is not None:
        if given not in table.names:
            raise InputError(f"{table.path}: no column '{given}'; columns: {_listed(table.names)}")
        return given
    found = [name for name, kind in table.names.items() if kind and matches(name)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise InputError(f"{table.path}: no {role} column; name it with {option}; columns: {_listed(table.names)}")
    raise InputError(f"{table.path}: {len(found)} {role} columns; choose one with {option}: {_listed(found)}")


def _best_step(table: Table, y: str) -> str | None:
    """The step column that has a number in most of the evaluation rows; the more usual name among equals."""
    candidates = [name for name in table.columns if is_step(name) and name != y]
    if not candidates:
        return None
    evaluated = table.numbers(y) == table.numbers(y)

    def rank(name: str) -> tuple[int, int]:
        cells = table.numbers(name)
        return -int((evaluated & (cells == cells)).sum()), _STEPS.index(_last(name))

    return min(candidates, key=rank)


def _entropy(table: Table, given: str | None) -> str | None:
    if given is not None:
        return _settle(table, given, is_entropy, "entropy", "--x")
    found = [name for name in table.columns if is_entropy(name)]
    exact = [name for name in found if _last(name) == "entropy"]
    if len(found) == 1:
        return found[0]
    return exact[0] if len(exact) == 1 else None


def _run(table: Table, given: str | None) -> str | None:
    if table.run_column is not None:
        return table.run_column
    if given is not None:
        if given not in table.names:
            raise InputError(
                f"{table.path}: no column '{given}' to name runs by; columns: {_listed(table.names)} "
                "(NAME=FILE,FILE joins files into one run)"
            )
        return given
    named = [name for name in table.texts if is_run(name)]
    found = sorted((n for n in named if not _labels_rows(table, n)), key=lambda name: _RUNS.index(_plain(name)))
    if not found:
        return None
    first = found[0]
    for other in found[1:]:
        if _splits_further(table, first, other):
            raise InputError(f"{table.path}: {first} and {other} both tell runs apart; choose one with --run")
    return first


def _labels_rows(table: Table, name: str) -> bool:
    """Whether the column differs in every row, as the name of a checkpoint does, and so can't name runs."""
    labels = len(table) > 2 and len(table.text(name).names) == len(table)
    if labels:
        table.messages.append(f"{table.path}: column '{name}' differs in every row and is not taken for the run's name")
    return labels


def _splits_further(table: Table, first: str, other: str) -> bool:
    pairs = zip(table.text(first).numbers(len(table)), table.text(other).numbers(len(table)), strict=True)
    return len(set(pairs)) > len(set(table.text(first).numbers(len(table)).tolist()))


def _listed(names: Iterable[str], limit: int = 30) -> str:
    names = [name for name in names if name and not name.startswith("(")]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) + more) or "none"
