"""Several tasks at once, each with its weight in training."""

from __future__ import annotations

from collections.abc import Sequence

from scalerl.rl.config import MixtureTask
from scalerl.rl.errors import UserError
from scalerl.rl.tasks import build_task, verdicts
from scalerl.rl.types import Prompt, Verdict


class Mixture:
    """Prompts carry their task's name, and that task verifies them. How training draws from the tasks by weight is the
    sampler's business (`MixtureSampler`). An extra set is named `TASK.SET`."""

    name = "mixture"

    def __init__(self, config: MixtureTask) -> None:
        self.parts = {name: build_task(part, name) for name, part in config.tasks.items()}
        self.weights = config.weights

    def train_prompts(self) -> Sequence[Prompt]:
        return [prompt for part in self.parts.values() for prompt in part.train_prompts()]

    def held_out_prompts(self) -> Sequence[Prompt]:
        return [prompt for part in self.parts.values() for prompt in part.held_out_prompts()]

    def extra_prompts(self, name: str) -> Sequence[Prompt]:
        task, _, extra = name.partition(".")
        if task not in self.parts:
            raise UserError(
                f"eval.extra: '{name}' is of no task of the mixture; write TASK.SET with {', '.join(self.parts)}"
            )
        return self.parts[task].extra_prompts(extra)

    def verify(self, prompt: Prompt, completion: str) -> bool:
        return self.parts[prompt.task].verify(prompt, completion)

    def verify_batch(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        found: list[Verdict] = [Verdict(False)] * len(pairs)
        for name, part in self.parts.items():
            places = [i for i, (prompt, _) in enumerate(pairs) if prompt.task == name]
            for i, verdict in zip(places, verdicts(part, [pairs[i] for i in places]), strict=True):
                found[i] = verdict
        return found
