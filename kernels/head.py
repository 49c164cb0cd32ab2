"""The language-model head, in one place so that generator and trainer round alike."""

from __future__ import annotations

import torch

from scalerl.kernels.linear import linear


def head_logits(hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Logits `hidden @ weight.T`, multiplied in `dtype` and returned in float32 (float64 stays).

    A head in float32 under a bfloat16 body keeps generator and trainer log-probabilities close (MiniMax-M1, arXiv
    2506.13585; ScaleRL, arXiv 2510.13786, section 3.2).

    hidden: [..., d]; weight: [V, d]; returns [..., V].
    """
    logits = linear(hidden.to(dtype), weight.to(dtype))
    return logits if dtype == torch.float64 else logits.float()
