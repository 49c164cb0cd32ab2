"""Programs: solutions are run on tests in a sandbox; what a test expects never leaves this process."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from scalerl.rl.config import CodeTask
from scalerl.rl.tasks import final_part, unparsed
from scalerl.rl.tasks.dataset import DatasetTask, load_dataset, put
from scalerl.rl.tasks.sandbox import Sandbox
from scalerl.rl.types import Prompt, Verdict

_BLOCK = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Tests:
    """pairs: (standard input, standard output). calls: (expression, value that it must have)."""

    pairs: tuple[tuple[str, str], ...]
    calls: tuple[tuple[str, Any], ...]


class Code(DatasetTask):
    """The solution of a completion is its last fenced block after the thinking, Python; it is correct if it passes
    every test of the prompt (the first `max_tests` where there are more). A completion without a block is not correct
    and `unparsed`. Where the sandbox can't be set up the verdict is a verifier's error."""

    def __init__(self, config: CodeTask, name: str) -> None:
        self.name = name
        self._reward, self._max_tests, self._workers = config.reward, config.max_tests, config.workers
        self._sandbox = Sandbox(seconds=config.time_limit, memory=config.memory)
        self._sandbox.check()
        self._data = load_dataset(config.data, put(config.asking, name), check_answer=read_tests)

    def verify(self, prompt: Prompt, completion: str) -> bool:
        (verdict,) = self.verify_batch([(prompt, completion)])
        if verdict.error:
            raise RuntimeError("the sandbox could not be set up")
        return verdict.correct

    def verify_batch(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Equal solutions of a prompt are run once."""
        solutions = [(prompt.answer, last_block(final_part(completion))) for prompt, completion in pairs]
        asked = [pair for pair in dict.fromkeys(solutions) if pair[1] is not None]
        with ThreadPoolExecutor(self._workers) as threads:  # each waits for a process
            found = dict(zip(asked, threads.map(lambda pair: self._passes(*pair), asked), strict=True))
        return [
            unparsed(self._reward) if source is None else _verdict(found[answer, source])
            for answer, source in solutions
        ]

    def _passes(self, answer: str, source: str | None) -> bool | None:
        """None where the sandbox could not be set up."""
        assert source is not None
        tests = _cached_tests(answer)
        for stdin, expected in tests.pairs[: self._max_tests]:
            ran = self._sandbox.program(source, stdin)
            if ran.status == "unlocked":
                return None
            if ran.status != "done" or not same_output(ran.output, expected):
                return False
        calls = tests.calls[: self._max_tests]
        if not calls:
            return True
        ran = self._sandbox.calls(source, [expression for expression, _ in calls])
        if ran.status == "unlocked":
            return None
        return ran.status == "done" and _values(ran.output, len(calls)) == [_plain(value) for _, value in calls]


def last_block(text: str) -> str | None:
    """Content of the last fenced block of Python, or of no stated language; None where there is none."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else None


def read_tests(answer: str) -> Tests:
    """The tests of a row: `{"inputs": [...], "outputs": [...]}`, with `"fn_name"` calls of that function (arguments and
    values), without it standard input and output; `[{"input": ..., "output": ...}, ...]`, the same as a list; or
    `["assert f(1) == 2", ...]`, where the right-hand side is a literal.

    Raises ValueError where it is none of them: an assertion of another form would have to run, and so be seen, beside
    the solution that it judges."""
    try:
        tests = json.loads(answer)
    except (json.JSONDecodeError, RecursionError):
        raise ValueError("tests are no JSON") from None
    if isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests):
        return Tests((), tuple(_assertion(test) for test in tests))
    if isinstance(tests, list) and all(isinstance(test, dict) for test in tests):  # an empty one is refused below
        tests = {
            "inputs": [test.get("input") for test in tests],
            "outputs": [test.get("output") for test in tests],
            "fn_name": next((test["fn_name"] for test in tests if test.get("fn_name")), None),
        }
    given: dict[str, Any] = tests if isinstance(tests, dict) else {}
    inputs, outputs = given.get("inputs"), given.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise ValueError("tests need a list of inputs and one of as many outputs, and one at least")
    pairs = list(zip(inputs, outputs, strict=True))
    if name := given.get("fn_name"):
        if not str(name).isidentifier() or not all(isinstance(arguments, list) for arguments, _ in pairs):
            raise ValueError("tests of a function need its name and lists of arguments")
        return Tests((), tuple((f"{name}({', '.join(map(repr, arguments))})", value) for arguments, value in pairs))
    if not all(isinstance(part, str) for pair in pairs for part in pair):
        raise ValueError("tests by standard input and output need text")
    return Tests(tuple(pairs), ())


_cached_tests = lru_cache(maxsize=1024)(read_tests)


def _assertion(text: str) -> tuple[str, Any]:
    try:
        (statement,) = ast.parse(text.strip()).body
        if isinstance(statement, ast.Assert) and isinstance(test := statement.test, ast.Compare):
            (operator,), (right,) = test.ops, test.comparators
            if isinstance(operator, ast.Eq):
                return ast.unparse(test.left), ast.literal_eval(right)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):  # what `literal_eval` may raise
        pass
    raise ValueError(f"{text!r} is not of the form `assert EXPRESSION == LITERAL`")


def _values(output: str, n: int) -> list[Any] | None:
    """The n values that the sandbox printed, as plain literals; None where they are not."""
    try:
        values = json.loads(output)
        return [_plain(ast.literal_eval(value)) for value in values] if len(values) == n else None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _plain(value: Any) -> Any:
    """Tuples as lists, since JSON has no tuples; floats to nine digits."""
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    return float(f"{value:.9g}") if isinstance(value, float) and math.isfinite(value) else value


def same_output(output: str, expected: str) -> bool:
    """Word by word, white space aside; a number expected with a decimal point may be off by 1e-6, relative or not."""
    words, wanted = output.split(), expected.split()
    return len(words) == len(wanted) and all(_same_word(a, b) for a, b in zip(words, wanted, strict=True))


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted or "." not in wanted:
        return word == wanted
    try:
        return math.isclose(float(word), float(wanted), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False


def _verdict(passed: bool | None) -> Verdict:
    return Verdict(False, error=True) if passed is None else Verdict(passed)
