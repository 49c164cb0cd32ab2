"""Chunked log-probabilities against log_softmax over all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from scalerl.kernels import logprob as module
from scalerl.kernels import logprob_torch
from scalerl.kernels.head import head_logits
from scalerl.kernels.logprob import (
    token_logits,
    token_logprobs,
    token_logprobs_reference,
    weighted_logprob_sum,
)

T, H, V = 11, 6, 17


@pytest.fixture(params=[5, V, 1024], ids=lambda width: f"tile{width}", autouse=True)
def vocabulary_tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged tiles of the vocabulary, one that fits exactly, and the shipped width."""
    for tiled in (module, logprob_torch):
        monkeypatch.setattr(tiled, "VOCABULARY_TILE", request.param)


def problem(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, H, generator=generator, dtype=dtype)
    weight = torch.randn(V, H, generator=generator, dtype=dtype)
    targets = torch.randint(0, V, (T,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def kept_sets(targets: Tensor) -> Tensor:
    """Ragged sets of 1 to 5 ids that hold the target, padded with -1."""
    sets = torch.full((len(targets), 5), -1)
    for t, target in enumerate(targets.tolist()):
        others = [v for v in torch.randperm(V, generator=torch.Generator().manual_seed(t)).tolist() if v != target]
        sets[t, : t % 5 + 1] = torch.tensor([*others[: t % 5], target])
    return sets


@pytest.mark.parametrize("chunk", [1, 4, T, 4096])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients(chunk: int, temperature: float, masked: bool, with_entropy: bool) -> None:
    hidden, weight, targets = problem()
    kept = kept_sets(targets) if masked else None
    logp, entropy = token_logprobs(
        hidden, weight, targets, temperature=temperature, kept=kept, chunk=chunk, with_entropy=with_entropy
    )
    expected, expected_entropy = token_logprobs_reference(hidden, weight, targets, temperature=temperature, kept=kept)
    torch.testing.assert_close(logp, expected, rtol=0, atol=1e-10)
    a, b = torch.randn(2, T, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    value, wanted = (a * logp).sum(), (a * expected).sum()
    if with_entropy:
        torch.testing.assert_close(entropy, expected_entropy, rtol=0, atol=1e-10)
        assert entropy is not None
        value, wanted = value + (b * entropy).sum(), wanted + (b * expected_entropy).sum()
    else:
        assert entropy is None
    found, right = (torch.autograd.grad(v, (hidden, weight)) for v in (value, wanted))
    torch.testing.assert_close(found, right, rtol=0, atol=1e-10)


@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck(masked: bool) -> None:
    hidden, weight, targets = problem(seed=3)
    kept = kept_sets(targets) if masked else None

    def of(h: Tensor, w: Tensor) -> Any:
        return token_logprobs(h, w, targets, temperature=1.3, kept=kept, chunk=3, with_entropy=True)

    assert torch.autograd.gradcheck(of, (hidden, weight))


def test_a_kept_set_of_the_target_alone_has_probability_one_and_no_gradient() -> None:
    hidden, weight, targets = problem()
    logp, _ = token_logprobs(hidden, weight, targets, kept=targets[:, None])
    torch.testing.assert_close(logp, torch.zeros_like(logp), rtol=0, atol=1e-12)
    for gradient in torch.autograd.grad(logp.sum(), (hidden, weight)):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 4, 4096])
@pytest.mark.parametrize("masked", [False, True])
def test_the_one_pass_variant_has_the_same_value_and_gradient(chunk: int, masked: bool) -> None:
    """CISPO's coefficient, which depends on the log-probability and is held constant."""
    hidden, weight, targets = problem(seed=5)
    kept = kept_sets(targets) if masked else None
    logp_gen, advantage = torch.randn(2, T, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) - 1

    def coefficient(logp: Tensor, rows: slice) -> Tensor:
        return (logp - logp_gen[rows]).exp().clamp(max=1.5) * advantage[rows]

    value, logp = weighted_logprob_sum(hidden, weight, targets, coefficient, temperature=0.7, kept=kept, chunk=chunk)
    expected, _ = token_logprobs_reference(hidden, weight, targets, temperature=0.7, kept=kept)
    wanted = (coefficient(expected.detach(), slice(None)) * expected).sum()
    assert not logp.requires_grad
    torch.testing.assert_close(logp, expected.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(value, wanted, rtol=0, atol=1e-10)
    found, right = (torch.autograd.grad(-3 * v, (hidden, weight)) for v in (value, wanted))
    torch.testing.assert_close(found, right, rtol=0, atol=1e-10)


def test_the_one_pass_variant_goes_back_once() -> None:
    hidden, weight, targets = problem()
    value, _ = weighted_logprob_sum(hidden, weight, targets, lambda logp, rows: torch.ones_like(logp))
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass only"):
        value.backward()


@pytest.mark.parametrize("head", [torch.float32, torch.bfloat16])
def test_bfloat16_weights(head: torch.dtype) -> None:
    """Both variants under an fp32 and a bf16 head: gradients come back in bf16, within its rounding."""
    exact_h, exact_w, targets = (t.detach() for t in problem(torch.float32))
    hidden, weight = exact_h.bfloat16().requires_grad_(), exact_w.bfloat16().requires_grad_()
    exact_h, exact_w = (t.detach().float().requires_grad_() for t in (hidden, weight))
    expected, _ = token_logprobs_reference(exact_h, exact_w, targets)
    right = torch.autograd.grad(expected.sum(), (exact_h, exact_w))
    logp, _ = token_logprobs(hidden, weight, targets, head_dtype=head, chunk=4)
    value, same = weighted_logprob_sum(
        hidden, weight, targets, lambda logp, rows: torch.ones_like(logp), head_dtype=head, chunk=4
    )
    torch.testing.assert_close(same, logp.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(logp, expected, rtol=0, atol=1e-5 if head == torch.float32 else 0.05)
    for total in (logp.sum(), value):
        for found, exact in zip(torch.autograd.grad(total, (hidden, weight)), right, strict=True):
            assert found.dtype == torch.bfloat16
            assert (found.float() - exact).norm() < (0.005 if head == torch.float32 else 0.02) * exact.norm()


def test_by_hand() -> None:
    """Logits (0, log 3) at temperature 1: p = (1/4, 3/4), H = (2 log 2) / 4 + 3/4 log(4/3)."""
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [torch.tensor(3.0).log()]])
    logp, entropy = token_logprobs(hidden, weight, torch.tensor([0]), with_entropy=True)
    torch.testing.assert_close(logp, torch.tensor([-1.386294]))
    torch.testing.assert_close(entropy, torch.tensor([0.562335]))
    halved, _ = token_logprobs(hidden, weight, torch.tensor([0]), temperature=0.5)
    torch.testing.assert_close(halved, torch.tensor([-2.302585]))  # p = (1/10, 9/10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_tokens(dtype: torch.dtype) -> None:
    hidden = torch.zeros(0, H, dtype=dtype, requires_grad=True)
    weight = torch.ones(V, H, dtype=dtype, requires_grad=True)
    targets = torch.zeros(0, dtype=torch.int64)
    logp, entropy = token_logprobs(hidden, weight, targets, with_entropy=True)
    assert entropy is not None and logp.shape == entropy.shape == (0,) and logp.dtype == dtype
    value, _ = weighted_logprob_sum(hidden, weight, targets, lambda logp, rows: logp)
    (logp.sum() + entropy.sum() + value).backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, H)
    assert weight.grad is not None and not weight.grad.any()


def test_a_bfloat16_head_rounds_like_the_generators() -> None:
    """Values from the same rounded logits as `head_logits`; gradients within bfloat16's 8 bits."""
    hidden, weight, targets = problem(torch.float32)
    logp, _ = token_logprobs(hidden, weight, targets, head_dtype=torch.bfloat16, chunk=4)
    rounded = head_logits(hidden, weight, torch.bfloat16).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logp, rounded, rtol=0, atol=1e-5)
    exact, _ = token_logprobs_reference(hidden, weight, targets)
    assert 1e-4 < (logp - exact).abs().max() < 0.1
    for found, right in zip(
        torch.autograd.grad(logp.sum(), (hidden, weight)),
        torch.autograd.grad(exact.sum(), (hidden, weight)),
        strict=True,
    ):
        assert found.dtype == torch.float32
        assert (found - right).norm() < 0.02 * right.norm()


def test_bfloat16_hidden_states_and_a_float32_head() -> None:
    """The policy's body under autocast: the product runs in float32 all the same."""
    hidden, weight, targets = problem(torch.float32)
    coarse = hidden.detach().bfloat16().requires_grad_()
    logp, _ = token_logprobs(coarse, weight, targets)
    expected, _ = token_logprobs_reference(coarse.float(), weight, targets)
    torch.testing.assert_close(logp, expected, rtol=0, atol=1e-5)
    assert torch.autograd.grad(logp.sum(), coarse)[0].dtype == torch.bfloat16


def test_token_logits() -> None:
    hidden, weight, targets = problem()
    ids = torch.stack([targets, (targets + 5) % V], dim=1)
    z = token_logits(hidden, weight, ids)
    expected = (hidden @ weight.mT).gather(1, ids)
    torch.testing.assert_close(z, expected, rtol=0, atol=1e-10)
    found, right = (torch.autograd.grad(v.square().sum(), (hidden, weight)) for v in (z, expected))
    torch.testing.assert_close(found, right, rtol=0, atol=1e-10)
    logp = (hidden @ weight.mT).log_softmax(-1).gather(1, ids)
    torch.testing.assert_close(z[:, 0] - z[:, 1], logp[:, 0] - logp[:, 1], rtol=0, atol=1e-10)
