"""Verdicts: from completed groups to scored ones. A verifier that fails is never a wrong answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from scalerl.rl.tasks import Task, verdicts
from scalerl.rl.types import CompletedGroup, Prompt, ScoredGroup, Verdict


class Unscored(NamedTuple):
    """A completed group with what is known of its prompt."""

    completed: CompletedGroup
    prompt: Prompt
    prompt_ids: tuple[int, ...] = ()
    epoch: int = 0


def score(groups: Sequence[Unscored], *, task: Task, tokenizer: Any) -> list[ScoredGroup]:
    """Verify every completion of the groups, all at once. A truncated one is not correct, without the verifier."""
    places, pairs = [], []
    for g, group in enumerate(groups):
        for i, completion in enumerate(group.completed.completions):
            if not completion.truncated:
                places.append((g, i))
                # Not truncated, so the last token is the one that ended it.
                pairs.append((group.prompt, tokenizer.decode(completion.tokens[:-1].tolist())))
    found = [[Verdict(False)] * len(group.completed.completions) for group in groups]
    for (g, i), verdict in zip(places, verdicts(task, pairs), strict=True):
        found[g][i] = verdict
    return [_scored(group, of) for group, of in zip(groups, found, strict=True)]


def _scored(group: Unscored, found: Sequence[Verdict]) -> ScoredGroup:
    error = np.array([v.error for v in found])
    return ScoredGroup(
        group=group.completed.group,
        epoch=group.epoch,
        prompt=group.prompt,
        prompt_ids=group.prompt_ids,
        completions=group.completed.completions,
        correct=np.array([v.correct for v in found]) & ~error,
        verifier_error=error,
        unparsed=np.array([v.unparsed for v in found]),
        masked=np.array([v.masked for v in found]),
        shaping=np.array([v.shaping for v in found], dtype=np.float64),
    )
