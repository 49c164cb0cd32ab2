"""The compute ledger: every axis that a run can be plotted against."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class FlopModel:
    """FLOPs of a forward pass: 2N + 4 L d context a token, with N the active parameters without the embedding table but
    with the head, L layers of attention width d (heads x head size). Recomputation is not counted."""

    n_active: int
    layers: int
    width: int

    def forward(self, tokens: float, context: float) -> float:
        """`tokens` tokens whose contexts sum to `context` (a token's context: itself and all before it)."""
        return 2.0 * self.n_active * tokens + 4.0 * self.layers * self.width * context

    def sequence(self, length: int) -> float:
        """One sequence of `length` tokens from its start."""
        return self.forward(length, length * (length + 1) / 2)


@dataclass
class Ledger:
    """Cumulative through the run and its resumes. Hours are wall hours times devices; on a CPU a process is a device.

    train_tokens: put through backward, prompts included. generated_tokens: of completions, those in flight included.
    samples: completions of the trained batches. device_hours: training alone, idle time and the moving of weights to
    the generator included; evaluation, checkpoints and the work lost to a crash stand apart. sync_hours: wall time in
    which weights moved, on which both sides are idle."""

    devices: int
    step: int = 0
    version: int = 0
    optimizer_steps: int = 0
    skipped_steps: int = 0
    samples: int = 0
    train_tokens: int = 0
    generated_tokens: int = 0
    flops: float = 0.0
    device_hours: float = 0.0
    eval_flops: float = 0.0
    eval_device_hours: float = 0.0
    checkpoint_device_hours: float = 0.0
    wasted_device_hours: float = 0.0
    generator_busy_hours: float = 0.0
    trainer_busy_hours: float = 0.0
    training_hours: float = 0.0
    sync_hours: float = 0.0

    @property
    def hours(self) -> float:
        """Everything on the clock but what was lost."""
        return self.device_hours + self.eval_device_hours + self.checkpoint_device_hours

    CLOCK_FIELDS = (
        "device_hours",
        "eval_device_hours",
        "checkpoint_device_hours",
        "wasted_device_hours",
        "generator_idle",
        "trainer_idle",
        "weight_sync",
    )

    def add_training(self, wall: float, generator_busy: float, trainer_busy: float) -> None:
        """Seconds of wall time, and of each side's work in it."""
        self.device_hours += wall * self.devices / 3600
        self.training_hours += wall / 3600
        self.generator_busy_hours += generator_busy / 3600
        self.trainer_busy_hours += trainer_busy / 3600

    def add_sync(self, wall: float) -> None:
        """Seconds in which new weights went to the generator."""
        self.add_training(wall, 0.0, 0.0)
        self.sync_hours += wall / 3600

    def add_evaluation(self, wall: float, flops: float) -> None:
        self.eval_device_hours += wall * self.devices / 3600
        self.eval_flops += flops

    def add_checkpoint(self, wall: float) -> None:
        self.checkpoint_device_hours += wall * self.devices / 3600

    def axes(self) -> dict[str, Any]:
        """The compute columns of an evaluation row. Idle shares and `weight_sync`, their common part, are of the wall
        time of training so far."""
        hours = max(self.training_hours, 1e-12)
        return {
            "step": self.step,
            "version": self.version,
            "optimizer_steps": self.optimizer_steps,
            "samples": self.samples,
            "train_tokens": self.train_tokens,
            "generated_tokens": self.generated_tokens,
            "flops": self.flops,
            "device_hours": self.device_hours,
            "eval_device_hours": self.eval_device_hours,
            "checkpoint_device_hours": self.checkpoint_device_hours,
            "wasted_device_hours": self.wasted_device_hours,
            "generator_idle": max(0.0, 1 - self.generator_busy_hours / hours),
            "trainer_idle": max(0.0, 1 - self.trainer_busy_hours / hours),
            "weight_sync": self.sync_hours / hours,
        }

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Everything but the number of devices, which may have changed."""
        for name, value in state.items():
            if name != "devices":
                setattr(self, name, value)
