"""Files of prompts and answers: which columns hold them, what an answer is, and what is wrong with a row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from scalerl.rl.errors import UserError
from scalerl.rl.tasks.boxes import last_box
from scalerl.rl.tasks.row_files import Batch, batches, first_row, place, text_lines

CheckAnswer = Callable[[str], object]
_PROMPTS = ("prompt", "problem", "question", "text")
_ANSWERS = ("tests", "test_list", "answer", "solution")


@dataclass(frozen=True)
class PromptFile:
    """n rows. prompts, answers: Arrow strings [n]. keys: uint64 [n], equal where prompts are equal up to white space
    (64 bits: that any two of a million other prompts meet has probability 3e-8). lines: int64 [n], 1-based places in
    the file."""

    path: Path
    prompts: pa.ChunkedArray
    answers: pa.ChunkedArray
    keys: np.ndarray
    lines: np.ndarray


@dataclass(frozen=True)
class _Layout:
    prompt: str
    answer: str
    extract: Callable[[str], str | None]  # from the answer column's text; None where it holds no answer
    lacks: str  # what such a text lacks


def read_prompt_file(
    path: Path, prompt_column: str | None, answer_column: str | None, check_answer: CheckAnswer | None = None
) -> PromptFile:
    r"""Read a `.jsonl` or `.parquet` file in batches; the text stays in Arrow buffers.

    Columns that are not named are recognised: `prompt`, `problem`, `question` or `text`, and `tests`, `test_list`,
    `answer` or `solution` (Polaris: problem, answer; GSM8K: question, answer, the answer after `####`; MATH: problem,
    solution, the answer in the last `\boxed`). The first row tells where the answer stands in its column. Answers that
    are numbers become text, lists and objects JSON. Raises UserError that names the file, and the row that is malformed
    or whose answer `check_answer` raises ValueError for."""
    layout = _recognise(path, first_row(path), prompt_column, answer_column)
    return _gather(path, batches(path, (layout.prompt, layout.answer)), layout, check_answer)


def prompt_file_of(path: Path, rows: Sequence[dict[str, Any]]) -> PromptFile:
    """Rows with `prompt` and `answer` that did not come from a file; `path` stands for it in messages."""
    if not rows:
        raise UserError(f"{path} has no rows; give a file with prompts")
    layout = _recognise(path, rows[0], "prompt", "answer")
    values = {name: [row.get(name) for row in rows] for name in (layout.prompt, layout.answer)}
    return _gather(path, [Batch(range(1, len(rows) + 1), values)], layout, None)


def _gather(path: Path, parts: Iterable[Batch], layout: _Layout, check_answer: CheckAnswer | None) -> PromptFile:
    prompts, answers, keys, lines = [], [], [], []
    for batch in parts:
        texts = _texts(path, batch.lines, layout.prompt, batch.values[layout.prompt])
        rows = zip(batch.lines, batch.values[layout.answer], strict=True)
        found = [_answer(path, line, value, layout) for line, value in rows]
        if check_answer is not None:
            _check(path, batch.lines, found, check_answer)
        prompts.append(pa.array(texts, pa.string()))
        answers.append(pa.array(found, pa.string()))
        keys.append(prompt_keys(texts))
        lines.append(np.array(batch.lines))
    return PromptFile(
        path, pa.chunked_array(prompts), pa.chunked_array(answers), np.concatenate(keys), np.concatenate(lines)
    )


def read_prompt_keys(path: Path, prompt_column: str | None) -> np.ndarray:
    """Keys of a list of prompts, uint64 [n]: a JSONL or Parquet file with a prompt column, or a `.txt` with one prompt
    a line. Raises UserError as `read_prompt_file` does."""
    if path.suffix == ".txt":
        return prompt_keys([line for _, line in text_lines(path)])
    column = _column(path, first_row(path), prompt_column, _PROMPTS, "prompt")
    found = [_texts(path, batch.lines, column, batch.values[column]) for batch in batches(path, (column,))]
    return np.concatenate([prompt_keys(texts) for texts in found])


def prompt_keys(texts: Sequence[str]) -> np.ndarray:
    """uint64 keys [n] of prompt texts with their white space collapsed; the same in every process."""
    normal = (" ".join(text.split()).encode() for text in texts)
    return np.frombuffer(b"".join(blake2b(text, digest_size=8).digest() for text in normal), dtype=np.uint64)


def _recognise(path: Path, row: dict[str, Any], prompt: str | None, answer: str | None) -> _Layout:
    prompt = _column(path, row, prompt, _PROMPTS, "prompt")
    answer = _column(path, row, answer, _ANSWERS, "answer")
    text = row[answer] if isinstance(row[answer], str) else ""
    if "####" in text:
        return _Layout(prompt, answer, _after_hashes, "no answer after ####")
    if answer == "solution" and r"\boxed" in text:
        return _Layout(prompt, answer, last_box, r"no whole \boxed{...}")
    return _Layout(prompt, answer, str.strip, "no text")


def _column(path: Path, row: dict[str, Any], named: str | None, known: Sequence[str], kind: str) -> str:
    if named is not None and named not in row:
        raise UserError(f"{path} has no column '{named}' (task.data.{kind}_column); it has {', '.join(row)}")
    found = [named] if named is not None else [name for name in known if name in row]
    if not found:
        raise UserError(
            f"{path} has no {kind} column that is known ({', '.join(known)}) but {', '.join(row)}; set "
            f"task.data.{kind}_column"
        )
    return found[0]


def _texts(path: Path, lines: Sequence[int], column: str, values: Sequence[Any]) -> list[str]:
    for line, value in zip(lines, values, strict=True):
        if not isinstance(value, str) or not value.strip():
            raise _malformed(path, line, column, value)
        _check_text(path, line, column, value)
    return list(values)


def _answer(path: Path, line: int, value: Any, layout: _Layout) -> str:
    if isinstance(value, (list, dict)):
        return json.dumps(value)
    if type(value) in (int, float):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise _malformed(path, line, layout.answer, value)
    _check_text(path, line, layout.answer, value)
    text = layout.extract(value)
    if not text:
        raise UserError(f"{place(path, line)}: '{layout.answer}' has {layout.lacks}; mend or remove the row")
    return text


def _check(path: Path, lines: Sequence[int], answers: Sequence[str], check_answer: CheckAnswer) -> None:
    for line, answer in zip(lines, answers, strict=True):
        try:
            check_answer(answer)
        except ValueError as error:
            raise UserError(f"{place(path, line)}: {error}; mend or remove the row") from None


def _check_text(path: Path, line: int, column: str, text: str) -> None:
    """JSON can spell halves of a character, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        broken = ascii(text[error.start])[1:-1]
        raise UserError(
            f"{place(path, line)}: '{column}' has {broken}, half of a character; mend or remove the row"
        ) from None


def _malformed(path: Path, line: int, column: str, value: Any) -> UserError:
    fault = "missing" if value is None else "empty" if isinstance(value, str) else f"a {type(value).__name__}, not text"
    return UserError(f"{place(path, line)}: '{column}' is {fault}; mend or remove the row")


def _after_hashes(text: str) -> str | None:
    _, found, answer = text.rpartition("####")
    return answer.strip().replace(",", "") if found else None
