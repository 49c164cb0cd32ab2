"""Prompt datasets: training and evaluation prompts from files, without a prompt in both."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from scalerl.rl.config import Asking, Data
from scalerl.rl.errors import UserError
from scalerl.rl.tasks.prompt_files import CheckAnswer, PromptFile, prompt_file_of, read_prompt_file, read_prompt_keys
from scalerl.rl.tasks.row_files import place
from scalerl.rl.types import Chat, Prompt

MakePrompt = Callable[[str, str, str], Prompt]  # (id, text, answer as the file has it)
HELD_OUT = "held_out"


def put(asking: Asking, task: str) -> MakePrompt:
    """Makes prompts that are put to the model as `asking` says."""
    chat = Chat(asking.system, asking.prefill) if asking.chat else None
    return lambda id, text, answer: Prompt(id, asking.template.replace("{prompt}", text), answer, task, chat)


class PromptTable(Sequence[Prompt]):
    """Some rows of a file; a prompt is made when it is asked for. Its id is its key, in hexadecimal: the same in
    every run, wherever the row stands."""

    def __init__(self, file: PromptFile, rows: np.ndarray, make: MakePrompt) -> None:
        self._file, self._rows, self._make = file, rows, make

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> PromptTable: ...
    def __getitem__(self, index: int | slice) -> Prompt | PromptTable:
        if isinstance(index, slice):
            return PromptTable(self._file, self._rows[index], self._make)
        row = int(self._rows[index])
        return self._make(f"{self._file.keys[row]:016x}", *self.texts(index))

    def texts(self, index: int) -> tuple[str, str]:
        """(prompt, answer) as the file has them."""
        row = int(self._rows[index])
        return self._file.prompts[row].as_py(), self._file.answers[row].as_py()

    @cached_property
    def fingerprint(self) -> str:
        """Of the prompts and answers in their order."""
        found = hashlib.sha256(self._file.keys[self._rows].tobytes())
        found.update("\0".join(self._file.answers.take(pa.array(self._rows)).to_pylist()).encode())
        return found.hexdigest()[:16]


@dataclass(frozen=True)
class Dataset:
    """train, and the sets that are evaluated by name, `held_out` among them."""

    train: PromptTable
    evaluation: dict[str, PromptTable]

    def held_out(self) -> PromptTable:
        return self.evaluation[HELD_OUT]

    def extra(self, task: str, name: str) -> PromptTable:
        """A further evaluation set. Raises UserError, with the names there are, for an unknown one."""
        known = [key for key in self.evaluation if key != HELD_OUT]
        if name not in known:
            raise UserError(f"eval.extra: the task {task} has no set '{name}'; it has {', '.join(known) or 'none'}")
        return self.evaluation[name]


class DatasetTask:
    """The prompts' side of a task whose prompts are a data set."""

    name: str
    _data: Dataset

    def train_prompts(self) -> Sequence[Prompt]:
        return self._data.train

    def held_out_prompts(self) -> Sequence[Prompt]:
        return self._data.held_out()

    def extra_prompts(self, name: str) -> Sequence[Prompt]:
        return self._data.extra(self.name, name)


def load_dataset(
    data: Data, make: MakePrompt, check_answer: CheckAnswer | None = None, train: PromptFile | None = None
) -> Dataset:
    """Read the files of `data`; what is left out is told on stderr. `check_answer` raises ValueError for an answer that
    the task can't use; `train` stands for the training file where it was read already.

    In this order: of equal prompts the first stays; prompts of `exclude` leave the training file; without a held-out
    file `n_held_out` prompts are drawn from it, a function of the seed and of the set of prompts but not of their
    order; prompts of any evaluation set leave training. Raises UserError where a file is malformed or nothing is left.
    """
    files = {} if data.held_out is None else {HELD_OUT: data.held_out}
    train = train or _read(Path(data.train), data, check_answer)
    train_rows = _different(train)
    if data.exclude is not None:
        unwanted = np.isin(train.keys[train_rows], read_prompt_keys(Path(data.exclude), data.prompt_column))
        _tell_removed(train, train_rows[unwanted], f"are listed in {data.exclude}")
        train_rows = train_rows[~unwanted]
    evaluation: dict[str, PromptTable] = {}
    if data.held_out is None:
        held_out = _draw_held_out(train, train_rows, data)
        evaluation[HELD_OUT] = PromptTable(train, held_out, make)
        train_rows = np.setdiff1d(train_rows, held_out, assume_unique=True)
    for name, path in (files | data.extra).items():
        file = _read(Path(path), data, check_answer)
        rows = _different(file)
        evaluation[name] = PromptTable(file, rows, make)
        overlap = np.isin(train.keys[train_rows], file.keys[rows])
        _tell_removed(train, train_rows[overlap], f"stand in {path} too, which is evaluated")
        train_rows = train_rows[~overlap]
    if not len(train_rows):
        raise UserError(f"task.data: no prompt of {train.path} is left to train on")
    return Dataset(PromptTable(train, train_rows, make), evaluation)


def dataset_of(
    source: Path, rows: Sequence[dict[str, Any]], make: MakePrompt, *, n_held_out: int, seed: int
) -> Dataset:
    """As `load_dataset`, of rows in memory with `prompt` and `answer`; `source` stands for them in messages."""
    data = Data(
        train=str(source),
        held_out=None,
        n_held_out=n_held_out,
        seed=seed,
        prompt_column=None,
        answer_column=None,
        exclude=None,
        extra={},
    )
    return load_dataset(data, make, train=prompt_file_of(source, rows))


def _read(path: Path, data: Data, check_answer: CheckAnswer | None) -> PromptFile:
    return read_prompt_file(path, data.prompt_column, data.answer_column, check_answer)


def _different(file: PromptFile) -> np.ndarray:
    """Of each prompt the first of its rows, in the file's order; the others are told."""
    rows = np.sort(np.unique(file.keys, return_index=True)[1])
    repeated = np.setdiff1d(np.arange(len(file.keys)), rows, assume_unique=True)
    _tell_removed(file, repeated, "repeat an earlier prompt")
    return rows


def _draw_held_out(file: PromptFile, rows: np.ndarray, data: Data) -> np.ndarray:
    if data.n_held_out >= len(rows):
        raise UserError(
            f"task.data.n_held_out={data.n_held_out} leaves nothing to train on: {file.path} has {len(rows)} different "
            "prompts; lower it, or give task.data.held_out a file"
        )
    by_key = rows[np.argsort(file.keys[rows])]
    return np.sort(np.random.default_rng(data.seed).permutation(by_key)[: data.n_held_out])


def _tell_removed(file: PromptFile, rows: np.ndarray, why: str) -> None:
    if len(rows):
        first = place(file.path, int(file.lines[rows[0]]))
        print(f"{file.path}: {len(rows):,} prompts left out, which {why} (the first: {first})", file=sys.stderr)
