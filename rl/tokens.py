"""The tokens of one micro-batch, flat: what losses, corrections and KL terms read."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """T completion tokens of N whole completions (a sequence-level quantity never needs another micro-batch).

    logp_gen [T]: reported by the generator when it sampled the token. logp_old [T]: the trainer's under theta_b, its
    weights before the batch's first update. logp_ref [T]: the reference's. advantage [T]: its completion's. mask [T]
    bool: sampled by the policy and trained. weight [T]: the aggregation's, already divided by the global counts; 0
    where masked. completion [T] int64 in 0..N-1. versions [T] int64. kl_beta [T]. policy_keep [T] bool: clip_cov's
    choice. kl_cov [T] bool: kl_cov's."""

    logp_gen: Tensor
    advantage: Tensor
    mask: Tensor
    weight: Tensor
    completion: Tensor
    n_completions: int
    versions: Tensor
    kl_beta: Tensor
    trainer_ratio: bool = False
    logp_old: Tensor | None = None
    logp_ref: Tensor | None = None
    policy_keep: Tensor | None = None
    kl_cov: Tensor | None = None

    @property
    def logp_base(self) -> Tensor:
        """Denominator of the importance ratio [T]: the generator's log-probability, or under `ratio=trainer_old` the
        trainer's own before the batch's first update."""
        if not self.trainer_ratio:
            return self.logp_gen
        assert self.logp_old is not None, "ratio=trainer_old needs a pass under theta_b"
        return self.logp_old

    def part(self, rows: slice) -> Tokens:
        """Some of the tokens, which may be parts of completions only."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value[rows] for name, value in values.items() if isinstance(value, Tensor)})

    def log_ratio(self, logp: Tensor) -> Tensor:
        """log rho [T]; 0 on masked tokens, whose generator log-probability means nothing."""
        return self.unmasked(logp - self.logp_base)

    def unmasked(self, values: Tensor) -> Tensor:
        """values [T], 0 where masked."""
        return torch.where(self.mask, values, torch.zeros_like(values))

    def completion_sum(self, values: Tensor) -> Tensor:
        """Sum over the unmasked tokens of each completion, given to every token of it: [T] -> [T]."""
        sums = values.new_zeros(self.n_completions)
        return sums.index_add(0, self.completion, self.unmasked(values))[self.completion]

    def completion_mean(self, values: Tensor) -> Tensor:
        """Mean over the unmasked tokens of each completion, given to every token of it: [T] -> [T]."""
        return self.completion_sum(values) / self.completion_sum(torch.ones_like(values)).clamp(min=1)
