"""REINFORCE (Williams, 1992)."""

from __future__ import annotations

from torch import Tensor

from scalerl.rl.metrics import Metric
from scalerl.rl.tokens import Tokens


def reinforce(logp: Tensor, tokens: Tokens) -> tuple[Tensor, dict[str, Metric]]:
    """A * logp, one term a token; no ratio. Off-policy it is biased unless a `mismatch_correction` weighs it.

    By hand: A = -2 -> gradient to logp -2, whatever the generator's log-probability.

    logp: [T]. Returns terms [T] to be maximised."""
    return tokens.advantage * logp, {}
