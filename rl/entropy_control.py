"""Clip-Cov and KL-Cov: which tokens of a step they touch ("The Entropy Mechanism ...", arXiv 2505.22617)."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from scalerl.rl.recipe import Recipe


def covariance(logp: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """cov_t = (logp_t - mean)(A_t - mean) over the N unmasked tokens of the step, float64 [T]; 0 where masked."""
    x, a = logp.double(), advantage.double()
    cov = (x - x[mask].mean()) * (a - a[mask].mean())
    return torch.where(mask, cov, torch.zeros_like(cov))


def select(logp: Tensor, advantage: Tensor, mask: Tensor, recipe: Recipe, generator: torch.Generator) -> Tensor:
    """The step's tokens in a fixed order, [T] each -> bool [T]. logp: the current one, from a pass without gradient.

    `clip_cov`: False on floor(share N) tokens drawn uniformly from those with cov in [cov_low, cov_high] (all of them
    if fewer): their policy term is multiplied by 0. `kl_cov`: True on the floor(share N) tokens with the largest cov
    (at least one): they get the penalty."""
    cov, n = covariance(logp, advantage, mask), int(mask.sum())
    if recipe.entropy_control == "clip_cov":
        params = recipe.clip_cov
        inside = torch.nonzero(mask & (cov >= params.cov_low) & (cov <= params.cov_high)).flatten()
        drawn = inside[torch.randperm(len(inside), generator=generator)[: _part(params.share, n)]]
        keep = torch.ones_like(mask)
        keep[drawn] = False
        return keep
    ranked = torch.where(mask, cov, torch.full_like(cov, -torch.inf))
    chosen = torch.zeros_like(mask)
    chosen[torch.topk(ranked, max(1, _part(recipe.kl_cov.share, n))).indices] = True
    return chosen & mask


def _part(share: float, n: int) -> int:
    """floor(share n) of the decimal that was written: in floats, 0.29 * 100 lies below 29."""
    return int(Fraction(repr(share)) * n)
