"""The bookkeeping of active rows, on the host: which completion a row holds, its tokens, and when it must stop."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np

from scalerl.rl.engines.sampling import AUX_STREAM, uniforms
from scalerl.rl.types import Completion, Request, Sampling

NEVER = np.iinfo(np.int64).max


@dataclass
class Step:
    """What one tick sampled for the n active rows: arrays [n], and one kept set a row where they are returned."""

    tokens: np.ndarray
    logprobs: np.ndarray
    entropy: np.ndarray
    versions: np.ndarray
    aux: np.ndarray | None = None
    kept: list[np.ndarray] | None = None


class Rows:
    """Structure of arrays whose first axis is the slot; rows 0..n-1 are active. A completion's token t is at [slot, t].

    State is per row, so that a tick costs a few vector operations whatever the number of rows.
    """

    def __init__(self, slots: int, sampling: Sampling) -> None:
        self.slots, self.n, self.sampling = slots, 0, sampling
        self._stop_ids = np.array(sampling.stop_ids, np.int64)
        interrupt = sampling.interrupt
        self._phrase = np.array(interrupt.phrase if interrupt else (), np.int64)
        length = sampling.max_tokens
        self._arrays: dict[str, np.ndarray] = {
            "group": np.zeros(slots, np.int64),
            "sample": np.zeros(slots, np.int64),
            "prompt": np.zeros(slots, np.int64),  # tokens of the prompt
            "count": np.zeros(slots, np.int64),  # tokens of the completion so far
            "limit": np.zeros(slots, np.int64),  # count at which it is truncated
            "budget": np.zeros(slots, np.int64),  # count at which thinking is interrupted; NEVER once it has ended
            "phrase_at": np.zeros(slots, np.int64),  # count at which the phrase began; NEVER without one
            "tokens": np.zeros((slots, length), np.int32),
            "logprobs": np.zeros((slots, length), np.float32),
            "entropy": np.zeros((slots, length), np.float32),
            "versions": np.zeros((slots, length), np.int32),
            "uniform": np.zeros((slots, length), np.float64),
        }
        if sampling.aux_token:
            self._arrays["aux"] = np.zeros((slots, length), np.int32)
            self._arrays["aux_uniform"] = np.zeros((slots, length), np.float64)
        self._lists = {"kept": sampling.return_kept, "experts": sampling.return_experts}
        for name, wanted in self._lists.items():
            if wanted:
                self._arrays[name] = np.empty(slots, object)  # a list of arrays a row

    def __getitem__(self, name: str) -> np.ndarray:
        """The active rows of one array, a view."""
        return self._arrays[name][: self.n]

    def add(self, request: Request, sample: int) -> None:
        """Makes a completion of the request the next active row."""
        row, length = self.n, self.sampling.max_tokens
        self.n += 1
        self["group"][row] = request.group
        self["sample"][row] = sample
        self["prompt"][row] = len(request.prompt_ids)
        self["count"][row] = 0
        self["limit"][row] = length
        self["budget"][row] = NEVER if request.thinking_budgets is None else request.thinking_budgets[sample]
        self["phrase_at"][row] = NEVER
        self["uniform"][row] = uniforms(request.stream, request.group, sample, length)
        if self.sampling.aux_token:
            self["aux_uniform"][row] = uniforms(request.stream, request.group, sample, length, AUX_STREAM)
        for name, wanted in self._lists.items():
            if wanted:
                self[name][row] = []

    def add_experts(self, row: int, experts: np.ndarray) -> None:
        """Notes the experts, int32 [tokens, layers, top_k], of the tokens that a row has just fed."""
        self._arrays["experts"][row].append(experts)

    def next_uniforms(self, name: str) -> np.ndarray:
        """float64 [n]: the draw of each row's next token."""
        return self[name][np.arange(self.n), self["count"]]

    def last_tokens(self) -> np.ndarray:
        """int64 [n]: the token that each row feeds next; rows have at least one."""
        return self["tokens"][np.arange(self.n), self["count"] - 1].astype(np.int64)

    def positions(self) -> np.ndarray:
        """int64 [n]: where the last token stands in prompt plus completion."""
        return self["prompt"] + self["count"] - 1

    def advance(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """Appends a token to every row, the phrase's where one is due and the sampled one elsewhere.

        Returns bool [n] twice: rows that ended by a stop token, and rows that met their limit without one."""
        count, index = self["count"], np.arange(self.n)
        tokens, forced = step.tokens, np.zeros(self.n, bool)
        if self.sampling.interrupt is not None:
            forced = self._interrupt(count)
            if forced.any():
                tokens = tokens.copy()
                tokens[forced] = self._phrase[(count - self["phrase_at"])[forced]]
        self["tokens"][index, count] = tokens
        self["logprobs"][index, count] = np.where(forced, 0, step.logprobs)
        self["entropy"][index, count] = np.where(forced, 0, step.entropy)
        self["versions"][index, count] = step.versions
        if step.aux is not None:
            self["aux"][index, count] = np.where(forced, tokens, step.aux)
        if step.kept is not None:
            for sets, kept, injected in zip(self["kept"], step.kept, forced, strict=True):
                sets.append(kept[:0] if injected else kept)
        count += 1
        if self.sampling.interrupt is not None:
            self["budget"][tokens == self.sampling.interrupt.end_think] = NEVER
        stopped = np.isin(tokens, self._stop_ids) & ~forced
        return stopped, ~stopped & (count >= self["limit"])

    def _interrupt(self, count: np.ndarray) -> np.ndarray:
        """Starts the phrase in rows at their thinking budget; bool [n]: rows whose next token is of the phrase."""
        interrupt = self.sampling.interrupt
        assert interrupt is not None
        due = count >= self["budget"]
        self["phrase_at"][due] = count[due]
        self["limit"][due] = np.minimum(self["limit"][due], count[due] + len(self._phrase) + interrupt.answer_budget)
        self["budget"][due] = NEVER
        return (count >= self["phrase_at"]) & (count - self["phrase_at"] < len(self._phrase))

    def completion(self, row: int, stopped: bool) -> Completion:
        """The finished completion of a row, copied."""
        arrays, total = self._arrays, int(self["count"][row])
        start = int(self["phrase_at"][row])
        place = np.arange(total)
        return Completion(
            tokens=arrays["tokens"][row, :total].copy(),
            logprobs=arrays["logprobs"][row, :total].copy(),
            versions=arrays["versions"][row, :total].copy(),
            injected=(place >= start) & (place - start < len(self._phrase)),
            finish="stop" if stopped else "length",
            interrupted=start < total,
            kept=tuple(arrays["kept"][row]) if "kept" in arrays else None,
            aux_tokens=arrays["aux"][row, :total].copy() if "aux" in arrays else None,
            experts=np.concatenate(arrays["experts"][row]) if "experts" in arrays else None,
            entropy=arrays["entropy"][row, :total].copy(),
        )

    def remove(self, done: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drops the rows where `done` (bool [n]) and moves rows from the end into the holes, so that the active ones
        stay compact. Returns (holes, movers), int64: row movers[i] became row holes[i]."""
        left = self.n - int(done.sum())
        holes = np.flatnonzero(done[:left])
        movers = left + np.flatnonzero(~done[left:])
        for array in self._arrays.values():
            array[holes] = array[movers]
        self.n = left
        return holes, movers

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of the active rows."""
        return {name: copy.deepcopy(array[: self.n]) for name, array in self._arrays.items()}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self.n = len(state["group"])
        for name, array in state.items():
            self._arrays[name][: self.n] = copy.deepcopy(array)
