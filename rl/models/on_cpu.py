"""A model that trains on a CPU: the library's mathematics in less time."""

from __future__ import annotations

from torch import nn

from scalerl.kernels.linear import replace_linear_layers
from scalerl.kernels.rms_norm import fuse_rms_norms


def tune_for_cpu(model: nn.Module) -> None:
    """Faster fp32 linear layers and norms, in place."""
    replace_linear_layers(model)
    fuse_rms_norms(model)
