"""fp32 products on a CPU through oneDNN.

torch's own go to MKL, which leaves AVX-512 alone on processors that are not Intel's: oneDNN, which torch brings too,
is faster there (`scripts/bench/cpu_update.py`; `logprob_memory.py` with and without `--mkl`). Both add up in fp32."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Elements of the second operand: oneDNN makes code for each new shape, which smaller ones don't earn back.
_LEAST = 8192


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: x @ weight.T + bias, with its gradients. x: [..., K]; weight: [N, K]; bias: [N]; returns [..., N]."""
    if not _through_onednn(x, weight):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)


@torch.no_grad()
def add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into += a @ b, in place. into: [M, N], at least as wide as the product; a: [M, K]; b: [K, N]."""
    if _through_onednn(a, b):
        into += _onednn(a, b.mT)
    elif into.dtype == a.dtype:
        into.addmm_(a, b)
    else:
        into += a @ b


class Linear(nn.Linear):
    """`nn.Linear` by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def replace_linear_layers(model: nn.Module) -> None:
    """Let the model's linear layers be `Linear`, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


@functools.cache
def onednn_pays() -> bool:
    """Whether this machine has AVX-512 in a processor that MKL doesn't use it on, and this torch has the operator."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkl.is_available():
        return False
    info = Path("/proc/cpuinfo")
    intel = not info.is_file() or "GenuineIntel" in info.read_text()
    return not intel and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _through_onednn(x: Tensor, weight: Tensor) -> bool:
    on_cpu = x.is_cpu and x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return on_cpu and weight.numel() >= _LEAST and x.numel() > 0 and onednn_pays()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (g,) = gradients
        # Contiguous, so that a layer's backward product can be another's forward one.
        d_x = _onednn(g, weight.mT.contiguous()) if ctx.needs_input_grad[0] else None
        x, g = x.reshape(-1, weight.shape[1]), g.reshape(-1, len(weight))
        d_weight = None
        if ctx.needs_input_grad[1]:
            # oneDNN makes the first operand contiguous: the narrower one costs less.
            narrow = len(weight) <= weight.shape[1]
            d_weight = _onednn(g.mT, x.mT) if narrow else _onednn(x.mT, g.mT).mT
        return d_x, d_weight, g.sum(0) if ctx.needs_input_grad[2] else None


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] @ weight.T [K, N] + bias [N]."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
