"""KL terms: closed forms, exact enumeration over a small softmax, and the narrow normal where k3 has no variance."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.integrate import quad

from scalerl.rl.kl import kl_term
from scalerl.rl.recipe import Recipe

V = 6
FORMS = ("k1_in_reward", "k2_as_loss", "k3_as_loss", "mse")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_autograd_equals_the_closed_form(form, weighted, make_tokens):
    rng = torch.Generator().manual_seed(0)
    logp_gen, logp_ref, logp = -2 * torch.rand(3, 20, generator=rng, dtype=torch.float64)
    tokens = make_tokens(logp_gen.tolist(), logp_ref=logp_ref)
    log_delta, rho = logp_ref - logp, (logp - logp_gen).exp() if weighted else torch.ones(20)
    expected = {
        "k1_in_reward": -rho * log_delta,
        "k2_as_loss": -rho * log_delta,
        "k3_as_loss": -rho * log_delta if weighted else 1 - log_delta.exp(),
        "mse": rho * (logp.exp() - logp_ref.exp()),
    }[form]
    logp.requires_grad_()
    (found,) = torch.autograd.grad(kl_term(logp, tokens, form, importance_weighted=weighted).sum(), logp)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def test_by_hand(make_tokens):
    """pi = 1/2, ref = 1/4: delta = 1/2, k1 = log 2, k2 = (log 2)^2 / 2, k3 = log 2 - 1/2. The generator's 1/8 makes
    rho = 4."""
    ln2 = math.log(2)
    tokens = make_tokens([math.log(1 / 8)], logp_ref=[math.log(1 / 4)])
    by_hand = {  # form: (value, slope, weighted slope)
        "k1_in_reward": (-ln2 * ln2, ln2, 4 * ln2),
        "k2_as_loss": (ln2**2 / 2, ln2, 4 * ln2),
        "k3_as_loss": (ln2 - 0.5, 0.5, 4 * ln2),
        "mse": (-0.25 * ln2, 0.25, 1.0),
    }
    for form, (value, slope, weighted_slope) in by_hand.items():
        logp = torch.tensor([-ln2], dtype=torch.float64, requires_grad=True)
        k = kl_term(logp, tokens, form, importance_weighted=False)
        weighted = kl_term(logp, tokens, form, importance_weighted=True)
        assert k.item() == pytest.approx(value, rel=1e-12)
        assert weighted.item() == pytest.approx(4 * value, rel=1e-12)
        assert torch.autograd.grad(k, logp)[0].item() == pytest.approx(slope, rel=1e-12)
        assert torch.autograd.grad(weighted, logp)[0].item() == pytest.approx(weighted_slope, rel=1e-12)


@pytest.fixture
def softmax(make_tokens):
    """Policy, reference and generator over V tokens; one token of each, so that a mean is a sum over the vocabulary."""
    rng = torch.Generator().manual_seed(3)
    z, z_ref, z_gen = torch.randn(3, V, generator=rng, dtype=torch.float64)
    z.requires_grad_()
    logp_ref, logp_gen = z_ref.log_softmax(-1), z_gen.log_softmax(-1)
    tokens = make_tokens(logp_gen.tolist(), logp_ref=logp_ref)
    exact = (z.log_softmax(-1).exp() * (z.log_softmax(-1) - logp_ref)).sum()
    return z, tokens, torch.autograd.grad(exact, z)[0]


def mean_gradient(z, tokens, term, *, on_policy):
    """sum over the vocabulary of the sampling probability times the gradient of the token's K."""
    logp = z.log_softmax(-1)
    if on_policy:
        tokens = replace(tokens, logp_gen=logp.detach())
    return torch.autograd.grad((tokens.logp_gen.exp() * term(logp, tokens)).sum(), z)[0]


def of(form, *, weighted):
    return lambda logp, tokens: kl_term(logp, tokens, form, importance_weighted=weighted)


@pytest.mark.parametrize("form", ["k1_in_reward", "k2_as_loss"])
def test_on_policy_the_mean_is_the_kl_gradient(form, softmax):
    z, tokens, exact = softmax
    found = mean_gradient(z, tokens, of(form, weighted=False), on_policy=True)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", ["k1_in_reward", "k2_as_loss", "k3_as_loss"])
@pytest.mark.parametrize("on_policy", [False, True])
def test_importance_weighted_the_mean_is_the_kl_gradient(form, on_policy, softmax):
    z, tokens, exact = softmax
    found = mean_gradient(z, tokens, of(form, weighted=True), on_policy=on_policy)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_the_weight_is_to_the_generator_under_either_ratio(form, make_tokens):
    logp = torch.tensor([-1.0], dtype=torch.float64)
    tokens = make_tokens([-2.0], logp_ref=[-1.5], logp_old=[-0.3])
    found = [
        kl_term(logp, replace(tokens, trainer_ratio=ratio), form, importance_weighted=True) for ratio in (False, True)
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("form", ["k1_in_reward", "k2_as_loss", "k3_as_loss"])
def test_off_policy_without_the_weight_it_is_not(form, softmax):
    z, tokens, exact = softmax
    found = mean_gradient(z, tokens, of(form, weighted=False), on_policy=False)
    assert (found - exact).abs().max() > 1e-2


def test_k3_with_a_detached_rho_is_not(softmax):
    z, tokens, exact = softmax

    def detached(logp, tokens):
        return (logp - tokens.logp_gen).exp().detach() * kl_term(logp, tokens, "k3_as_loss", importance_weighted=False)

    assert (mean_gradient(z, tokens, detached, on_policy=False) - exact).abs().max() > 1e-2


def test_k1_as_loss_has_no_gradient_on_policy_and_is_refused(softmax, make_recipe):
    z, tokens, exact = softmax
    found = mean_gradient(z, tokens, lambda logp, tokens: logp - tokens.logp_ref, on_policy=True)
    assert found.abs().max() < 1e-15 < exact.abs().max()
    with pytest.raises(ValueError, match="expected on-policy gradient is zero"):
        Recipe(**make_recipe().model_dump() | {"kl": "k1_as_loss"})


@pytest.mark.parametrize("on_policy", [False, True])
def test_mse_descends_half_the_squared_distance(on_policy, softmax):
    """sum p (p - ref) grad log p = grad of sum (p - ref)^2 / 2."""
    z, tokens, _ = softmax
    (exact,) = torch.autograd.grad((z.log_softmax(-1).exp() - tokens.logp_ref.exp()).square().sum() / 2, z)
    found = mean_gradient(z, tokens, of("mse", weighted=not on_policy), on_policy=on_policy)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_a_forced_token_that_the_policy_finds_impossible_does_no_harm(form, make_tokens):
    tokens = make_tokens([-1.0, 0.0], logp_ref=[-1.5, -1.0], mask=[True, False])
    logp = torch.tensor([-1.0, -1000.0], dtype=torch.float64, requires_grad=True)
    k = tokens.unmasked(kl_term(logp, tokens, form, importance_weighted=True))
    assert torch.autograd.grad(k.sum(), logp)[0].isfinite().all()


# pi = N(0.1, 0.2^2), ref = N(0, 1): KL = log 5 + (0.04 + 0.01)/2 - 1/2 = 1.1344.
MEAN, NARROW, WIDE = 0.1, 0.2, 1.0


def second_moment_is_finite(policy_sd, ref_sd):
    """E_pi[delta^2], the integral of ref^2 / pi, has exponent -x^2 (2/ref_sd^2 - 1/policy_sd^2) / 2 at large x."""
    return 2 / ref_sd**2 - 1 / policy_sd**2 > 0


def log_normal(x, mean, sd):
    return -(((x - mean) / sd) ** 2) / 2 - math.log(sd * math.sqrt(2 * math.pi))


def second_moment(policy, ref, reach):
    """The integral over -reach..reach."""
    return quad(lambda x: math.exp(2 * log_normal(x, *ref) - log_normal(x, *policy)), -reach, reach, limit=200)[0]


def test_narrow_normal_k1_is_unbiased(make_tokens):
    x = np.random.default_rng(0).normal(MEAN, NARROW, size=20_000)
    logp = torch.tensor(log_normal(x, MEAN, NARROW), requires_grad=True)
    tokens = make_tokens(logp.tolist(), logp_ref=torch.tensor(log_normal(x, 0, WIDE)))
    (k1,) = torch.autograd.grad(kl_term(logp, tokens, "k1_in_reward", importance_weighted=False).sum(), logp)
    exact = math.log(WIDE / NARROW) + (NARROW**2 + MEAN**2) / (2 * WIDE**2) - 0.5
    assert exact == pytest.approx(1.1344, abs=5e-5)
    assert abs(k1.mean().item() - exact) < 3 * k1.std().item() / math.sqrt(len(x))


def test_narrow_normal_k3_has_infinite_variance():
    """k3 = delta - 1 - log delta: log delta has every moment, so the variance is finite where E[delta^2] is."""
    narrow, wide = (MEAN, NARROW), (0.0, WIDE)
    assert not second_moment_is_finite(NARROW, WIDE)
    grown = [second_moment(narrow, wide, reach) for reach in (1, 2, 3)]
    assert grown[1] > 1e6 * grown[0] and grown[2] > 1e6 * grown[1]
    assert second_moment_is_finite(WIDE, NARROW)
    assert second_moment(wide, narrow, 10) == pytest.approx(second_moment(wide, narrow, 5), rel=1e-9)
