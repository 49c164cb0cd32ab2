"""Studies drawn from known curves, written to disk as ordinary run folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scalerl.sweeps.plan import Arm, Plan, write_plan
from tests.fitting.simulated import Array, Truth, ar1, sigmoid

BASE: Truth = (0.40, 0.610, 1.92, 2542.0)  # R0, A, B, C_mid: ScaleRL's own (arXiv 2510.13786, table 1)
BUDGET, EVERY = 16_000, 400
STEPS = BUDGET * 10 // EVERY
NOISE, RHO = 0.0035, 0.5  # of the evaluations
RUN_SD = {"A": 0.004, "ln_B": 0.03, "ln_C_mid": 0.03}  # between seeds


@dataclass(frozen=True)
class Simulated:
    """An arm whose truth is known. collapse_at: compute from which its pass rate falls. budget: compute of its last
    evaluation. truncation: of its training steps."""

    truth: Truth = BASE
    identical: str | None = None
    collapse_at: float | None = None
    budget: float = BUDGET
    truncation: float = 0.02


ARMS: dict[str, Simulated] = {
    "base": Simulated(),
    "loss=dapo": Simulated((0.40, 0.560, 1.92, 2542.0)),
    "loss_aggregation=sample": Simulated((0.40, 0.610, 1.42, 2542.0)),
    "advantage_norm=prompt": Simulated((0.40, 0.610, 1.92, 1.5 * 2542.0)),
    "zero_variance=keep": Simulated(),
    "length_control=penalty": Simulated(collapse_at=7000.0, truncation=0.14),
    "logits_precision=model": Simulated(identical="an fp32 model: model.head_dtype is float32"),
}
# arm -> kinds of verdict that are right; any other kind but `unclear` or `open` is a wrong one
RIGHT = {
    "loss=dapo": {"lower"},
    "loss_aggregation=sample": {"slower", "less-steep"},
    "advantage_norm=prompt": {"slower"},
    "zero_variance=keep": {"tie"},
    "length_control=penalty": {"no-fit"},
    "logits_precision=model": {"identical"},
}


def plan_of(arms: Mapping[str, Simulated], seeds: tuple[int, ...], kind: str = "loo", x: str = "flops") -> Plan:
    def arm(name: str, simulated: Simulated) -> Arm:
        axis, _, value = name.partition("=")
        if not value:
            return Arm(name, None, (), {}, simulated.identical)
        key = f"recipe.{axis}"
        return Arm(name, axis, (f"{key}={value}",), {key: ("8", value)}, simulated.identical)

    listed = tuple(arm(name, simulated) for name, simulated in arms.items())
    return Plan(
        kind=kind,
        name="synthetic",
        x=x,
        overrides=(),
        arms=listed,
        seeds=seeds,
        command=f"scalerl sweep {kind}",
        skipped={},
        steps=STEPS,
        completions=0,
        tokens=0,
    )


def curve(arm: Simulated, rng: np.random.Generator) -> tuple[Array, Array]:
    """(compute, pass rate), each [n]: one run of the arm, from a truth of its own about the arm's."""
    r0, a, b, c_mid = arm.truth
    z = rng.standard_normal(3)
    b, c_mid = b * np.exp(RUN_SD["ln_B"] * z[1]), c_mid * np.exp(RUN_SD["ln_C_mid"] * z[2])
    x = np.arange(0, arm.budget + 1, EVERY, dtype=float)
    y = sigmoid((r0, a + RUN_SD["A"] * z[0], float(b), float(c_mid)), x)
    if arm.collapse_at is not None:
        y = np.where(x > arm.collapse_at, y - 0.30 * (1 - np.exp(-(x - arm.collapse_at) / 1500.0)), y)
    return x, np.clip(y + NOISE * ar1(rng, len(x), RHO), 0, 1)


def write_run(folder: Path, x: Array, y: Array, truncation: float, column: str = "flops") -> None:
    """An ordinary run folder: a step takes EVERY / 10 of compute, and every 10th is evaluated."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"steps": STEPS, "run_dir": str(folder)}))
    rows = [
        {"set": "held_out", "step": 10 * i, column: c, "pass_rate": rate, "entropy": 0.5}
        for i, (c, rate) in enumerate(zip(x.tolist(), y.tolist(), strict=True))
    ]
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = [
        {"step": step, column: step * EVERY / 10, "truncation_rate": truncation, "entropy": 0.8 * 0.995**step}
        for step in range(1, 10 * (len(x) - 1) + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in training))


def write_study(
    study: Path,
    arms: Mapping[str, Simulated],
    *,
    seeds: tuple[int, ...] = (0, 1, 2),
    draw: int = 0,
    kind: str = "loo",
    x: str = "flops",
) -> Plan:
    """Draw every run of the study and write it with its plan. draw: seed of the simulation."""
    plan = plan_of(arms, seeds, kind, x)
    write_plan(study, plan)
    for i, arm in enumerate(plan.arms):
        for seed in seeds:
            simulated = arms[arm.name]
            # one that is the base by construction is the base's run, to the bit
            rng = np.random.default_rng((draw, 0 if simulated.identical else i, seed))
            compute, rate = curve(simulated, rng)
            write_run(study / plan.run_folder(arm, seed), compute, rate, simulated.truncation, x)
    return plan
