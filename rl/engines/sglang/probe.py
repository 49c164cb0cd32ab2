"""Whether a server computes the run's model: one with more or fewer layers takes the weights without a word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from scalerl.rl.errors import UserError

_TOKENS = 32
_LIMIT = 0.5  # nats, on average; rounding to bf16 makes tenths of it


@dataclass(frozen=True)
class Probe:
    """A random text, and the model's log-probabilities of its tokens but the first."""

    ids: list[int]
    logprobs: np.ndarray

    @classmethod
    @torch.inference_mode()
    def of(cls, model: Any) -> Probe:
        """model: a Hugging Face causal LM. The vocabulary's last id is left out: servers say nothing of it."""
        size = model.config.get_text_config().vocab_size
        ids = torch.randint(size - 1, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
        logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        ours = logprobs.gather(1, ids[0, 1:, None])[:, 0].double().numpy()
        return cls(ids[0].tolist(), ours)

    def check(self, where: str, logprobs: Sequence[float]) -> None:
        """logprobs: the server's. Raises UserError where they are another model's."""
        difference = float(np.abs(self.logprobs - np.asarray(logprobs)).mean())
        if not difference < _LIMIT:
            raise UserError(
                f"{where}: with the run's weights its log-probabilities differ from the run's model's by "
                f"{difference:.2f} nats on average: it serves a model with another configuration; start it with the "
                "run's model, as scalerl serve does"
            )
