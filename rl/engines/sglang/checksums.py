"""Whether servers hold the weights that they were sent: their own checksums, against the sender's and one another's."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# SGLang joins these tensors to one, and fills a vocabulary up with zeros to a multiple of _PADDING.
_JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_VOCABULARY, _PADDING = ("embed_tokens", "lm_head"), 64


def read_checksums(answer: Any) -> list[dict[str, str]]:
    """By tensor, of each rank of a server, from its answer of /weights_checker. Raises ValueError."""
    try:
        return [dict(rank["checksums"]) for rank in answer["ranks"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"/weights_checker answers no checksums ({error!r}): {str(answer)[:80]}") from None


def checksum(tensor: Tensor) -> str:
    """As SGLang has it of a tensor on the CPU: the first 8 bytes of SHA-256 over its bytes, in hexadecimal."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).digest()[:8].hex()


def difference(
    servers: Sequence[tuple[str, list[dict[str, str]]]], state: Mapping[str, Tensor], dtype: torch.dtype, device: str
) -> tuple[int, str] | None:
    """The first server whose weights aren't `state` in `dtype`, and in words how they differ; None where all agree.

    servers: name and checksums. On GPUs SGLang's hash is a kernel of its own, and on several ranks a server holds parts
    of tensors: there the servers are compared with the first one only. Raises ValueError where nothing can be."""
    reference, whose = servers[0][1], servers[0][0]
    alone = device == "cpu" and len(reference) == 1
    if alone:
        whose, reference = "the trainer's", [_own(reference[0], state, dtype)]
        if not reference[0]:
            raise ValueError("none of the server's tensors is known here by its name: weights can't be compared")
    elif len(servers) == 1:
        raise ValueError("of one server on GPUs, or on several ranks, weights can't be compared")
    for number, (_, ranks) in enumerate(servers):
        for rank, (mine, theirs) in enumerate(zip(reference, ranks, strict=True)):
            for name, expected in mine.items():
                if theirs.get(name) != expected:
                    return number, f"rank {rank} has {name} with checksum {theirs.get(name)}, {whose} is {expected}"
    return None


def _own(server: Mapping[str, str], state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, str]:
    """Checksums of those of a server's tensors that can be made of ours."""
    found = {}
    for name in server:
        tensor = _as_served(name, state, dtype)
        if tensor is not None:
            found[name] = checksum(tensor)
    return found


def _as_served(name: str, state: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor | None:
    stem, _, kind = name.rpartition(".")
    leaf = stem.rpartition(".")[2]
    parts = [f"{stem.removesuffix(leaf)}{part}.{kind}" for part in _JOINED.get(leaf, (leaf,))]
    if not all(part in state for part in parts):
        return None
    whole = torch.cat([state[part].detach().to("cpu", dtype) for part in parts])
    if leaf in _VOCABULARY:
        whole = torch.nn.functional.pad(whole, (0, 0, 0, -len(whole) % _PADDING))
    return whole
