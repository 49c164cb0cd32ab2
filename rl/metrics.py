"""Metrics that carry their reduction as a type: partial results of micro-batches and ranks merge into the step's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor


class Metric(Protocol):
    def merge(self, other: Any) -> Any: ...

    def compute(self) -> Any: ...


@dataclass(frozen=True)
class Mean:
    """A mean over everything that was counted; None where nothing was."""

    total: float
    count: float

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Self:
        """Mean of `values` [T] over the tokens of `mask` [T] bool."""
        return cls(float(values.detach()[mask].sum(dtype=torch.float64)), int(mask.sum()))

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def compute(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(frozen=True)
class Variance:
    """Population variance over everything that was counted; None where nothing was. Merged without cancellation."""

    count: int
    mean: float
    squares: float  # sum of squared deviations from the mean

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Self:
        chosen = values.detach()[mask].double()
        mean = float(chosen.mean()) if len(chosen) else 0.0
        return cls(len(chosen), mean, float((chosen - mean).square().sum()))

    def merge(self, other: Variance) -> Variance:
        count = self.count + other.count
        if not count:
            return self
        delta = other.mean - self.mean
        mean = self.mean + delta * other.count / count
        return Variance(count, mean, self.squares + other.squares + delta**2 * self.count * other.count / count)

    def compute(self) -> float | None:
        return self.squares / self.count if self.count else None


@dataclass(frozen=True)
class Max:
    """The largest value; None where there was none."""

    value: float | None

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Self:
        chosen = values.detach()[mask]
        return cls(float(chosen.max()) if len(chosen) else None)

    def merge(self, other: Max) -> Max:
        values = [v for v in (self.value, other.value) if v is not None]
        return Max(max(values) if values else None)

    def compute(self) -> float | None:
        return self.value


@dataclass(frozen=True)
class Histogram:
    """Counts of whole numbers, by value."""

    counts: Counter[int]

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Self:
        return cls(Counter(values[mask].tolist()))

    def merge(self, other: Histogram) -> Histogram:
        return Histogram(self.counts + other.counts)

    def compute(self) -> dict[int, int]:
        return dict(sorted(self.counts.items()))

    def quantile(self, share: float) -> int | None:
        """The smallest value that at least `share` of the counts do not exceed."""
        seen, needed = 0, share * self.counts.total()
        for value, count in sorted(self.counts.items()):
            seen += count
            if seen >= needed:
                return value
        return None


@dataclass
class Metrics:
    """Named metrics that merge name by name."""

    items: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, metric: Metric) -> None:
        self.items[name] = self.items[name].merge(metric) if name in self.items else metric

    def update(self, metrics: dict[str, Metric]) -> None:
        for name, metric in metrics.items():
            self.add(name, metric)

    def compute(self) -> dict[str, Any]:
        return {name: metric.compute() for name, metric in self.items.items()}
