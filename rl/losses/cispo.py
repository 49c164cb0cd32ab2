"""CISPO (MiniMax-M1, arXiv 2506.13585; ScaleRL, arXiv 2510.13786, section 3.2)."""

from __future__ import annotations

from torch import Tensor

from scalerl.rl.metrics import Mean, Metric
from scalerl.rl.tokens import Tokens


def cispo(logp: Tensor, tokens: Tokens, *, eps_max: float) -> tuple[Tensor, dict[str, Metric]]:
    """sg(min(rho, eps_max)) * A * logp, one term a token; truncated importance sampling on REINFORCE.

    eps_max caps rho itself (not 1 + eps); there is no lower bound. Every token has a gradient, also where the weight is
    capped. Normalised by the aggregation; a non-finite logp gives a non-finite term, which the trainer refuses.

    By hand: rho = 6, eps_max = 5, A = 2 -> gradient to logp 10; rho = 0.5, A = -1 -> -0.5.

    logp: [T]. Returns terms [T] to be maximised, and the share of capped tokens."""
    rho = tokens.log_ratio(logp).detach().exp()
    terms = rho.clamp(max=eps_max) * tokens.advantage * logp
    return terms, {"capped_share": Mean.of(rho > eps_max, tokens.mask)}
