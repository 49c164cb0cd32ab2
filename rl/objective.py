"""The objective of a recipe on one micro-batch. The sum over micro-batches and ranks is the step's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from scalerl.rl.kl import kl_term
from scalerl.rl.losses import TOKENWISE, get_loss
from scalerl.rl.metrics import Mean, Metric
from scalerl.rl.mismatch import apply_to_policy
from scalerl.rl.recipe import Recipe
from scalerl.rl.tokens import Tokens


def objective(logp: Tensor, entropy: Tensor | None, tokens: Tokens, recipe: Recipe) -> tuple[Tensor, dict[str, Metric]]:
    """sum_t weight_t (policy_t - beta K_t + bonus_t), to be maximised; a scalar that can be differentiated also for
    T = 0, so that ranks stay in step.

    logp: [T], of the distribution that the generator sampled from. entropy: [T], full vocabulary, for `bonus` only."""
    terms, metrics = get_loss(recipe.loss)(logp, tokens, **recipe.loss_arguments)
    terms = apply_to_policy(terms, logp, tokens, recipe)
    if tokens.policy_keep is not None:
        terms = torch.where(tokens.policy_keep, terms, torch.zeros_like(terms))
    if recipe.kl != "none":
        k = kl_term(logp, tokens, recipe.kl, importance_weighted=recipe.kl_params.importance_weighted)
        terms = terms - tokens.kl_beta * k
        assert tokens.logp_ref is not None
        metrics["reference_k1"] = Mean.of(logp - tokens.logp_ref, tokens.mask)
    if tokens.kl_cov is not None:
        drift = recipe.kl_cov.beta * (logp - tokens.logp_gen).abs()
        terms = terms - torch.where(tokens.kl_cov, drift, torch.zeros_like(drift))
    if recipe.entropy_control == "bonus":
        assert entropy is not None, "the entropy bonus needs entropies"
        terms = terms + recipe.bonus.coef * entropy
    return (tokens.weight * tokens.unmasked(terms)).sum(), metrics


def is_tokenwise(recipe: Recipe) -> bool:
    """Whether each token's term depends on the current policy through its own log-probability alone."""
    return (
        recipe.loss in TOKENWISE
        and recipe.offpolicy_sequence_mask == "off"
        and not recipe.mismatch_correction.endswith(("sequence", "geometric"))
        and recipe.entropy_control != "bonus"
        and recipe.sampling_mask != "aux_token"
    )


def objective_gradient(tokens: Tokens, recipe: Recipe) -> Callable[[Tensor, slice], Tensor]:
    """(log-probabilities of some of the tokens [t], which) -> the gradient of `objective` to them [t], where the recipe
    `is_tokenwise`: what `weighted_logprob_sum` needs."""

    def gradient(logp: Tensor, rows: slice) -> Tensor:
        with torch.enable_grad():
            leaf = logp.detach().requires_grad_()
            value, _ = objective(leaf, None, tokens.part(rows), recipe)
        return torch.autograd.grad(value, leaf)[0]

    return gradient
