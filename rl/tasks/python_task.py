"""The user's own task: a Python file with two functions."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from scalerl.rl.config import PythonTask as Config
from scalerl.rl.errors import UserError
from scalerl.rl.tasks.dataset import DatasetTask, dataset_of, put
from scalerl.rl.tasks.timed_pool import Failed, TimedPool
from scalerl.rl.types import Prompt, Verdict


class PythonTask(DatasetTask):
    """`prompts()` gives dicts with `prompt` and `answer`; `verify(completion, answer)` says True or False. It is called
    in processes of its own, and one that raises, dies, answers otherwise or takes too long is a verifier's error."""

    def __init__(self, config: Config, name: str) -> None:
        self.name = name
        self._module = str(Path(config.module).resolve())
        module = _load(self._module)
        for function in ("prompts", "verify"):
            if not callable(getattr(module, function, None)):
                raise UserError(f"task.module={config.module} has no function {function}; it needs prompts and verify")
        try:
            rows = list(module.prompts())
        except Exception as error:
            raise _raised(config.module, "prompts()", error) from error
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict):
                raise UserError(f"task.module={config.module}: row {number} of prompts() is {row!r:.60}, no dict")
        make = put(config.asking, name)
        self._data = dataset_of(Path(config.module), rows, make, n_held_out=config.n_held_out, seed=config.seed)
        self._pool = TimedPool(call_verify, workers=config.workers, seconds=config.time_limit)

    def verify(self, prompt: Prompt, completion: str) -> bool:
        return call_verify(self._module, completion, prompt.answer)

    def verify_batch(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        found = self._pool.map([(self._module, completion, prompt.answer) for prompt, completion in pairs])
        return [Verdict(False, error=True) if isinstance(f, Failed) else Verdict(f) for f in found]


def call_verify(module: str, completion: str, answer: str) -> bool:
    """Raises TypeError where the user's function says neither True nor False."""
    verdict = _load(module).verify(completion, answer)
    if not isinstance(verdict, bool):
        raise TypeError(f"verify gave {verdict!r}, neither True nor False")
    return verdict


@lru_cache(maxsize=8)
def _load(path: str) -> ModuleType:
    spec = spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise UserError(f"task.module={path} is no Python file")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _raised(path, "it", error) from error
    return module


def _raised(path: str, what: str, error: Exception) -> UserError:
    """In one line, with the last place in the user's own file."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == Path(path).resolve()]
    line = error.lineno if isinstance(error, SyntaxError) else own[-1].lineno if own else None
    where = f" (line {line})" if line else ""
    first = str(error).splitlines()[:1]
    return UserError(f"task.module={path}: {what} raised {': '.join([type(error).__name__, *first])}{where}")
