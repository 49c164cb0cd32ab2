"""Verdicts: from completed groups to scored ones. A verifier that fails is never a wrong answer."""

from __future__ import annotations

from typing import Any

import numpy as np

from scalerl.rl.tasks import Task
from scalerl.rl.types import CompletedGroup, Prompt, ScoredGroup


def score(
    completed: CompletedGroup, *, prompt: Prompt, prompt_ids: tuple[int, ...], epoch: int, task: Task, tokenizer: Any
) -> ScoredGroup:
    """Verify every completion. A truncated one is not correct; one whose verifier raises is flagged and not scored."""
    n = len(completed.completions)
    correct, verifier_error = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
    for i, completion in enumerate(completed.completions):
        if completion.truncated:
            continue
        try:
            # Not truncated, so the last token is the one that ended it.
            correct[i] = task.verify(prompt, tokenizer.decode(completion.tokens[:-1].tolist()))
        except Exception:  # a user's verifier may raise anything; it is counted, and its completion masked
            verifier_error[i] = True
    return ScoredGroup(
        group=completed.group,
        epoch=epoch,
        prompt=prompt,
        prompt_ids=prompt_ids,
        completions=completed.completions,
        correct=correct,
        verifier_error=verifier_error,
    )
