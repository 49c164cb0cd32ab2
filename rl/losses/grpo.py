"""GRPO's surrogate (DeepSeekMath, arXiv 2402.03300): the symmetric case of `dapo`."""

from __future__ import annotations

from torch import Tensor

from scalerl.rl.losses.dapo import dapo
from scalerl.rl.metrics import Metric
from scalerl.rl.tokens import Tokens


def grpo(logp: Tensor, tokens: Tokens) -> tuple[Tensor, dict[str, Metric]]:
    """`dapo` with eps 0.2 on both sides. logp: [T]; returns terms [T] to be maximised."""
    return dapo(logp, tokens, eps_low=0.2, eps_high=0.2)
