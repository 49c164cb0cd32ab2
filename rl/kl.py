"""KL to the reference as a term of the objective, -beta K ("Rethinking KL Regularization in RLHF", arXiv 2510.01555).

With delta = pi_ref / pi_theta of the sampled token: k1 = -log delta, k2 = (log delta)^2 / 2,
k3 = delta - 1 - log delta.
"""

from __future__ import annotations

from torch import Tensor

from scalerl.rl.tokens import Tokens


def kl_term(logp: Tensor, tokens: Tokens, form: str, *, importance_weighted: bool) -> Tensor:
    """K, one value a token [T], whose gradient is the form's; it is aggregated like the policy term.

    `k1_in_reward`: sg(k1) logp, each coefficient on its own token. `k2_as_loss`, `k3_as_loss`: K = k2, k3. `mse`:
    sg(pi_theta - pi_ref) logp (App. F there; the coefficient is bounded by 1). Importance-weighted, K is multiplied by
    rho = exp(logp - logp_gen), detached but for `k3_as_loss`: grad(rho k3) = -rho log(delta) grad logp, the unbiased
    estimate of the DeepSeek-V3.2 report. rho is to the generator under either `ratio`, since its samples are averaged.
    On-policy k1_in_reward and k2_as_loss, and off-policy the weighted k1_in_reward, k2_as_loss
    and k3_as_loss, have the exact KL gradient as their mean.

    By hand: logp = log 0.5, logp_ref = log 0.25: delta = 0.5, k1 = 0.693, k2 = 0.240, k3 = 0.193; the gradients to
    logp are 0.693, 0.693 and 0.5."""
    assert tokens.logp_ref is not None, "a KL term needs a pass under the reference"
    log_delta = tokens.unmasked(tokens.logp_ref - logp)  # k3 of a forced token could overflow, and inf * 0 is NaN
    if form == "k1_in_reward":
        value = -log_delta.detach() * logp
    elif form == "k2_as_loss":
        value = log_delta.square() / 2
    elif form == "k3_as_loss":
        value = log_delta.exp() - 1 - log_delta
    elif form == "mse":
        value = (logp.exp() - tokens.logp_ref.exp()).detach() * logp
    else:
        raise ValueError(f"kl={form} is not a KL form")
    if not importance_weighted:
        return value
    rho = tokens.unmasked(logp - tokens.logp_gen).exp()
    return (rho if form == "k3_as_loss" else rho.detach()) * value
