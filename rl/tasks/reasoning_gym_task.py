"""The tasks of the library reasoning-gym, each by its name: it makes the problems and scores the answers."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scalerl.rl.config import ReasoningGymTask as Config
from scalerl.rl.errors import UserError
from scalerl.rl.tasks import final_part, unparsed
from scalerl.rl.tasks.dataset import DatasetTask, dataset_of, put
from scalerl.rl.tasks.timed_pool import Failed, TimedPool
from scalerl.rl.types import Prompt, Verdict

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymTask(DatasetTask):
    """`n_train + n_held_out` problems are made when the run starts, equal ones dropped, and `n_held_out` of them held
    out. A prompt's `answer` is its problem's number. What a completion says between the last `<answer>` and `</answer>`
    after its thinking goes to the library's own scorer; it is correct where the score reaches `pass_score`. The scorer
    runs in processes of its own, and one that fails or takes too long is a verifier's error."""

    def __init__(self, config: Config, name: str) -> None:
        self.name, self._reward, self._pass_score = name, config.reward, config.pass_score
        size = config.n_train + config.n_held_out
        self._problems = (config.name, json.dumps(config.parameters), config.seed, size)
        _check(config)
        try:
            problems = _problems(*self._problems)
            rows = [{"prompt": problems[i]["question"], "answer": str(i)} for i in range(size)]
        except Exception as error:  # of a generator: its parameters are checked by assertions, and each by its own
            raise UserError(
                f"task.name={config.name} makes no problems with task.parameters={config.parameters}: "
                f"{type(error).__name__}: {error}"
            ) from None
        make = put(config.asking, name)
        self._data = dataset_of(
            Path(f"reasoning_gym.{config.name}"), rows, make, n_held_out=config.n_held_out, seed=config.seed
        )
        self._pool = TimedPool(score, workers=config.workers, seconds=config.time_limit, preload=["reasoning_gym"])

    def verify(self, prompt: Prompt, completion: str) -> bool:
        (verdict,) = self.verify_batch([(prompt, completion)])
        if verdict.error:
            raise RuntimeError(f"no verdict on {completion!r}")
        return verdict.correct

    def verify_batch(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        answers = [(int(prompt.answer), answer_in(completion)) for prompt, completion in pairs]
        asked = [pair for pair in dict.fromkeys(answers) if pair[1] is not None]
        scores = dict(zip(asked, self._pool.map([(*self._problems, *pair) for pair in asked]), strict=True))
        return [
            unparsed(self._reward) if answer is None else self._verdict(scores[number, answer])
            for number, answer in answers
        ]

    def _verdict(self, found: float | Failed) -> Verdict:
        return Verdict(False, error=True) if isinstance(found, Failed) else Verdict(found >= self._pass_score)


def answer_in(completion: str) -> str | None:
    """What stands between the last pair of answer tags after the thinking; None without one."""
    found = _ANSWER.findall(final_part(completion))
    return found[-1].strip() if found else None


def score(name: str, parameters: str, seed: int, size: int, number: int, answer: str) -> float:
    """The library's score, 0 to 1, of an answer to problem `number`; parameters: a JSON object."""
    problems = _problems(name, parameters, seed, size)
    return float(problems.score_answer(answer, entry=problems[number]))


@lru_cache(maxsize=8)
def _problems(name: str, parameters: str, seed: int, size: int) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(parameters))


def _check(config: Config) -> None:
    if find_spec("reasoning_gym") is None:
        raise UserError("task=reasoning_gym needs reasoning-gym: pip install 'scalerl[reasoning-gym]'")
    import reasoning_gym  # noqa: F401 (registers the tasks)
    from reasoning_gym.factory import DATASETS

    if config.name not in DATASETS:
        close = difflib.get_close_matches(config.name, DATASETS, n=1, cutoff=0.0)
        raise UserError(f"reasoning-gym has no task '{config.name}' (task.name); did you mean '{close[0]}'?")
    known = {f.name for f in DATASETS[config.name][1].__dataclass_fields__.values()} - {"seed", "size"}
    if unknown := sorted(set(config.parameters) - known):
        close = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.0)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise UserError(f"task.parameters.{unknown[0]}: {config.name} has no such parameter{hint}")
