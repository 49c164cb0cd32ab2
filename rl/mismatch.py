"""Trainer against generator: corrections of the policy term, the off-policy sequence mask, and what is logged."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from scalerl.rl.metrics import Histogram, Max, Mean, Metric, Variance
from scalerl.rl.recipe import Recipe
from scalerl.rl.tokens import Tokens

EXTREME = 2.0  # F(2): share of tokens with max(rho, 1/rho) above it


def correction(tokens: Tokens, how: str, cap: float) -> Tensor:
    """The factor of the policy term [T], detached: `tis_*` min(w, cap), `mis_*` w where w <= cap and 0 elsewhere.

    w = exp(logp_old - logp_gen) of the token, of its sequence (product over its unmasked tokens; times REINFORCE it is
    the unbiased sequence estimate) or of its geometric mean. Denominators stay (Liu et al., "When Speed Kills
    Stability", 2025; Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025).

    By hand: log w = (0.5, 0.6), cap 2: token w = (1.65, 1.82), sequence 3.00, geometric 1.73; tis_sequence gives 2,
    mis_sequence 0."""
    assert tokens.logp_old is not None, "a mismatch correction needs a pass under theta_b"
    kind, _, level = how.partition("_")
    log_w = tokens.unmasked(tokens.logp_old - tokens.logp_gen)
    if level == "sequence":
        log_w = tokens.completion_sum(log_w)
    elif level == "geometric":
        log_w = tokens.completion_mean(log_w)
    w = log_w.exp().detach()
    return w.clamp(max=cap) if kind == "tis" else torch.where(w <= cap, w, torch.zeros_like(w))


def sequence_mask(logp: Tensor, tokens: Tokens, delta: float) -> Tensor:
    """0 on the tokens of completions with A < 0 and mean over unmasked tokens of (logp_gen - logp_theta) > delta, 1
    elsewhere, [T] (DeepSeek-V3.2 report). It multiplies the policy term only."""
    drift = tokens.completion_mean(tokens.logp_gen - logp.detach())
    return (~((tokens.advantage < 0) & (drift > delta))).to(logp.dtype)


def mismatch_metrics(logp: Tensor, tokens: Tokens, version: int) -> dict[str, Metric]:
    """Over all unmasked tokens, and as `*_current` over those that version `version` sampled.

    k3: mean(rho - 1 - log rho), which under the generator's samples estimates KL(generator || trainer) ("Stabilizing
    MoE RL by Aligning Training and Inference Routers" labels it the other way round). extreme: F(2). perplexity: the
    trainer's, mean over completions of exp(-mean logp). lag: version minus the token's."""
    logp = logp.detach()
    log_rho = tokens.unmasked(logp - tokens.logp_gen).double()
    rho, lag = log_rho.exp(), version - tokens.versions
    found: dict[str, Metric] = {
        "ratio_variance": Variance.of(rho, tokens.mask),
        "lag_mean": Mean.of(lag.double(), tokens.mask),
        "lag_max": Max.of(lag, tokens.mask),
        "lag_histogram": Histogram.of(lag, tokens.mask),
    }
    for suffix, part in (("", tokens), ("_current", replace(tokens, mask=tokens.mask & (lag == 0)))):
        found |= {
            f"mismatch_k3{suffix}": Mean.of(rho - 1 - log_rho, part.mask),
            f"extreme_share{suffix}": Mean.of(log_rho.abs() > math.log(EXTREME), part.mask),
            f"perplexity{suffix}": _perplexity(logp, part),
            f"max_abs_log_ratio{suffix}": Max.of(log_rho.abs(), part.mask),
        }
    return found


def _perplexity(logp: Tensor, tokens: Tokens) -> Mean:
    each = tokens.completion_mean(-logp.double()).exp()  # of a token's completion
    share = 1 / tokens.completion_sum(torch.ones_like(each)).clamp(min=1)  # so that a completion counts once
    present = torch.unique(tokens.completion[tokens.mask]).numel()
    return Mean(float((each * share)[tokens.mask].sum()), present)


def apply_to_policy(terms: Tensor, logp: Tensor, tokens: Tokens, recipe: Recipe) -> Tensor:
    """The policy terms times the recipe's correction and sequence mask."""
    if recipe.mismatch_correction != "none":
        terms = terms * correction(tokens, recipe.mismatch_correction, recipe.mismatch_cap)
    if recipe.offpolicy_sequence_mask != "off":
        terms = terms * sequence_mask(logp, tokens, recipe.offpolicy_sequence_mask)
    return terms
