"""Keys and values of the rows that decode together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

GROWTH = 64  # capacity grows to a multiple of it, so that ever longer prompts do not each copy the cache


class LayerShape(NamedTuple):
    heads: int
    key_dim: int
    value_dim: int


class KVCache:
    """Per layer a key and a value tensor [rows, heads, capacity, dim]; position p of row r is at [r, :, p].

    Entries beyond a row's length are masked by the reader, but their values are multiplied by a zero weight, so they
    must be finite: memory starts zeroed, and what rows leave behind is finite.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], rows: int, capacity: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.rows = rows
        self.capacity = capacity
        self.layers = [
            (
                torch.zeros(rows, shape.heads, capacity, shape.key_dim, dtype=dtype, device=device),
                torch.zeros(rows, shape.heads, capacity, shape.value_dim, dtype=dtype, device=device),
            )
            for shape in shapes
        ]

    def reserve(self, capacity: int) -> None:
        """Grows every row to hold at least `capacity` tokens."""
        if capacity <= self.capacity:
            return
        capacity = -(-capacity // GROWTH) * GROWTH
        grow = (0, 0, 0, capacity - self.capacity)
        self.layers = [
            (torch.nn.functional.pad(keys, grow), torch.nn.functional.pad(values, grow)) for keys, values in self.layers
        ]
        self.capacity = capacity

    def copy_rows(self, rows: torch.Tensor, source: KVCache, source_rows: torch.Tensor, length: int) -> None:
        """Rows `source_rows` of `source`, up to `length`, become the rows `rows` of this cache (both int64 [k])."""
        for mine, theirs in zip(self.layers, source.layers, strict=True):
            for target, tensor in zip(mine, theirs, strict=True):
                target[rows, :, :length] = tensor[source_rows, :, :length]

    def snapshot(self, rows: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies on the CPU of the first `rows` rows up to `length`."""
        return [
            (
                keys[:rows, :, :length].to("cpu", copy=True),
                values[:rows, :, :length].to("cpu", copy=True),
            )
            for keys, values in self.layers
        ]

    def restore(self, snapshot: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Writes a snapshot back to the first rows."""
        for mine, theirs in zip(self.layers, snapshot, strict=True):
            for target, tensor in zip(mine, theirs, strict=True):
                target[: tensor.shape[0], :, : tensor.shape[2]] = tensor.to(target.device)
