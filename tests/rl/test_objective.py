"""The objective as a whole: how its terms add up, against the definitions, and what must not get into it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from scalerl.rl.batch import assemble, tokens_of
from scalerl.rl.objective import objective


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def slopes_of(logp, tokens, recipe, entropy=None):
    logp = logp.clone().requires_grad_()
    return torch.autograd.grad(objective(logp, entropy, tokens, recipe)[0], logp)[0]


@pytest.mark.parametrize("aggregation", ["prompt", "sample", "token"])
def test_equals_the_definition_written_out(aggregation, make_completion, make_group, make_recipe):
    """CISPO less beta k2 plus the bonus on a ragged batch, with every sum and mean as a loop."""
    c = make_completion
    groups = [
        make_group([c(4), c(6, injected=(2, 3), seed=1), c(2, truncated=True)], [True, False, False], group=0),
        make_group([c(3), c(3, seed=1)], [True, True], group=1),
        make_group([c(5), c(1), c(2, seed=2)], [False, True, False], group=2, task="hard"),
    ]
    recipe = make_recipe(
        loss_aggregation=aggregation,
        loss_params={"cispo": {"eps_max": 1.1}},
        kl="k2_as_loss",
        kl_params={"beta": 0.3, "beta_by_task": {"hard": 0.7}},
        entropy_control="bonus",
        bonus={"coef": 0.05},
    )
    rows = assemble(groups, recipe).rows
    tokens = tokens_of(rows, trainer_ratio=False, device=torch.device("cpu"), dtype=torch.float64)
    rng = torch.Generator().manual_seed(0)
    logp, logp_ref, entropy = -torch.rand(3, len(tokens.mask), generator=rng, dtype=torch.float64)
    value, _ = objective(logp, -entropy, replace(tokens, logp_ref=logp_ref), recipe)

    prompts: dict[int, list[list[float]]] = {}
    at = 0
    centred = {0: [1.0, -1.0], 2: [-2 / 3, 4 / 3, -2 / 3]}
    std = np.std([a for group in centred.values() for a in group])
    for group, of in centred.items():
        for a, completion in zip(of, groups[group].completions, strict=False):
            terms = []
            for t in range(len(completion.tokens)):
                x, ref, h = (float(v[at + t]) for v in (logp, logp_ref, -entropy))
                rho = min(math.exp(x - float(completion.logprobs[t])), 1.1)
                beta = 0.7 if group == 2 else 0.3
                if not completion.injected[t]:
                    terms.append(rho * a / std * x - beta * (ref - x) ** 2 / 2 + 0.05 * h)
            at += len(completion.tokens)
            prompts.setdefault(group, []).append(terms)
    assert at == len(tokens.mask)
    samples = [terms for group in prompts.values() for terms in group]
    expected = {
        "prompt": np.mean([np.mean(np.concatenate(group)) for group in prompts.values()]),
        "sample": np.mean([np.mean(terms) for terms in samples]),
        "token": np.mean(np.concatenate(samples)),
    }[aggregation]
    assert value.item() == pytest.approx(expected, abs=1e-12)


def test_clip_cov_zeroes_the_policy_term_and_nothing_else(make_recipe, make_tokens):
    """A = 2, weight 1/2, beta k1 = 0.1 * 0.5: slopes 1 - 0.025 and, not kept, -0.025."""
    recipe = make_recipe(loss="reinforce", entropy_control="clip_cov", kl="k1_in_reward")
    tokens = make_tokens(
        [-1.0, -1.0],
        advantage=2.0,
        weight=0.5,
        kl_beta=0.1,
        logp_ref=[-1.5, -1.5],
        policy_keep=torch.tensor([True, False]),
    )
    assert slopes_of(f64([-1.0, -1.0]), tokens, recipe).tolist() == pytest.approx([0.975, -0.025])


def test_kl_cov_pulls_towards_the_generator(make_recipe, make_tokens):
    """-beta |logp - logp_gen|, beta 0.5: slopes -0.5 above, +0.5 below, nothing where it was not chosen. The old
    trainer, far below, is no matter."""
    recipe = make_recipe(loss="reinforce", entropy_control="kl_cov", kl_cov={"beta": 0.5})
    tokens = make_tokens([-1.0] * 3, advantage=0.0, kl_cov=torch.tensor([True, True, False]))
    tokens = replace(tokens, trainer_ratio=True, logp_old=f64([-9.0] * 3))
    assert slopes_of(f64([-0.9, -1.1, -0.9]), tokens, recipe).tolist() == pytest.approx([-0.5, 0.5, 0.0])
    value, _ = objective(f64([-0.9, -1.1, -0.9]), None, tokens, recipe)
    assert value.item() == pytest.approx(-0.5 * 0.2)


def test_the_bonus_is_weighted_like_the_policy_term(make_recipe, make_tokens):
    recipe = make_recipe(loss="reinforce", entropy_control="bonus", bonus={"coef": 0.005})
    tokens = make_tokens([-1.0, -1.0], advantage=0.0, weight=[0.25, 0.0], mask=[True, False])
    entropy = f64([2.0, 3.0]).requires_grad_()
    value, _ = objective(f64([-1.0, -1.0]), entropy, tokens, recipe)
    assert value.item() == pytest.approx(0.25 * 0.005 * 2.0)
    assert torch.autograd.grad(value, entropy)[0].tolist() == pytest.approx([0.25 * 0.005, 0.0])


@pytest.mark.parametrize("loss", ["cispo", "dapo", "grpo", "gspo", "reinforce"])
def test_no_tokens_give_a_zero_that_can_be_differentiated(loss, make_recipe):
    recipe = make_recipe(loss=loss, kl="k3_as_loss", offpolicy_sequence_mask=0.1, entropy_control="bonus")
    tokens = tokens_of([], trainer_ratio=False, device=torch.device("cpu"), dtype=torch.float64)
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    logp = weight[:0]
    value, metrics = objective(logp, logp, replace(tokens, logp_ref=torch.zeros(0, dtype=torch.float64)), recipe)
    value.backward()
    assert value.item() == 0.0
    assert weight.grad is not None and weight.grad.tolist() == [0, 0, 0]
    assert {m.compute() for m in metrics.values()} == {None}


@pytest.mark.parametrize("loss", ["cispo", "dapo", "grpo", "gspo", "reinforce"])
@pytest.mark.parametrize("kl", ["k1_in_reward", "k2_as_loss", "k3_as_loss", "mse"])
def test_forced_tokens_may_be_anything(loss, kl, make_recipe, make_tokens):
    recipe = make_recipe(loss=loss, kl=kl, kl_params={"importance_weighted": True}, offpolicy_sequence_mask=0.01)
    tokens = make_tokens(
        [-1.0, 0.0, -1.0],
        advantage=-1.0,
        mask=[True, False, True],
        weight=[0.5, 0, 0.5],
        kl_beta=0.1,
        logp_ref=[-1.2] * 3,
    )
    usual, forced = f64([-1.1, -1.0, -0.7]), f64([-1.1, -torch.inf, -0.7])
    expected = slopes_of(usual, tokens, recipe)
    assert torch.equal(slopes_of(forced, tokens, recipe), expected)
    assert torch.equal(objective(forced, None, tokens, recipe)[0], objective(usual, None, tokens, recipe)[0])
    assert expected[1] == 0 and expected.isfinite().all()


def test_a_non_finite_trained_token_shows(make_recipe, make_tokens):
    value, _ = objective(f64([-1.0, torch.nan]), None, make_tokens([-1.0, -1.0]), make_recipe())
    assert not value.isfinite()


def test_the_auxiliary_score_is_the_gradient_of_the_truncated_policy(make_recipe, make_tokens):
    """V = 6, of which top-p keeps 4, T = 0.7. For each a: sum_u p(u) grad (z_a - z_u) / T = grad log p(a), p over the
    kept set; hence the mean over a and u of A(a) times the score is the gradient of the mean reward."""
    recipe = make_recipe(loss="reinforce", sampling_mask="aux_token", k=0, sampling={"temperature": 0.7, "top_p": 0.9})
    rng = torch.Generator().manual_seed(0)
    z = torch.randn(6, generator=rng, dtype=torch.float64).requires_grad_()
    reward = torch.randn(6, generator=rng, dtype=torch.float64)
    kept = z.detach().argsort(descending=True)[:4]
    log_p = (z[kept] / 0.7).log_softmax(-1)
    p = log_p.detach().exp()
    a, u = (grid.flatten() for grid in torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"))

    def mean_over(weight):
        tokens = make_tokens([-1.0] * 16, completion=torch.arange(16), advantage=reward[kept][a], weight=weight)
        score = (z[kept][a] - z[kept][u]) / 0.7
        return torch.autograd.grad(objective(score, None, tokens, recipe)[0], z)[0]

    (exact,) = torch.autograd.grad((log_p.exp() * reward[kept]).sum(), z, retain_graph=True)
    torch.testing.assert_close(mean_over(p[a] * p[u]), exact, rtol=0, atol=1e-12)
    for i in range(4):
        (one,) = torch.autograd.grad(reward[kept][i] * log_p[i], z, retain_graph=True)
        torch.testing.assert_close(mean_over(torch.where(a == i, p[u], 0.0)), one, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "axis,value",
    [
        ("kl", "k2_as_loss"),
        ("mismatch_correction", "tis_sequence"),
        ("offpolicy_sequence_mask", 0.1),
        ("entropy_control", "bonus"),
    ],
)
def test_what_needs_log_probabilities_is_refused_with_the_auxiliary_score(axis, value, make_recipe):
    aux = {"loss": "reinforce", "sampling_mask": "aux_token", "k": 0}
    make_recipe(**aux)
    with pytest.raises(ValueError, match=f"{axis}={value} with sampling_mask=aux_token"):
        make_recipe(**aux, **{axis: value})


def test_a_reversed_covariance_band_is_refused(make_recipe):
    with pytest.raises(ValueError, match="cov_low=6"):
        make_recipe(entropy_control="clip_cov", clip_cov={"cov_low": 6.0})
