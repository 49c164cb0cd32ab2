"""The embedded engine: continuous batching over a decoder, on a logical clock of decode ticks."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from scalerl.rl.engines.base import Decoder, Forward
from scalerl.rl.engines.kv_cache import KVCache
from scalerl.rl.engines.rows import Rows, Step
from scalerl.rl.engines.sampling import draw
from scalerl.rl.types import CompletedGroup, Completion, Request, Sampling


@dataclass
class Work:
    """What the engine has executed since it was made. A token's context is the number of tokens that it attended to,
    itself included; the sums are what FLOP counts need. Padding is not counted. generated_tokens: of completions,
    injected ones included; a completion's first comes from its prompt's prefill, and its last is never decoded."""

    ticks: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    prefill_context: int = 0
    decode_tokens: int = 0
    decode_context: int = 0


@dataclass
class _Prompts:
    """Prefilled prompts, one a row of `cache`, and the weight version that they were prefilled under."""

    lengths: list[int]
    cache: KVCache
    forward: Forward  # of the prompts' last tokens
    version: int


class TorchEngine:
    """Generates groups of completions with weights that may change between ticks.

    A tick decodes one token for every active row. Rows freed in one tick are given to the queue's next completions, in
    order, at the next. A group's prompt is prefilled once, when its first completion gets a row; its keys and values
    go to all n of its rows, and a completion's first token is drawn from the prefill's last logits.

    After `update_weights` every key and value already computed stays: unfinished completions go on from a stale cache,
    as in PipelineRL (arXiv 2509.19128), and so do the remaining completions of a group whose prompt has been prefilled
    (their first token, drawn from the kept logits, carries the prefill's version). Groups still queued are prefilled
    under the new weights.

    Engines that share a decoder share its weights: an update through one changes the tokens of all, so run one at a
    time and tell the others' `version`.
    """

    def __init__(self, decoder: Decoder, *, slots: int, sampling: Sampling, version: int = 0) -> None:
        """slots: rows that decode together. Raises ValueError for settings that make no distribution, and UserError
        where the model can't do what `sampling` asks."""
        if slots < 1 or sampling.max_tokens < 1:
            raise ValueError(f"slots={slots} and max_tokens={sampling.max_tokens} must be at least 1")
        if sampling.temperature <= 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
            raise ValueError(
                f"sampling needs temperature > 0, 0 < top_p <= 1 and top_k >= 0, not {sampling.temperature}, "
                f"{sampling.top_p}, {sampling.top_k}"
            )
        decoder.limit.check(1, sampling.max_tokens)
        if sampling.return_experts:
            decoder.record_experts()
        self.slots = slots
        self.sampling = sampling
        self.version = version
        self.work = Work()
        self._decoder = decoder
        self._cache = decoder.new_cache(slots, 0)
        self._rows = Rows(slots, sampling)
        self._queue: deque[Request] = deque()
        self._taken = 0  # completions of the queue's first request that have had a row
        self._kept_prompt: _Prompts | None = None  # its prompt, once prefilled
        self._open: dict[int, list[Completion | None]] = {}  # unfinished groups

    @property
    def idle(self) -> bool:
        """True when no row is active and nothing waits for a slot."""
        return not self._rows.n and not self._queue

    @property
    def n_unfinished(self) -> int:
        """Groups submitted and not yet complete."""
        return len(self._open)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues groups. Raises ValueError for a malformed request and UserError for one too long for the model; then
        none of them is queued."""
        numbers = set(self._open)
        for request in requests:
            self._check(request)
            if request.group in numbers:
                raise ValueError(f"group {request.group} is already unfinished in this engine")
            numbers.add(request.group)
        for request in requests:
            self._open[request.group] = [None] * request.n
            self._queue.append(request)

    def _check(self, request: Request) -> None:
        if request.n < 1 or not request.prompt_ids:
            raise ValueError(f"group {request.group}: needs n >= 1 and a prompt of at least one token")
        budgets = request.thinking_budgets
        if (budgets is not None) != (self.sampling.interrupt is not None):
            raise ValueError(f"group {request.group}: thinking budgets go with a sampling that interrupts")
        if budgets is not None and (len(budgets) != request.n or min(budgets) < 1):
            raise ValueError(f"group {request.group}: needs {request.n} thinking budgets of at least 1")
        self._decoder.limit.check(len(request.prompt_ids), self.sampling.max_tokens)

    def update_weights(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        """Switches to new weights, named as in the Hugging Face model; caches stay as they are."""
        self._decoder.load_weights(state)
        self.version = version

    @torch.inference_mode()
    def tick(self) -> list[CompletedGroup]:
        """Fills free slots, then draws one token for every active row. Returns the groups that became complete, ordered
        by the row of their last completion. Raises FloatingPointError if the model's logits are not finite."""
        self.work.ticks += 1
        logits: list[torch.Tensor] = []
        versions: list[np.ndarray] = []
        if self._rows.n:
            logits.append(self._decode())
            versions.append(np.full(self._rows.n, self.version))
        for prompts, source in self._admit():
            logits.append(prompts.forward.logits[source])
            versions.append(np.full(len(source), prompts.version))
        if not logits:
            return []
        self.work.generated_tokens += self._rows.n
        stopped, truncated = self._rows.advance(self._sample(torch.cat(logits), np.concatenate(versions)))
        return self._retire(stopped, stopped | truncated)

    def _decode(self) -> torch.Tensor:
        """Feeds each active row its last token; returns the logits [n, V] of the next."""
        positions = self._rows.positions()
        self.work.decode_tokens += len(positions)
        self.work.decode_context += int(positions.sum()) + len(positions)
        forward = self._decoder.decode(
            self._to_device(self._rows.last_tokens()),
            self._to_device(positions),
            int(positions.max()) + 1,
            self._cache,
        )
        if self.sampling.return_experts and forward.experts is not None:
            for row, experts in enumerate(forward.experts.cpu().numpy()):
                self._rows.add_experts(row, experts[None])
        return forward.logits

    def _admit(self) -> list[tuple[_Prompts, torch.Tensor]]:
        """Gives free slots to the queue's completions, in order, and prefills their prompts. Returns batches of
        prompts, each with the prompt of each of its new rows (int64 [rows]); these stand in that order at the end."""
        row = self._rows.n
        batches: list[tuple[_Prompts, list[int]]] = []
        new: list[tuple[Request, int]] = []
        while self._queue and self._rows.n < self.slots:
            request = self._queue[0]
            count = min(self.slots - self._rows.n, request.n - self._taken)
            if self._kept_prompt is not None:
                batches.append((self._kept_prompt, [count]))
                self._kept_prompt = None
            else:
                new.append((request, count))
            for sample in range(self._taken, self._taken + count):
                self._rows.add(request, sample)
            self._taken += count
            if self._taken == request.n:
                self._queue.popleft()
                self._taken = 0
        if new:
            batches.append((self._prefill([request for request, _ in new]), [count for _, count in new]))
        if batches and self._taken:
            self._kept_prompt = self._last(batches[-1][0])
        seated = []
        for prompts, counts in batches:
            source = np.repeat(np.arange(len(counts)), counts)
            self._seat(prompts, source, np.arange(row, row + len(source)))
            row += len(source)
            seated.append((prompts, self._to_device(source)))
        return seated

    def _seat(self, prompts: _Prompts, source: np.ndarray, rows: np.ndarray) -> None:
        """Copies the keys and values of the prompts `source` to the given rows (both int64 [k])."""
        longest = max(prompts.lengths)
        self._cache.reserve(longest + self.sampling.max_tokens)
        self._cache.copy_rows(self._to_device(rows), prompts.cache, self._to_device(source), longest)
        if self.sampling.return_experts and prompts.forward.experts is not None:
            experts = prompts.forward.experts.cpu().numpy()
            for row, prompt in zip(rows, source, strict=True):
                self._rows.add_experts(row, experts[prompt, : prompts.lengths[prompt]])

    def _prefill(self, requests: Sequence[Request]) -> _Prompts:
        lengths = [len(request.prompt_ids) for request in requests]
        ids = np.zeros((len(requests), max(lengths)), np.int64)
        for row, request in zip(ids, requests, strict=True):
            row[: len(request.prompt_ids)] = request.prompt_ids
        cache = self._decoder.new_cache(*ids.shape)
        forward = self._decoder.prefill(self._to_device(ids), self._to_device(np.array(lengths)), cache)
        self.work.prefill_tokens += sum(lengths)
        self.work.prefill_context += sum(length * (length + 1) // 2 for length in lengths)
        return _Prompts(lengths, cache, forward, self.version)

    def _last(self, prompts: _Prompts) -> _Prompts:
        """The last prompt of a batch on its own, so that the rest of the batch's memory can go."""
        length = prompts.lengths[-1]
        cache = self._decoder.new_cache(1, length)
        row = self._to_device(np.array([len(prompts.lengths) - 1]))
        cache.copy_rows(torch.zeros_like(row), prompts.cache, row, length)
        logits, experts = prompts.forward
        kept = Forward(logits[row], None if experts is None else experts[row, :length])
        return _Prompts([length], cache, kept, prompts.version)

    def _sample(self, logits: torch.Tensor, versions: np.ndarray) -> Step:
        """Draws from logits [n, V]; versions: int64 [n]."""
        aux = self._to_device(self._rows.next_uniforms("aux_uniform")) if self.sampling.aux_token else None
        drawn = draw(logits, self._to_device(self._rows.next_uniforms("uniform")), self.sampling, aux)
        return Step(
            tokens=drawn.tokens.cpu().numpy(),
            logprobs=drawn.logprobs.cpu().numpy(),
            entropy=drawn.entropy.cpu().numpy(),
            versions=versions,
            aux=None if drawn.aux is None else drawn.aux.cpu().numpy(),
            kept=None if drawn.kept is None else _as_sets(drawn.kept),
        )

    def _retire(self, stopped: np.ndarray, done: np.ndarray) -> list[CompletedGroup]:
        """Takes out the rows that are done (bool [n]) and compacts the rest."""
        if not done.any():
            return []
        groups = []
        for row in np.flatnonzero(done).tolist():
            group = int(self._rows["group"][row])
            completions = self._open[group]
            completions[self._rows["sample"][row]] = self._rows.completion(row, bool(stopped[row]))
            if all(completion is not None for completion in completions):
                groups.append(CompletedGroup(group, tuple(c for c in completions if c is not None)))
                del self._open[group]
        holes, movers = self._rows.remove(done)
        if len(holes):
            longest = int(self._rows.positions()[holes].max())  # the last token has no keys and values yet
            self._cache.copy_rows(self._to_device(holes), self._cache, self._to_device(movers), longest)
        return groups

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._decoder.device)

    def state_dict(self) -> dict[str, Any]:
        """Everything in flight, copied to the CPU: picklable tensors, arrays and records, without the weights."""
        length = int(self._rows.positions().max(initial=0))
        return {
            "slots": self.slots,
            "sampling": self.sampling,
            "version": self.version,
            "work": asdict(self.work),
            "queue": tuple(self._queue),
            "taken": self._taken,
            "kept_prompt": None if self._kept_prompt is None else self._pack(self._kept_prompt),
            "open": {group: list(completions) for group, completions in self._open.items()},
            "rows": self._rows.state_dict(),
            "capacity": self._cache.capacity,
            "cache": self._cache.snapshot(self._rows.n, length),
        }

    @torch.inference_mode()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues, to the bit, from another engine's `state_dict`, given a decoder with the weights that it had.
        Raises ValueError if slots or sampling differ."""
        for name in ("slots", "sampling"):
            if state[name] != getattr(self, name):
                raise ValueError(f"engine state: its {name} is {state[name]}, this engine's {getattr(self, name)}")
        self.version = state["version"]
        self.work = Work(**state["work"])
        self._queue = deque(state["queue"])
        self._taken = state["taken"]
        self._kept_prompt = None if state["kept_prompt"] is None else self._unpack(state["kept_prompt"])
        self._open = {group: list(completions) for group, completions in state["open"].items()}
        self._rows.load_state_dict(state["rows"])
        self._cache = self._decoder.new_cache(self.slots, state["capacity"])
        self._cache.restore(state["cache"])

    def _pack(self, prompts: _Prompts) -> dict[str, Any]:
        logits, experts = prompts.forward
        return {
            "lengths": list(prompts.lengths),
            "cache": prompts.cache.snapshot(prompts.cache.rows, prompts.cache.capacity),
            "logits": logits.to("cpu", copy=True),
            "experts": None if experts is None else experts.to("cpu", copy=True),
            "version": prompts.version,
        }

    def _unpack(self, state: Mapping[str, Any]) -> _Prompts:
        cache = self._decoder.new_cache(len(state["lengths"]), max(state["lengths"]))
        cache.restore(state["cache"])
        experts, device = state["experts"], self._decoder.device
        forward = Forward(state["logits"].to(device), None if experts is None else experts.to(device))
        return _Prompts(list(state["lengths"]), cache, forward, state["version"])


def _as_sets(kept: torch.Tensor) -> list[np.ndarray]:
    """bool [n, V] -> n ascending int32 arrays of token ids."""
    counts = kept.sum(-1).cpu().numpy()
    ids = kept.nonzero()[:, 1].int().cpu().numpy()
    return np.split(ids, counts.cumsum()[:-1])
