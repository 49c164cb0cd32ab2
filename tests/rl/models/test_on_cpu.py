"""A model tuned for the CPU computes what the library's does."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from scalerl.cli.compose import compose
from scalerl.kernels import linear
from scalerl.kernels.linear import Linear, replace_linear_layers
from scalerl.kernels.rms_norm import fuse_rms_norms
from scalerl.rl.trainer import Trainer

from ..test_packing import build


@pytest.mark.parametrize("kind", ["llama", "qwen3", "sliding", "moe"])
def test_states_and_gradients_are_the_librarys(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_LEAST", 0)
    monkeypatch.setattr(linear, "onednn_pays", lambda: hasattr(torch.ops.mkldnn, "_linear_pointwise"))
    plain = build(kind)
    tuned = copy.deepcopy(plain)
    ids = torch.arange(14).view(2, 7) % 12
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    torch.manual_seed(0)
    direction = torch.randn(2, 7, 12) * mask[..., None]

    def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
        logits = model(input_ids=ids, attention_mask=mask).logits
        (logits * direction).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        return [logits.detach() * mask[..., None], *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = gradients(plain)
    replace_linear_layers(tuned)
    fuse_rms_norms(tuned)
    assert sum(type(module) is Linear for module in tuned.modules()) >= 9
    for found, wanted in zip(gradients(tuned), expected, strict=True):
        assert (found - wanted).norm() <= 1e-5 * max(1.0, float(wanted.norm()))


def test_the_trainer_tunes_its_policy_and_its_reference(moe_folder: Path, tmp_path: Path) -> None:
    overrides = ["model=hf", f"model.path={moe_folder}", "recipe.kl=k3_as_loss"]
    trainer = Trainer(compose(overrides, run_dir=str(tmp_path)).config, moe_folder)
    assert trainer._reference is not None
    for policy in (trainer.policy, trainer._reference):
        assert type(policy.model.model.norm).__qualname__.startswith("_fused")
