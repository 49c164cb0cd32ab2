"""What a person sees while a run works: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

_PLAIN_EVERY = 10.0  # seconds between plain lines


class Progress:
    """Shows step, pass rate, reward, entropy, lag, truncation, tokens/s, idle shares so far and the time left."""

    def __init__(self, steps: int, first_step: int = 0) -> None:
        self._steps, self._first = steps, first_step
        self._console = Console(file=sys.stderr)
        self._live: Live | None = None
        self._start = time.monotonic()
        self._last_line = -_PLAIN_EVERY
        self._pass_rates: list[float] = []

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def evaluation(self, row: Mapping[str, Any]) -> None:
        if row["set"] == "held_out":
            self._pass_rates.append(row["pass_rate"])
        within = row["stderr_within"]
        margin = "" if within is None else f" ± {within:.3f}"
        self._console.print(
            f"step {row['step']:>5}  {row['set']} pass rate {row['pass_rate']:.3f}{margin}"
            f"  ({row['device_hours'] * 3600:.0f} device-seconds)",
            highlight=False,
        )

    def step(self, row: Mapping[str, Any]) -> None:
        now = time.monotonic()
        fields = self._fields(row, now)
        if self._live is not None:
            table = Table.grid(padding=(0, 2))
            table.add_row(*(f"[dim]{k}[/dim] {v}" for k, v in fields.items()))
            self._live.update(table)
        elif now - self._last_line >= _PLAIN_EVERY:
            self._last_line = now
            self._console.print("  ".join(f"{k} {v}" for k, v in fields.items()), highlight=False)

    def warn(self, message: str) -> None:
        self._console.print(f"[yellow]warning:[/yellow] {message}", highlight=False)

    def _fields(self, row: Mapping[str, Any], now: float) -> dict[str, str]:
        done = row["step"] - self._first
        left = (now - self._start) / max(done, 1) * (self._steps - row["step"])
        return {
            "step": f"{row['step']}/{self._steps}",
            "held-out": f"{self._pass_rates[-1]:.3f}" if self._pass_rates else "-",
            "reward": _number(row.get("reward_mean"), "+.3f"),
            "entropy": _number(row.get("entropy"), ".3f"),
            "lag": _number(row.get("lag_mean"), ".1f"),
            "truncated": _number(row.get("truncation_rate"), ".1%"),
            "tokens/s": _number(row.get("tokens_per_second"), ",.0f"),
            "idle": f"generator {row['generator_idle']:.0%} trainer {row['trainer_idle']:.0%}",
            "left": f"{int(left // 60)}:{int(left % 60):02d}",
        }


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
