"""The records that pass between schedule, engine, task and trainer. Arrays are NumPy, so that they cross processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Chat:
    """How a prompt is put to a chat model: after `system` where there is one; the completion goes on from `prefill`."""

    system: str | None
    prefill: str


@dataclass(frozen=True)
class Prompt:
    """One problem. `id` is unique within its task. `text` is what the model reads, to the letter, where `chat` is None;
    else it is the user's turn of the model's chat template."""

    id: str
    text: str
    answer: str
    task: str
    chat: Chat | None = None


@dataclass(frozen=True)
class Verdict:
    """On one completion. error: the verifier failed, and `correct` says nothing. unparsed: no answer was found in it.
    masked: judged, but not trained on. shaping: added to its reward."""

    correct: bool
    error: bool = False
    unparsed: bool = False
    masked: bool = False
    shaping: float = 0.0


@dataclass(frozen=True)
class Interrupt:
    """Forced end of thinking: `phrase` (token ids, its `</think>` the tokenizer's own) is injected at a completion's
    thinking budget when `end_think` has not been sampled; at most `answer_budget` sampled tokens follow it."""

    phrase: tuple[int, ...]
    end_think: int
    answer_budget: int


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled. Log-probabilities are of the distribution after temperature and, where
    `return_kept` is set, renormalised over the kept set of top_p and top_k."""

    temperature: float
    max_tokens: int  # total budget of a completion, injected tokens included
    stop_ids: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    interrupt: Interrupt | None = None
    return_kept: bool = False
    aux_token: bool = False
    return_experts: bool = False


@dataclass(frozen=True)
class Request:
    """One group: `n` completions of one prompt. `group` is its dispatch number. `thinking_budgets` has n entries
    when the sampling interrupts. The uniform draws of completion i depend only on (stream, group, i), so that they do
    not depend on slots, neighbours or speed."""

    group: int
    prompt_ids: tuple[int, ...]
    n: int
    stream: int  # seed of the sampling streams
    thinking_budgets: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Completion:
    """What the engine reports of one completion; T tokens after the prompt, the end token included.

    tokens, versions: int32 [T]; logprobs: float32 [T] (0 on injected tokens); injected: bool [T].
    `version` is the policy version whose weights sampled the token (for an injected one, the version then current).
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    injected: np.ndarray
    finish: Literal["stop", "length"]  # "length": met its budget without an end token, i.e. truncated
    interrupted: bool = False
    kept: tuple[np.ndarray, ...] | None = None  # T kept sets, int32 [K_t]; empty on injected tokens
    aux_tokens: np.ndarray | None = None  # int32 [T]
    experts: np.ndarray | None = None  # int32 [prompt + T - 1, layers, top_k]
    entropy: np.ndarray | None = None  # float32 [T], of the sampling distribution in nats

    @property
    def truncated(self) -> bool:
        return self.finish == "length"


@dataclass(frozen=True)
class CompletedGroup:
    group: int
    completions: tuple[Completion, ...]


@dataclass(frozen=True)
class ScoredGroup:
    """A completed group with its prompt and its verdicts; n completions.

    correct: bool [n] (False where truncated or verifier_error); verifier_error, unparsed, masked: bool [n] (masked:
    by the task's choice); shaping: float64 [n], added to the rewards."""

    group: int
    epoch: int
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    correct: np.ndarray
    verifier_error: np.ndarray
    unparsed: np.ndarray
    masked: np.ndarray
    shaping: np.ndarray
