"""The clipped surrogate with separate bounds (DAPO's clip-higher, arXiv 2503.14476; PPO, arXiv 1707.06347)."""

from __future__ import annotations

import torch
from torch import Tensor

from scalerl.rl.metrics import Mean, Metric
from scalerl.rl.tokens import Tokens


def dapo(logp: Tensor, tokens: Tokens, *, eps_low: float, eps_high: float) -> tuple[Tensor, dict[str, Metric]]:
    """min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A), one term a token.

    Normalised by the aggregation; a non-finite logp gives a non-finite term, which the trainer refuses.

    By hand, with 0.2/0.26: rho = 1.5, A = 1 -> 1.26 without gradient; rho = 0.5, A = 1 -> 0.5 with gradient 0.5;
    rho = 0.5, A = -1 -> -0.8 without gradient.

    logp: [T]. Returns terms [T] to be maximised, and the share of tokens whose gradient is clipped away."""
    rho = tokens.log_ratio(logp).exp()
    free, clipped = rho * tokens.advantage, rho.clamp(1 - eps_low, 1 + eps_high) * tokens.advantage
    return torch.minimum(free, clipped), {"clipped_share": Mean.of(clipped < free, tokens.mask)}
