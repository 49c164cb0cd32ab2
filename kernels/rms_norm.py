"""Root mean square normalisation with its gradient written out, in fewer passes over the activations than autograd
takes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension (Zhang and Sennrich, arXiv 1910.07467, as Llama has
    it).

    x: [..., H]; weight: [H], of x's dtype; returns [..., H]. With r the root, y = x / r, and g the gradient of the
    result, those of x and weight are (g w - y mean(g w y)) / r and sum(g y)."""
    return _RMSNorm.apply(x, weight, eps)


def fuse_rms_norms(model: nn.Module) -> None:
    """Let the norms of a Hugging Face model that compute `rms_norm` do it by this function, in place, where they stand
    on a CPU in fp32. Others, such as Gemma's with its 1 + weight, stay as they are."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon") and _is_plain(module):
            module.__class__ = _fused(type(module))


@torch.no_grad()
def _is_plain(module: Any) -> bool:
    x = torch.linspace(-1, 2, 2 * len(module.weight)).view(2, -1)
    return torch.allclose(module(x), rms_norm(x, module.weight, module.variance_epsilon))


@functools.cache
def _fused(kind: type[Any]) -> type[nn.Module]:
    class Fused(kind):
        def forward(self, hidden_states: Tensor) -> Tensor:
            if hidden_states.is_cpu and hidden_states.dtype == self.weight.dtype == torch.float32:
                return rms_norm(hidden_states, self.weight, self.variance_epsilon)
            return super().forward(hidden_states)

    return Fused


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        inverse = square.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        x, g = (tensor.reshape(-1, len(weight)) for tensor in (x, gradients[0]))
        inverse = inverse.reshape(-1, 1)
        along = g * x
        d_weight = along.mT @ inverse[:, 0]
        share = (along @ weight)[:, None].mul_(inverse**3).div_(len(weight))
        d_x = (g * weight).mul_(inverse).addcmul_(x, share, value=-1)
        return d_x.view_as(gradients[0]), d_weight, None
