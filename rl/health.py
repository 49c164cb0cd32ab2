"""Alarms: signs that a run is about to fail, each warned about once and named in the log of every step that has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from scalerl.rl.config import Alarms


class _Sign(NamedTuple):
    """The alarm `name` is on where the step's `column` is above its threshold (below, for `entropy`)."""

    name: str
    column: str
    says: str


# The engine's mismatch is judged on tokens of the current weights, since on the others it holds the schedule's lag too.
SIGNS = (
    _Sign("truncation", "truncation_rate", "{value:.1%} of completions truncated, above {threshold:.1%}"),
    _Sign(
        "truncation_unstable",
        "truncation_rate",
        "{value:.1%} of completions truncated, above {threshold:.1%}, where training is known to destabilise; raise "
        "recipe.generation_budget",
    ),
    _Sign("entropy", "entropy", "entropy {value:.4f} nats a token, below {threshold:g}: the policy has collapsed"),
    _Sign(
        "mismatch_k3",
        "mismatch_k3_current",
        "KL of the engine to the trainer {value:.2e} under the same weights, above {threshold:.1e}",
    ),
    _Sign(
        "extreme_share",
        "extreme_share",
        "{value:.1%} of tokens have a probability ratio beyond 2, above {threshold:.1%}",
    ),
    _Sign("grad_norm", "grad_norm", "gradient norm {value:.3g} before clipping, above {threshold:g}"),
)


class Health:
    """Compares each step with the thresholds of `trainer.alarms`; `warn` gets one line at an alarm's first step."""

    def __init__(self, alarms: Alarms, warn: Callable[[str], None]) -> None:
        self._alarms, self._warn = alarms, warn
        self._warned: set[str] = set()

    def check(self, row: Mapping[str, Any]) -> list[str]:
        """Names of the alarms that the step's metrics set off."""
        found = []
        for sign in SIGNS:
            threshold, value = getattr(self._alarms, sign.name), row.get(sign.column)
            if threshold is None or value is None:
                continue
            if value < threshold if sign.name == "entropy" else value > threshold:
                found.append(sign.name)
                if sign.name not in self._warned:
                    self._warned.add(sign.name)
                    said = sign.says.format(value=value, threshold=threshold)
                    self._warn(f"step {row['step']}: {said} (trainer.alarms.{sign.name})")
        return found
