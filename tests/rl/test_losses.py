"""Every policy loss: autograd against its closed form, golden vectors by hand, and what CISPO stops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError, gradcheck

from scalerl.rl.losses import LOSSES, get_loss
from scalerl.rl.losses.cispo import cispo
from scalerl.rl.losses.dapo import dapo
from scalerl.rl.losses.grpo import grpo
from scalerl.rl.losses.gspo import gspo
from scalerl.rl.losses.reinforce import reinforce

PARAMS = {
    "cispo": {"eps_max": 1.5},
    "dapo": {"eps_low": 0.2, "eps_high": 0.26},
    "grpo": {},
    "gspo": {"eps_low": 0.05, "eps_high": 0.1},
    "reinforce": {},
}


@pytest.fixture
def ragged(make_tokens):
    """Completions of 3, 1, 5, 2, 4, 6 tokens, some of them masked, with ratios on both sides of every bound."""
    rng = torch.Generator().manual_seed(1)
    completion = torch.repeat_interleave(torch.arange(6), torch.tensor([3, 1, 5, 2, 4, 6]))
    mask = torch.ones(21, dtype=torch.bool)
    mask[[1, 8, 20]] = False
    tokens = make_tokens(
        (-torch.rand(21, generator=rng, dtype=torch.float64) - 0.5).tolist(),
        completion=completion,
        mask=mask,
        advantage=torch.tensor([1.0, -1.0, -2.0, 0.5, 0.0, 1.5], dtype=torch.float64)[completion],
    )
    drift = 0.4 * torch.randn(21, generator=rng, dtype=torch.float64)
    return (tokens.logp_gen + drift).requires_grad_(), tokens


def clipped_gradient(ratio, advantage, low, high):
    """d/d(log ratio) of min(r A, clip(r) A): r A, and 0 where the clip has taken over."""
    gone = ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))
    return torch.where(gone, 0.0, ratio * advantage)


def closed_form(name, logp, tokens, params):
    log_rho, a = logp - tokens.logp_gen, tokens.advantage
    if name == "cispo":
        return torch.minimum(log_rho.exp(), torch.tensor(params["eps_max"])) * a
    if name == "reinforce":
        return a
    if name in ("dapo", "grpo"):
        low, high = (params["eps_low"], params["eps_high"]) if params else (0.2, 0.2)
        return clipped_gradient(log_rho.exp(), a, low, high)
    s = torch.empty_like(logp)
    for i in range(tokens.n_completions):
        own = tokens.completion == i
        s[own] = log_rho[own & tokens.mask].mean().exp()
    # n tokens carry the sequence's term, each of its n log-ratios enters with 1/n
    return clipped_gradient(s, a, params["eps_low"], params["eps_high"])


@pytest.mark.parametrize("name", LOSSES)
def test_autograd_equals_the_closed_form(name, ragged):
    logp, tokens = ragged
    terms, _ = get_loss(name)(logp, tokens, **PARAMS[name])
    (found,) = torch.autograd.grad(terms[tokens.mask].sum(), logp)
    expected = torch.where(tokens.mask, closed_form(name, logp.detach(), tokens, PARAMS[name]), 0.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "reinforce"])
def test_the_ragged_case_meets_every_branch(name, ragged):
    _, metrics = get_loss(name)(*ragged, **PARAMS[name])
    assert [0 < share.compute() < 1 for share in metrics.values()] == [True]


@pytest.mark.parametrize("name", LOSSES)
def test_a_masked_token_touches_nothing(name, ragged):
    logp, tokens = ragged
    terms, metrics = get_loss(name)(logp, tokens, **PARAMS[name])
    (clean,) = torch.autograd.grad(terms[tokens.mask].sum(), logp)
    dirty = torch.where(tokens.mask, logp.detach(), -torch.inf).requires_grad_()
    broken = replace(tokens, logp_gen=torch.where(tokens.mask, tokens.logp_gen, torch.nan))
    terms_again, metrics_again = get_loss(name)(dirty, broken, **PARAMS[name])
    (again,) = torch.autograd.grad(terms_again[tokens.mask].sum(), dirty)
    torch.testing.assert_close(terms_again[tokens.mask], terms[tokens.mask], rtol=0, atol=0)
    torch.testing.assert_close(again, clean, rtol=0, atol=0)
    assert metrics_again == metrics


def terms_and_slopes(loss, make_tokens, rho, advantage, **params):
    logp_gen = [-1.0] * len(rho)
    logp = (torch.tensor(logp_gen, dtype=torch.float64) + torch.tensor(rho, dtype=torch.float64).log()).requires_grad_()
    terms, metrics = loss(logp, make_tokens(logp_gen, advantage=advantage), **params)
    (slopes,) = torch.autograd.grad(terms.sum(), logp)
    return terms.tolist(), slopes.tolist(), metrics


def test_cispo_by_hand(make_tokens):
    """eps_max = 5 caps rho itself: 6 -> 5, 5.5 -> 5 (not 6), 0.5 and 0.01 stay; logp = -1 + log rho."""
    terms, slopes, metrics = terms_and_slopes(
        cispo, make_tokens, [6.0, 5.5, 0.5, 0.01], [2.0, -1.0, -1.0, 1.0], eps_max=5.0
    )
    assert slopes == pytest.approx([10.0, -5.0, -0.5, 0.01])
    logp = [math.log(rho) - 1 for rho in (6.0, 5.5, 0.5, 0.01)]
    assert terms == pytest.approx([10 * logp[0], -5 * logp[1], -0.5 * logp[2], 0.01 * logp[3]])
    assert metrics["capped_share"].compute() == 0.5


def test_dapo_by_hand(make_tokens):
    """0.2/0.26. A = 1: rho 1.5 -> 1.26, flat; 1.23 -> 1.23, slope 1.23; 0.5 -> 0.5, slope 0.5 (min keeps the lower).
    A = -1: 0.5 -> -0.8, flat; 1.5 -> -1.5, slope -1.5."""
    terms, slopes, metrics = terms_and_slopes(
        dapo, make_tokens, [1.5, 1.23, 0.5, 0.5, 1.5], [1.0, 1.0, 1.0, -1.0, -1.0], eps_low=0.2, eps_high=0.26
    )
    assert terms == pytest.approx([1.26, 1.23, 0.5, -0.8, -1.5])
    assert slopes == pytest.approx([0.0, 1.23, 0.5, 0.0, -1.5])
    assert metrics["clipped_share"].compute() == pytest.approx(0.4)


def test_grpo_is_dapo_with_equal_bounds(make_tokens):
    terms, slopes, _ = terms_and_slopes(grpo, make_tokens, [1.23, 1.1, 0.7], [1.0, 1.0, -1.0])
    assert terms == pytest.approx([1.2, 1.1, -0.8])
    assert slopes == pytest.approx([0.0, 1.1, 0.0])


def test_gspo_by_hand(make_tokens):
    """Completion 0: log rho = (0.002, 0.004), A = 1: s = exp(0.003), inside 0.995..1.005, each token's term s and slope
    2 s / 2. Completion 1: (0.2, 0.4, masked), A = 1: s = exp(0.3), clipped to 1.005, flat."""
    logp_gen = [-1.0] * 5
    drift = torch.tensor([0.002, 0.004, 0.2, 0.4, 9.0], dtype=torch.float64)
    logp = (drift - 1).requires_grad_()
    tokens = make_tokens(logp_gen, completion=[0, 0, 1, 1, 1], mask=[True, True, True, True, False])
    terms, metrics = gspo(logp, tokens, eps_low=5e-3, eps_high=5e-3)
    assert terms[:4].tolist() == pytest.approx([math.exp(0.003)] * 2 + [1.005] * 2)
    (slopes,) = torch.autograd.grad(terms[tokens.mask].sum(), logp)
    assert slopes.tolist() == pytest.approx([math.exp(0.003)] * 2 + [0.0] * 3)
    assert metrics["clipped_share"].compute() == 0.5


def test_reinforce_by_hand(make_tokens):
    terms, slopes, metrics = terms_and_slopes(reinforce, make_tokens, [1.0, 3.0], [-2.0, 0.5])
    assert slopes == [-2.0, 0.5]
    assert terms == pytest.approx([2.0, 0.5 * (math.log(3) - 1)])
    assert metrics == {}


def test_cispo_gradcheck_fails_raw_and_passes_with_the_weight_frozen(ragged):
    logp, tokens = ragged
    with pytest.raises(GradcheckError):
        gradcheck(lambda x: cispo(x, tokens, eps_max=1.5)[0], (logp,))

    log_rho = (logp - tokens.logp_gen).detach()

    def frozen(x):
        """The generator's log-probability moves along with x, so that rho stays what it was."""
        return cispo(x, replace(tokens, logp_gen=x.detach() - log_rho), eps_max=1.5)[0]

    assert gradcheck(frozen, (logp,))


@pytest.mark.parametrize("name", ["dapo", "grpo", "gspo", "reinforce"])
def test_losses_without_stop_gradient_pass_gradcheck(name, ragged):
    logp, tokens = ragged
    assert gradcheck(lambda x: tokens.unmasked(get_loss(name)(x, tokens, **PARAMS[name])[0]), (logp,))


def test_ratio_to_the_old_trainer_replaces_the_denominator(make_tokens):
    """logp = -1, generator -2 (rho e), old trainer -1 (rho 1): the one is clipped to 1.26, the other is not."""
    logp = torch.tensor([-1.0], dtype=torch.float64)
    to_generator = make_tokens([-2.0], logp_old=[-1.0])
    to_trainer = replace(to_generator, trainer_ratio=True)
    assert dapo(logp, to_generator, eps_low=0.2, eps_high=0.26)[0].item() == pytest.approx(1.26)
    assert dapo(logp, to_trainer, eps_low=0.2, eps_high=0.26)[0].item() == pytest.approx(1.0)
