"""A run of seconds, and its log without the clock."""

from __future__ import annotations

from scalerl.rl.ledger import Ledger
from scalerl.rl.runlog import read_rows

SMALL = [
    "model.architecture.hidden_size=32",
    "model.architecture.layers=2",
    "model.architecture.intermediate_size=32",
    "model.warm_start.steps=100",
    "model.warm_start.batch_size=16",
    "task.demonstrations.slip=0.3",
    "task.min_digits=1",
    "task.max_digits=1",
    "task.n_train=32",  # the checkpoint of step 5 lies between two epochs
    "recipe.prompts_per_batch=4",
    "recipe.group_size=4",
    "recipe.k=3",
    "recipe.generation_budget=32",
    "recipe.interrupt.budget_low=7",
    "recipe.interrupt.budget_high=10",
    "engine.slots=24",
    "engine.ticks_per_step=5",
    "eval.n_prompts=6",
    "eval.n_samples=2",
    "eval.every=4",
    "trainer.lr=1.2e-4",
    "trainer.warmup_steps=5",
    "trainer.save_every=2",
    "steps=14",
]


def rows(path, name):
    drop = (*Ledger.CLOCK_FIELDS, "seconds", "tokens_per_second")
    return [{k: v for k, v in row.items() if k not in drop} for row in read_rows(path / name)]
