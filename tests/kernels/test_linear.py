"""oneDNN's products: those of torch with their gradients, and only where fp32 on a CPU asks for them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scalerl.kernels import linear as module
from scalerl.kernels.linear import Linear, add_product, linear, replace_linear_layers

HAS_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise")
needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="this torch was built without oneDNN")


@pytest.fixture(autouse=True)
def onednn_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "onednn_pays", lambda: HAS_ONEDNN)
    monkeypatch.setattr(module, "_LEAST", 0)


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n_in", "n_out"), [(24, 40), (40, 24), (1, 3)])
@pytest.mark.parametrize("shape", [(), (7,), (2, 5), (1, 1, 1)])
def test_products_and_gradients_are_those_of_float64(shape: Any, n_in: int, n_out: int, bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(*shape, n_in), torch.randn(n_out, n_in)
    operands = [x, weight, torch.randn(n_out)] if bias else [x, weight]
    direction = torch.randn(*shape, n_out)
    given = [operand.clone().requires_grad_() for operand in operands]
    wide = [operand.double().requires_grad_() for operand in operands]
    found, expected = linear(*given), F.linear(*wide)
    assert type(found.grad_fn).__name__ == "_LinearBackward"
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(found, given, direction)
    for gradient, exact in zip(gradients, torch.autograd.grad(expected, wide, direction.double()), strict=True):
        torch.testing.assert_close(gradient.double(), exact, rtol=1e-5, atol=1e-5)


@needs_onednn
def test_by_hand_and_on_views() -> None:
    """A transposed input, whose rows aren't contiguous, and a gradient that is one number in a whole tensor."""
    x = torch.tensor([[1.0, 5.0], [2.0, 7.0]]).T.requires_grad_()  # rows (1, 2) and (5, 7)
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    y = linear(x, weight)
    assert y.tolist() == [[5.0, 11.0], [19.0, 43.0]]
    d_x, d_weight = torch.autograd.grad(y.sum(), (x, weight))
    assert d_x.tolist() == [[4.0, 6.0], [4.0, 6.0]]
    assert d_weight.tolist() == [[6.0, 9.0], [6.0, 9.0]]


@needs_onednn
def test_frozen_operands_get_no_gradient() -> None:
    for learns in range(3):
        operands = [torch.randn(2, 4), torch.randn(3, 4), torch.randn(3)]
        operands[learns].requires_grad_()
        linear(*operands).sum().backward()
        assert [operand.grad is not None for operand in operands] == [i == learns for i in range(3)]


@pytest.mark.parametrize("case", ["float64", "bfloat16", "autocast", "empty", "small", "no gain"])
def test_anything_else_is_torchs(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "small":
        monkeypatch.setattr(module, "_LEAST", 13)
    if case == "no gain":
        monkeypatch.setattr(module, "onednn_pays", lambda: False)
    dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(case, torch.float32)
    x, weight = torch.randn(0 if case == "empty" else 2, 4, dtype=dtype), torch.randn(3, 4, dtype=dtype)
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        found, expected = linear(x, weight), F.linear(x, weight)
    assert torch.equal(found, expected) and found.dtype == expected.dtype
    assert "_Linear" not in type(found.grad_fn).__name__


@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize(
    ("sums", "operands"), [("float32", "float32"), ("float32", "bfloat16"), ("float64", "float64")]
)
def test_a_product_is_added_in_place(sums: str, operands: str, pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "onednn_pays", lambda: pays and HAS_ONEDNN)
    a, b = (torch.randint(-3, 4, shape).to(getattr(torch, operands)) for shape in ((5, 2), (2, 3)))
    into = torch.randint(-3, 4, (5, 3)).to(getattr(torch, sums))
    expected = into.double() + a.double() @ b.double()
    add_product(into, a, b)
    assert torch.equal(into.double(), expected)
    add_product(into[:, 1:], a, b[:, 1:])  # views
    assert torch.equal(into[:, 1:].double(), (expected + a.double() @ b.double())[:, 1:])


def test_a_models_linear_layers_are_replaced() -> None:
    class Other(nn.Linear):
        pass

    model = nn.ModuleDict({"plain": nn.Linear(4, 3), "other": Other(4, 3), "norm": nn.LayerNorm(4)})
    x, keys = torch.randn(2, 4), list(model.state_dict())
    before = model["plain"](x)
    replace_linear_layers(model)
    assert [type(module) for module in model.values()] == [Linear, Other, nn.LayerNorm]
    torch.testing.assert_close(model["plain"](x), before)
    assert list(model.state_dict()) == keys and type(copy.deepcopy(model)["plain"]) is Linear
