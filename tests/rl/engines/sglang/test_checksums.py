"""Servers' checksums against tensors made by hand."""

from __future__ import annotations

import hashlib

import pytest
import torch

from scalerl.rl.engines.sglang.checksums import checksum, difference, read_checksums

Q, K, V = torch.ones(2, 3), torch.zeros(1, 3), torch.full((1, 3), 2.0)
STATE = {
    "model.embed_tokens.weight": torch.ones(2, 3),
    "model.layers.0.self_attn.q_proj.weight": Q,
    "model.layers.0.self_attn.k_proj.weight": K,
    "model.layers.0.self_attn.v_proj.weight": V,
    "model.norm.weight": torch.ones(3),
}
QKV = "model.layers.0.self_attn.qkv_proj.weight"


def served(dtype=torch.float32, **changed):
    tensors = {
        "model.embed_tokens.weight": torch.cat([torch.ones(2, 3), torch.zeros(62, 3)]),
        QKV: torch.cat([Q, K, V]),
        "model.norm.weight": torch.ones(3),
        "model.something.of_the_servers": torch.ones(1),
    }
    return [{name: checksum(tensor.to(dtype)) for name, tensor in tensors.items()} | changed]


def test_a_checksum_is_eight_bytes_of_a_digest():
    assert checksum(torch.tensor([1.0])) == hashlib.sha256(b"\x00\x00\x80\x3f").hexdigest()[:16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined_and_padded_tensors_are_compared(dtype):
    servers = [("a", served(dtype)), ("b", served(dtype))]
    assert difference(servers, STATE, dtype, "cpu") is None
    servers[1] = "b", served(dtype, **{QKV: "0"})
    assert difference(servers, STATE, dtype, "cpu") == (
        1,
        f"rank 0 has {QKV} with checksum 0, the trainer's is {served(dtype)[0][QKV]}",
    )


def test_elsewhere_servers_are_compared_with_one_another():
    first, second = [{"a": "1"}, {"a": "2"}], [{"a": "1"}, {"a": "3"}]
    assert difference([("x", first), ("y", first)], STATE, torch.float32, "cuda") is None
    assert difference([("x", first), ("y", second)], STATE, torch.float32, "cpu") == (
        1,
        "rank 1 has a with checksum 3, x is 2",
    )
    with pytest.raises(ValueError, match="of one server on GPUs, or on several ranks"):
        difference([("x", first)], STATE, torch.float32, "cpu")


def test_what_can_not_be_compared_is_said():
    with pytest.raises(ValueError, match="none of the server's tensors is known here"):
        difference([("x", [{"transformer.wte": "1"}])], STATE, torch.float32, "cpu")
    with pytest.raises(ValueError, match="answers no checksums"):
        read_checksums({"success": True, "message": "Success."})
