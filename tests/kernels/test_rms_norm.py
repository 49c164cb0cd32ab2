"""The written-out gradient of the root mean square norm, and which of a model's norms take it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from scalerl.kernels.rms_norm import fuse_rms_norms, rms_norm


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (6,)])
def test_gradient_is_the_finite_difference(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, weight))


def test_by_hand() -> None:
    """x = (1, 7) has the root 5; the gradient (1, 0) gives mean(g w y) = 0.2, so dx = (2 - 0.2 * 0.2, -0.2 * 1.4) / 5
    with w = (2, 3), where mean(g w y) = 2 * 0.2 / 2."""
    x = torch.tensor([[1.0, 7.0]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    y = rms_norm(x, weight, 0.0)
    torch.testing.assert_close(y, torch.tensor([[0.4, 4.2]], dtype=torch.float64))
    y[0, 0].backward()
    assert x.grad is not None and weight.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([[1.96 / 5, -0.28 / 5]], dtype=torch.float64))
    torch.testing.assert_close(weight.grad, torch.tensor([0.2, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
def test_the_librarys_norms_are_replaced_and_equal(kind: type[Any]) -> None:
    torch.manual_seed(0)
    plain = kind(16)
    nn.init.normal_(plain.weight)
    fused = copy.deepcopy(plain)
    fuse_rms_norms(nn.Sequential(fused))
    x, direction = torch.randn(2, 3, 16, requires_grad=True), torch.randn(2, 3, 16)
    found = fused(x)
    assert type(found.grad_fn).__name__ == "_RMSNormBackward"
    gradients = torch.autograd.grad(found, (x, fused.weight), direction)
    expected = plain(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (x, plain.weight), direction))
    narrow = fused.to(torch.bfloat16)(x.detach().bfloat16())
    assert torch.equal(narrow, plain.to(torch.bfloat16)(x.detach().bfloat16()))
    assert fused.state_dict().keys() == plain.state_dict().keys() and isinstance(copy.deepcopy(fused), kind)


def test_other_norms_stay() -> None:
    class ShiftedRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states + super().forward(hidden_states)

    norms = nn.Sequential(Gemma2RMSNorm(8), ShiftedRMSNorm(8), nn.LayerNorm(8))
    fuse_rms_norms(norms)
    assert [type(norm) for norm in norms] == [Gemma2RMSNorm, ShiftedRMSNorm, nn.LayerNorm]
