"""Trainer against generator: corrections, the off-policy sequence mask, and what is logged."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from scalerl.rl.metrics import Metrics
from scalerl.rl.mismatch import correction, mismatch_metrics, sequence_mask
from scalerl.rl.objective import objective


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def test_corrections_by_hand(make_tokens):
    """log w of completion 0: 0.5, 0.6, and 9 on a masked token; of completion 1: 0.8. Cap 2."""
    tokens = make_tokens(
        [-1.0] * 4, logp_old=[-0.5, -0.4, 8.0, -0.2], mask=[True, True, False, True], completion=[0, 0, 0, 1]
    )
    e = math.exp
    by_hand = {
        "tis_token": [e(0.5), e(0.6), 2.0],
        "mis_token": [e(0.5), e(0.6), 0.0],
        "tis_sequence": [2.0, 2.0, 2.0],
        "mis_sequence": [0.0, 0.0, 0.0],
        "tis_geometric": [e(0.55), e(0.55), 2.0],
        "mis_geometric": [e(0.55), e(0.55), 0.0],
    }
    for how, expected in by_hand.items():
        assert correction(tokens, how, 2.0)[tokens.mask].tolist() == pytest.approx(expected), how
    assert correction(tokens, "mis_sequence", 3.1)[tokens.mask].tolist() == pytest.approx([e(1.1)] * 2 + [e(0.8)])


def test_a_correction_scales_the_gradient_and_no_denominator(make_recipe, make_tokens):
    """REINFORCE, A = 1, weights 1/2: slopes w/2, 0 beyond the cap, and the 1/2 stays."""
    recipe = make_recipe(loss="reinforce", mismatch_correction="mis_token")
    tokens = make_tokens([-1.0, -1.0], logp_old=[-0.5, 0.0], weight=0.5)
    logp = f64([-0.5, 0.0]).requires_grad_()
    (slopes,) = torch.autograd.grad(objective(logp, None, tokens, recipe)[0], logp)
    assert slopes.tolist() == pytest.approx([math.exp(0.5) / 2, 0.0])


def test_sequence_mask_by_hand(make_tokens):
    """mean(logp_gen - logp): completion 0: 0.3 (the masked token apart), 1: 0.3 with A > 0, 2: 0.1 with A < 0."""
    tokens = make_tokens(
        [-1.0] * 6,
        completion=[0, 0, 0, 1, 2, 2],
        mask=[True, True, False, True, True, True],
        advantage=[-1.0, -1.0, -1.0, 1.0, -1.0, -1.0],
    )
    logp = f64([-1.2, -1.4, -50.0, -1.3, -1.0, -1.2])
    assert sequence_mask(logp, tokens, 0.2).tolist() == [0, 0, 0, 1, 1, 1]
    assert sequence_mask(logp, tokens, 0.31).tolist() == [1] * 6
    assert sequence_mask(logp, tokens, 0.05).tolist() == [0, 0, 0, 1, 0, 0]


def test_sequence_mask_leaves_the_kl_term(make_recipe, make_tokens):
    recipe = make_recipe(
        loss="reinforce", offpolicy_sequence_mask=0.2, kl="k2_as_loss", kl_params={"importance_weighted": False}
    )
    tokens = make_tokens([-1.0], advantage=-3.0, logp_ref=[-2.0], kl_beta=0.5, weight=0.1)
    logp = f64([-1.5]).requires_grad_()
    (slope,) = torch.autograd.grad(objective(logp, None, tokens, recipe)[0], logp)
    assert slope.item() == pytest.approx(-0.1 * 0.5 * 0.5)  # -weight beta k1, and nothing of A


def test_metrics_by_hand(make_tokens):
    """rho = 2.5, 0.4, 1 unmasked; versions 5, 3, 5 at v = 5; perplexities exp(1.0) and exp(2)."""
    logp = f64([-0.5, -1.5, -4.0, -2.0])
    log_rho = [math.log(2.5), math.log(0.4), 7.0, 0.0]
    tokens = make_tokens(
        (logp - f64(log_rho)).tolist(),
        mask=[True, True, False, True],
        completion=[0, 0, 0, 1],
        versions=[5, 3, 0, 5],
    )
    found = {name: m.compute() for name, m in mismatch_metrics(logp, tokens, 5).items()}
    k3 = [2.5 - 1 - math.log(2.5), 0.4 - 1 - math.log(0.4), 0.0]
    mean = (2.5 + 0.4 + 1) / 3
    assert found == {
        "mismatch_k3": pytest.approx(sum(k3) / 3),
        "extreme_share": pytest.approx(2 / 3),
        "perplexity": pytest.approx((math.e + math.e**2) / 2),
        "max_abs_log_ratio": pytest.approx(math.log(2.5)),
        "ratio_variance": pytest.approx(((2.5 - mean) ** 2 + (0.4 - mean) ** 2 + (1 - mean) ** 2) / 3),
        "lag_mean": pytest.approx(2 / 3),
        "lag_max": 2,
        "lag_histogram": {0: 2, 2: 1},
        "mismatch_k3_current": pytest.approx((k3[0] + k3[2]) / 2),
        "extreme_share_current": 0.5,
        "perplexity_current": pytest.approx((math.exp(0.5) + math.e**2) / 2),
        "max_abs_log_ratio_current": pytest.approx(math.log(2.5)),
    }


def test_no_current_tokens_is_null(make_tokens):
    found = mismatch_metrics(f64([-1.0]), make_tokens([-1.2]), version=3)
    current = {name: metric.compute() for name, metric in found.items() if name.endswith("_current")}
    assert len(current) == 4 and set(current.values()) == {None}


@pytest.mark.parametrize("factor,extreme", [(1.999, 0), (2.001, 1)])
def test_extreme_means_beyond_two_on_either_side(factor, extreme, make_tokens):
    logp = f64([-1 + math.log(factor), -1 - math.log(factor)])
    found = mismatch_metrics(logp, make_tokens([-1.0, -1.0]), version=0)
    assert found["extreme_share"].compute() == extreme


def test_k3_estimates_kl_of_generator_against_trainer(make_tokens):
    """The mean under the generator, enumerated: sum q (p/q - 1 - log p/q) = KL(q || p)."""
    q, p = f64([0.5, 0.3, 0.2]), f64([0.2, 0.2, 0.6])
    each = [mismatch_metrics(p[i : i + 1].log(), make_tokens([q[i].log().item()]), 0)["mismatch_k3"] for i in range(3)]
    found = sum(q[i].item() * k3.compute() for i, k3 in enumerate(each))
    assert found == pytest.approx((q * (q / p).log()).sum().item(), abs=1e-12)


def test_metrics_of_micro_batches_merge_into_the_batchs(make_tokens):
    rng = torch.Generator().manual_seed(0)
    completion = torch.repeat_interleave(torch.arange(4), torch.tensor([3, 1, 4, 2]))
    logp, logp_gen = -torch.rand(2, 10, generator=rng, dtype=torch.float64)
    mask, versions = torch.arange(10) % 4 != 1, torch.arange(10) % 3
    whole = make_tokens(logp_gen.tolist(), completion=completion, mask=mask, versions=versions)
    merged = Metrics()
    for part in ([0], [3, 1], [], [2]):
        own = torch.isin(completion, torch.tensor(part, dtype=torch.int64))
        tokens = make_tokens(logp_gen[own].tolist(), completion=completion[own], mask=mask[own], versions=versions[own])
        merged.update(mismatch_metrics(logp[own], tokens, 2))
    expected = {name: metric.compute() for name, metric in mismatch_metrics(logp, whole, 2).items()}
    assert merged.compute() == {
        name: value if isinstance(value, dict) else pytest.approx(value, abs=1e-12) for name, value in expected.items()
    }


class TwoSteps:
    """A policy that draws a, then b given a, out of three each; a generator of other weights; rewards of pairs."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(0)
        self.theta = torch.randn(4, 3, generator=rng, dtype=torch.float64).requires_grad_()
        self.generator = self.theta.detach() + torch.randn(4, 3, generator=rng, dtype=torch.float64)
        self.reward = torch.randn(3, 3, generator=rng, dtype=torch.float64)
        self.pairs = list(itertools.product(range(3), range(3)))

    def logprobs(self, weights):
        """Of every pair's two tokens, flat, in the order of `pairs`."""
        table = weights.log_softmax(-1)
        return torch.stack([table[row, token] for a, b in self.pairs for row, token in ((3, a), (a, b))])

    def exact(self):
        p = self.logprobs(self.theta).view(-1, 2).sum(1).exp()
        return torch.autograd.grad((p * self.reward.flatten()).sum(), self.theta)[0]

    def mean_of(self, recipe, make_tokens):
        """The recipe's gradient on each pair, weighted with the generator's probability of the pair."""
        logp, logp_gen = self.logprobs(self.theta), self.logprobs(self.generator)
        tokens = make_tokens(
            logp_gen.tolist(),
            completion=torch.arange(9).repeat_interleave(2),
            advantage=self.reward.flatten().repeat_interleave(2),
            weight=logp_gen.view(-1, 2).sum(1).exp().repeat_interleave(2),
            logp_old=logp.detach(),
        )
        return torch.autograd.grad(objective(logp, None, tokens, recipe)[0], self.theta)[0]


def test_sequence_weight_times_reinforce_is_unbiased_and_no_other_weight_is(make_recipe, make_tokens):
    problem, exact = TwoSteps(), TwoSteps().exact()
    for how in ("tis_sequence", "mis_sequence"):
        recipe = make_recipe(loss="reinforce", mismatch_correction=how, mismatch_cap=1e9)
        torch.testing.assert_close(problem.mean_of(recipe, make_tokens), exact, rtol=0, atol=1e-10)
    for how in ("tis_token", "tis_geometric", "none"):
        recipe = make_recipe(loss="reinforce", mismatch_correction=how, mismatch_cap=1e9)
        assert (problem.mean_of(recipe, make_tokens) - exact).abs().max() > 1e-2, how


def test_a_correction_follows_theta_b_not_the_current_weights(make_tokens):
    tokens = make_tokens([-1.0], logp_old=[-0.9])
    for how in ("tis_token", "mis_geometric"):
        w = correction(replace(tokens, logp_old=tokens.logp_old.clone().requires_grad_()), how, 2.0)
        assert w.item() == pytest.approx(math.exp(0.1)) and not w.requires_grad
