"""Clip-Cov and KL-Cov: covariances, how many tokens, and which."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from scalerl.rl.entropy_control import covariance, select


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_covariance_by_hand():
    """Unmasked logp -1, -2, -3 (mean -2), A 1, 1, -2 (mean 0): cov 1, 0, 2; the masked token is in no mean."""
    logp, advantage = torch.tensor([-1.0, -9.0, -2.0, -3.0]), torch.tensor([1.0, 50.0, 1.0, -2.0])
    cov = covariance(logp, advantage, torch.tensor([True, False, True, True]))
    assert cov.tolist() == [1, 0, 0, 2]
    assert cov.dtype == torch.float64


@pytest.fixture
def step():
    """1,000 tokens of which 900 unmasked."""
    mask = torch.arange(1000) % 10 != 3
    logp, advantage = (torch.randn(1000, generator=seeded(s)) for s in (1, 2))
    return {"logp": logp, "advantage": 2 * advantage, "mask": mask}


def test_clip_cov_zeroes_the_floor_of_its_share_inside_the_band(step, make_recipe):
    recipe = make_recipe(entropy_control="clip_cov", clip_cov={"share": 0.0121, "cov_low": 1.0, "cov_high": 5.0})
    keep, cov = select(**step, recipe=recipe, generator=seeded()), covariance(**step)
    assert int((~keep).sum()) == 10  # floor(10.89)
    assert ((cov[~keep] >= 1) & (cov[~keep] <= 5) & step["mask"][~keep]).all()


def test_clip_cov_takes_all_where_the_band_holds_fewer(step, make_recipe):
    recipe = make_recipe(entropy_control="clip_cov", clip_cov={"share": 0.5, "cov_low": 3.0, "cov_high": 5.0})
    cov = covariance(**step)
    inside = step["mask"] & (cov >= 3) & (cov <= 5)
    assert 0 < int(inside.sum()) < 450
    assert torch.equal(~select(**step, recipe=recipe, generator=seeded()), inside)
    everything = make_recipe(entropy_control="clip_cov", clip_cov={"share": 1.0, "cov_low": -100.0, "cov_high": 100.0})
    assert torch.equal(~select(**step, recipe=everything, generator=seeded()), step["mask"])


def test_clip_cov_draws_uniformly_and_repeats_with_its_seed(make_recipe):
    """Four tokens in the band, two drawn a time: each is drawn in half of the 2,000 draws (sd 22)."""
    logp = torch.tensor([-1.0, 1.0, -1.0, 1.0, 0, 0, 0, 0])
    advantage = 1.5 * logp
    mask = torch.ones(8, dtype=torch.bool)
    recipe = make_recipe(entropy_control="clip_cov", clip_cov={"share": 0.25, "cov_low": 1.0, "cov_high": 5.0})
    draws = [
        tuple((~select(logp, advantage, mask, recipe, seeded(s))).nonzero().flatten().tolist()) for s in range(2000)
    ]
    assert {len(d) for d in draws} == {2}
    counts = Counter(i for d in draws for i in d)
    assert set(counts) == {0, 1, 2, 3}
    assert all(abs(n - 1000) < 5 * 22 for n in counts.values())
    assert torch.equal(
        select(logp, advantage, mask, recipe, seeded(7)), select(logp, advantage, mask, recipe, seeded(7))
    )


def test_kl_cov_marks_the_largest_covariances(step, make_recipe):
    recipe = make_recipe(entropy_control="kl_cov", kl_cov={"share": 0.02})
    chosen, cov = select(**step, recipe=recipe, generator=seeded()), covariance(**step)
    assert int(chosen.sum()) == 18
    assert step["mask"][chosen].all()
    assert cov[chosen].min() > cov[step["mask"] & ~chosen].max()


def test_kl_cov_marks_at_least_one(make_recipe):
    """A share of 2e-3 of three tokens is none; the token with cov 2 is marked all the same."""
    recipe = make_recipe(entropy_control="kl_cov", kl_cov={"share": 2e-3})
    logp, advantage = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([1.0, 1.0, -2.0])
    assert select(logp, advantage, torch.ones(3) > 0, recipe, seeded()).tolist() == [False, False, True]


def test_the_share_is_the_decimal_that_was_written(make_recipe):
    """0.29 * 100 is 28.999... in floats."""
    recipe = make_recipe(entropy_control="kl_cov", kl_cov={"share": 0.29})
    logp = torch.arange(100.0)
    assert int(select(logp, logp, torch.ones(100) > 0, recipe, seeded()).sum()) == 29


def test_the_shipped_shares(make_recipe):
    """2e-4 and 2e-3 of 10,000 tokens, in the band 1..5."""
    logp = torch.randn(10_000, generator=seeded(3))
    mask = torch.ones(10_000, dtype=torch.bool)
    advantage = 2 * torch.randn(10_000, generator=seeded(4))
    clip, kl = make_recipe(entropy_control="clip_cov"), make_recipe(entropy_control="kl_cov")
    assert int((~select(logp, advantage, mask, clip, seeded())).sum()) == 2
    assert int(select(logp, advantage, mask, kl, seeded()).sum()) == 20
    assert (clip.clip_cov.cov_low, clip.clip_cov.cov_high, kl.kl_cov.beta) == (1.0, 5.0, 1.0)
