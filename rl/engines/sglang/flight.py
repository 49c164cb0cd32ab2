"""A completion in progress: the requests that it takes one after another, and what they have brought."""

from __future__ import annotations

import numpy as np

from scalerl.rl.engines.sglang.client import Answer
from scalerl.rl.engines.sglang.routing import Routing
from scalerl.rl.types import Completion, Request, Sampling


class Flight:
    """Completion number `sample` of a request.

    One server request carries it to its end, or to its thinking budget; there the phrase is put behind its tokens and
    another request goes on. So it does after an abort, or after a token at which the server stops and the recipe
    doesn't. Nothing is decoded to text in between."""

    def __init__(self, request: Request, sample: int, sampling: Sampling, routing: Routing | None = None) -> None:
        """routing: of the model whose experts are asked for."""
        self.request, self.sample, self.sampling, self._routing = request, sample, sampling, routing
        self.done = False
        self.empty_answers = 0  # in a row
        self._tokens: list[int] = []
        self._logprobs: list[np.ndarray] = []
        self._versions: list[np.ndarray] = []
        self._kept: list[np.ndarray] = []
        self._experts: list[np.ndarray] = []
        self._limit = sampling.max_tokens  # tokens at which it is truncated
        self._budget = None if request.thinking_budgets is None else request.thinking_budgets[sample]
        self._phrase_at: int | None = None
        self._stopped = False

    @property
    def order(self) -> tuple[int, int]:
        """Older groups first."""
        return self.request.group, self.sample

    def input_ids(self) -> list[int]:
        return [*self.request.prompt_ids, *self._tokens]

    def room(self) -> int:
        """Tokens that the next request may sample, at least 1."""
        return min(self._limit, self._limit if self._budget is None else self._budget) - len(self._tokens)

    def body(self, *, salt: str | None, most_kept: int = 0) -> dict[str, object]:
        """The next request to /generate. salt: keeps the server's prefix cache apart by weight version. most_kept: the
        server's limit on kept sets; it returns these only where top_k is within it."""
        sampling = self.sampling
        no_top_k = most_kept if sampling.return_kept else -1
        body: dict[str, object] = {
            "input_ids": self.input_ids(),
            "sampling_params": {
                "max_new_tokens": self.room(),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or no_top_k,
                "min_p": 0.0,
                "frequency_penalty": 0.0,
                "presence_penalty": 0.0,
                "repetition_penalty": 1.0,
                "stop_token_ids": list(sampling.stop_ids),
                "ignore_eos": not sampling.stop_ids,  # True turns the other stops off too
                "skip_special_tokens": False,
            },
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        if salt is not None:
            body["extra_key"] = salt
        if sampling.return_kept:
            body["return_sampling_mask"] = True
        if sampling.return_experts:
            # A token's experts are those of the request that sampled its successor: what the next one prefills again
            # goes through the experts of newer weights.
            body |= {"return_routed_experts": True, "routed_experts_start_len": sum(map(len, self._experts))}
        return body

    def add(self, answer: Answer, version: int) -> None:
        """Take in an answer. version: the one that is current now, which an injected phrase gets."""
        self.empty_answers = 0 if len(answer.tokens) else self.empty_answers + 1
        self._append(answer.tokens, answer.logprobs, answer.versions)
        self._kept += answer.kept or ()
        if answer.experts is not None:
            self._experts.append(answer.experts)
        if len(answer.tokens):
            self._stopped = int(answer.tokens[-1]) in self.sampling.stop_ids
        if self._stopped or len(self._tokens) >= self._limit:
            self.done = True
            return
        interrupt = self.sampling.interrupt
        if interrupt is not None and interrupt.end_think in answer.tokens:
            self._budget = None
        if interrupt is not None and self._budget is not None and len(self._tokens) >= self._budget:
            self._budget, self._phrase_at = None, len(self._tokens)
            n = len(interrupt.phrase)
            self._append(np.array(interrupt.phrase), np.zeros(n, np.float32), np.full(n, version, np.int32))
            self._kept += [np.zeros(0, np.int32)] * n
            self._limit = min(self._limit, len(self._tokens) + interrupt.answer_budget)
            self.done = len(self._tokens) >= self._limit

    def _append(self, tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray) -> None:
        self._tokens += tokens.tolist()
        self._logprobs.append(logprobs)
        self._versions.append(versions)

    def completion(self) -> Completion:
        """The finished completion. Its entropies are negative log-probabilities: draws whose mean is the entropy."""
        place = np.arange(len(self._tokens))
        start = len(self._tokens) if self._phrase_at is None else self._phrase_at
        phrase = 0 if self.sampling.interrupt is None else len(self.sampling.interrupt.phrase)
        logprobs = np.concatenate(self._logprobs)
        return Completion(
            tokens=np.array(self._tokens, np.int32),
            logprobs=logprobs,
            versions=np.concatenate(self._versions),
            injected=(place >= start) & (place < start + phrase),
            finish="stop" if self._stopped else "length",
            interrupted=self._phrase_at is not None,
            kept=tuple(self._kept) if self.sampling.return_kept else None,
            experts=None if self._routing is None else self._routing.of_routers(np.concatenate(self._experts)),
            entropy=-logprobs,
        )
