"""The Triton kernels against the torch reference: on a GPU where there is one, else under Triton's interpreter.

Tolerances: in values 2e-6 times the largest logit (at least 1), which is fp32 rounding, also for bf16 tensors, whose
products are exact and sums fp32; 1e-5 of the gradient's norm, and 0.01 of it where the gradient to the logits is
rounded to bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from scalerl.kernels import logprob as module
from scalerl.kernels import logprob_triton
from scalerl.kernels.logprob import token_logprobs, token_logprobs_reference

T, H, V = 19, 20, 75
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, splits and tiles, each with a ragged end."""
    monkeypatch.setattr(module, "_tiles", lambda hidden: logprob_triton)
    monkeypatch.setattr(logprob_triton, "BLOCK", (16, 16, 16))
    monkeypatch.setattr(logprob_triton, "SPLIT", 32)
    monkeypatch.setattr(logprob_triton, "VOCABULARY_TILE", 48)


def problem(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, H, generator=generator).div(2).to(DEVICE, dtype) for n in (T, V))
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, V, (T,), generator=generator).to(DEVICE)


def kept_sets(targets: Tensor) -> Tensor:
    """Ragged sets of 1 to 9 ids that hold the target, unsorted, padded with -1; one is the target's neighbours."""
    sets = torch.full((len(targets), 9), -1)
    for t, target in enumerate(targets.tolist()):
        order = torch.randperm(V, generator=torch.Generator().manual_seed(t)).tolist()
        others = [v for v in (range(60, V) if t == 5 else order) if v != target]
        sets[t, : t % 9 + 1] = torch.tensor([*others[: t % 9], target])
    return sets.to(targets.device)


def check(hidden: Tensor, weight: Tensor, targets: Tensor, gradient_tolerance: float, **settings: Any) -> None:
    """Values and gradients against the reference on the same numbers in float64."""
    with_entropy, chunk = settings.pop("with_entropy", True), settings.pop("chunk", 7)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    wanted, wanted_entropy = token_logprobs_reference(exact[0], exact[1], targets, **settings)
    logp, entropy = token_logprobs(hidden, weight, targets, chunk=chunk, with_entropy=with_entropy, **settings)
    assert logp.dtype == torch.float32
    largest = (exact[0] @ exact[1].mT).abs().max().item() / settings.get("temperature", 1.0)
    tolerance = 2e-6 * max(1.0, largest)
    torch.testing.assert_close(logp.double(), wanted, rtol=0, atol=tolerance)
    a, b = torch.randn(2, len(targets), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    value, right = (a * logp).sum(), (a * wanted).sum()
    if with_entropy:
        assert entropy is not None
        torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=0, atol=tolerance)
        value, right = value + (b * entropy).sum(), right + (b * wanted_entropy).sum()
    pairs = zip(torch.autograd.grad(value, (hidden, weight)), torch.autograd.grad(right, exact), strict=True)
    for (found, expected), given in zip(pairs, (hidden, weight), strict=True):
        assert found.dtype == given.dtype
        assert (found.double() - expected).norm() <= gradient_tolerance * expected.norm()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients(masked: bool, with_entropy: bool, temperature: float) -> None:
    hidden, weight, targets = problem()
    kept = kept_sets(targets) if masked else None
    check(hidden, weight, targets, 1e-5, kept=kept, with_entropy=with_entropy, temperature=temperature)


@pytest.mark.parametrize("chunk", [1, 16, 4096])
def test_chunks(chunk: int) -> None:
    hidden, weight, targets = problem(seed=1)
    check(hidden, weight, targets, 1e-5, kept=kept_sets(targets), chunk=chunk)


@pytest.mark.parametrize("kept_alone", [False, True])
def test_one_token_and_a_set_of_one(kept_alone: bool) -> None:
    hidden, weight, targets = problem(seed=2)
    kept = targets[:1, None] if kept_alone else None
    check(hidden.detach()[:1].requires_grad_(), weight, targets[:1], 1e-5, kept=kept)


def test_large_logits() -> None:
    """Differences of a hundred, where a sum of plain exponentials would overflow; their rounding is in the gradient."""
    hidden, weight, targets = problem(seed=3)
    check((hidden.detach() * 30).requires_grad_(), weight, targets, 2e-4)


@pytest.mark.parametrize("body", [torch.float32, torch.bfloat16])
def test_bfloat16_tensors_under_a_float32_head(body: torch.dtype) -> None:
    """Weights of either dtype under a bf16 body: the logits aren't rounded."""
    hidden, weight, targets = problem(torch.bfloat16)
    check(hidden, weight.detach().to(body).requires_grad_(), targets, 0.01, kept=kept_sets(targets))


def test_a_bfloat16_head_rounds_its_logits() -> None:
    """To a last bit of the largest one: where a GPU rounds to the nearest number, the interpreter cuts off."""
    hidden, weight, targets = problem()
    settings: dict[str, Any] = {"head_dtype": torch.bfloat16}
    found = token_logprobs(hidden, weight, targets, with_entropy=True, **settings)
    expected = token_logprobs_reference(hidden, weight, targets, **settings)
    exact = token_logprobs_reference(hidden, weight, targets)
    bit = float((hidden @ weight.mT).detach().abs().max()) * 2**-7
    for ours, right, unrounded in zip(found, expected, exact, strict=True):
        assert ours is not None
        assert (ours - right).abs().max() < bit
        assert (ours - unrounded).abs().max() > 1e-3
    wanted = torch.autograd.grad(exact[0].sum(), (hidden, weight))
    for ours, right in zip(torch.autograd.grad(found[0].sum(), (hidden, weight)), wanted, strict=True):
        assert (ours - right).norm() < 0.04 * right.norm()


def test_no_tokens() -> None:
    hidden, weight, targets = (t.detach() for t in problem())
    hidden, weight = hidden[:0].requires_grad_(), weight.requires_grad_()
    logp, entropy = token_logprobs(hidden, weight, targets[:0], with_entropy=True)
    assert entropy is not None and logp.shape == entropy.shape == (0,)
    (logp.sum() + entropy.sum()).backward()
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_gpu_takes_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    hidden, weight, targets = problem(torch.bfloat16)
    assert module._tiles(hidden) is logprob_triton
    check(hidden, weight, targets, 0.01, kept=kept_sets(targets))
