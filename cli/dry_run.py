"""`scalerl train --dry-run`: the resolved configuration with the source of each value, and what the run would cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalerl.cli.compose import Composed
    from scalerl.rl.config import RunConfig


def print_dry_run(composed: Composed) -> None:
    """Print every key as `key = value  # source`, then the cost estimate."""
    from rich.console import Console
    from rich.markup import escape

    from scalerl.rl.config import flat

    console = Console(highlight=False, soft_wrap=True)
    for key, value in flat(composed.config.model_dump(mode="json")).items():
        console.print(f"{escape(f'{key} = {value!r}')}  [dim]# {composed.sources.get(key, 'config.yaml')}[/dim]")
    console.print()
    for line in estimate(composed.config):
        console.print(line)


def estimate(config: RunConfig) -> list[str]:
    """Upper bounds in words, from the configuration alone: nothing is loaded."""
    recipe, n_eval = config.recipe, config.steps // config.eval.every + 1 + bool(config.steps % config.eval.every)
    samples = config.steps * recipe.prompts_per_batch * recipe.group_size
    n_sets = len(config.eval.extra) + (len(config.task.tasks) if config.task.kind == "mixture" else 1)
    sets = f"{n_sets} sets x " if n_sets > 1 else ""
    evaluated = n_eval * n_sets * config.eval.n_prompts * config.eval.n_samples
    return [
        f"training: {config.steps} batches of {recipe.prompts_per_batch} x {recipe.group_size} completions = "
        f"{samples:,} completions, at most {samples * recipe.generation_budget:,} generated tokens",
        f"evaluation: {n_eval} x {sets}{config.eval.n_prompts} x {config.eval.n_samples} = {evaluated:,} completions, "
        f"at most {evaluated * recipe.generation_budget:,} generated tokens",
        "flops a token of N active parameters: 2N to generate it, 6N to train on it, and attention beside",
    ]
