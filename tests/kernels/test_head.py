"""The head's product runs in the precision asked for and comes back in float32."""

from __future__ import annotations

import torch

from scalerl.kernels.head import head_logits


def test_precision_of_the_product():
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 5, 64), torch.randn(31, 64)
    exact = (hidden.double() @ weight.double().T).float()
    torch.testing.assert_close(head_logits(hidden, weight, torch.float32), exact, rtol=0, atol=1e-4)
    coarse = head_logits(hidden, weight, torch.bfloat16)
    assert coarse.dtype == torch.float32 and torch.equal(coarse, coarse.bfloat16().float())
    assert 1e-3 < (coarse - exact).abs().max() < 0.5


def test_a_wide_head_does_not_round_a_narrow_bodys_logits():
    hidden, weight = torch.randn(4, 64).bfloat16(), torch.randn(31, 64).bfloat16()
    logits = head_logits(hidden, weight, torch.float32)
    assert not torch.equal(logits, logits.bfloat16().float())
    torch.testing.assert_close(logits, hidden.float() @ weight.float().T)
