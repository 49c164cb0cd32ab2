"""Pass rates of training prompts, measured with a model, and the prompts that are neither too easy nor too hard."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from scalerl.rl.config import RunConfig
from scalerl.rl.engines.generator import InlineGenerator
from scalerl.rl.errors import UserError
from scalerl.rl.models.tokenizer import load_tokenizer
from scalerl.rl.process import set_up_process
from scalerl.rl.prompt_room import PromptRoom
from scalerl.rl.requests import Requests, build_sampling
from scalerl.rl.run import model_folder
from scalerl.rl.runlog import beside_of
from scalerl.rl.scoring import Unscored, score
from scalerl.rl.tasks import Task, build_task
from scalerl.rl.tasks.dataset import PromptTable

_PROMPTS = 64  # generated and verified together


@dataclass(frozen=True)
class Measured:
    """A training prompt by its number: `passed` of `judged` completions are correct."""

    index: int
    passed: int
    judged: int


@dataclass(frozen=True)
class Filtered:
    """Numbers of prompts: kept; passed too seldom; too often; without any verdict."""

    kept: int
    hard: int
    easy: int
    unjudged: int


def filter_prompts(
    config: RunConfig, out: Path, *, low: float, high: float, n_samples: int, limit: int | None
) -> Filtered:
    """Sample `n_samples` completions of each training prompt (the first `limit`), and write those whose pass rate lies
    in [low, high] to `out`, JSONL with `prompt`, `answer`, `pass_rate` and `n_samples`.

    Raises UserError where the task's prompts come from no file, or `out` exists or can't be written."""
    if not 0 <= low <= high <= 1:
        raise UserError(f"--low {low} and --high {high} must be pass rates, the first not above the second")
    task = build_task(config.task)
    prompts = task.train_prompts()
    if not isinstance(prompts, PromptTable):
        raise UserError(f"the task {task.name} has no file of prompts; filter the files of math, code or python tasks")
    if config.engine.kind != "torch":
        raise UserError(f"engine={config.engine.kind}: filter samples with the embedded engine; leave engine=torch")
    counts: Counter[str] = Counter(kept=0, hard=0, easy=0, unjudged=0)
    if out.exists():
        raise UserError(f"{out} exists already; choose another file")
    beside = beside_of(out)
    try:
        with beside.open("w", encoding="utf-8") as file:
            for measured in measure(config, task, prompts[:limit], n_samples):
                place = _place(measured, low, high)
                counts[place] += 1
                if place == "kept":
                    text, answer = prompts.texts(measured.index)
                    rate = measured.passed / measured.judged
                    row = {"prompt": text, "answer": answer, "pass_rate": rate, "n_samples": measured.judged}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
        beside.rename(out)
    except OSError as error:
        raise UserError(f"{out} can't be written ({error.strerror}); choose another file") from None
    finally:
        with suppress(OSError):
            beside.unlink()
    return Filtered(**counts)


def measure(config: RunConfig, task: Task, prompts: PromptTable, n_samples: int) -> Iterator[Measured]:
    """The pass rate of each prompt under the configuration's model and sampling, but for those without room in it."""
    set_up_process(config.engine.threads)
    folder = model_folder(config, task)
    tokenizer = load_tokenizer(folder)
    requests = Requests(config, tokenizer)
    fitting = PromptRoom.of_run(config, folder, requests).indices("training", prompts)
    generator = InlineGenerator(config, folder, build_sampling(config, tokenizer))
    for start in range(0, len(fitting), _PROMPTS):
        part = {i: prompts[i] for i in fitting[start : start + _PROMPTS]}
        asked = [requests.evaluation(i, prompt, n_samples, 0, 0) for i, prompt in part.items()]
        completed = generator.call("evaluate", asked, 0, True).groups
        groups = [Unscored(c, part[c.group]) for c in completed]
        for group in sorted(score(groups, task=task, tokenizer=tokenizer), key=lambda g: g.group):
            yield Measured(group.group, int(group.correct.sum()), int((~group.verifier_error).sum()))


def _place(measured: Measured, low: float, high: float) -> str:
    if not measured.judged:
        return "unjudged"
    rate = measured.passed / measured.judged
    return "hard" if rate < low else "easy" if rate > high else "kept"
