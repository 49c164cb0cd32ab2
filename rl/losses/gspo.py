"""GSPO (arXiv 2507.18071): one clipped ratio a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from scalerl.rl.metrics import Mean, Metric
from scalerl.rl.tokens import Tokens


def gspo(logp: Tensor, tokens: Tokens, *, eps_low: float, eps_high: float) -> tuple[Tensor, dict[str, Metric]]:
    """min(s A, clip(s, 1 - eps_low, 1 + eps_high) A) with s = exp(mean over unmasked tokens of log rho), eq. (7) there.

    s is length-normalised as in GSPO's paper. Every token carries its sequence's term, so any aggregation applies. A
    non-finite logp makes its whole sequence's terms non-finite, which the trainer refuses.

    By hand: log rho = (0.2, 0.4), A = 1 -> s = exp(0.3) = 1.35, clipped to 1.005 without gradient.

    logp: [T]. Returns terms [T] to be maximised, and the share of tokens in clipped sequences."""
    s = tokens.completion_mean(tokens.log_ratio(logp)).exp()
    free, clipped = s * tokens.advantage, s.clamp(1 - eps_low, 1 + eps_high) * tokens.advantage
    return torch.minimum(free, clipped), {"clipped_share": Mean.of(clipped < free, tokens.mask)}
