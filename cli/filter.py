"""`scalerl filter`: keep the training prompts that a model solves sometimes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from scalerl.cli.errors import user_errors


def filter_command(
    out: Annotated[str, typer.Option("--out", "-o", help="JSONL of the prompts that are kept; must not exist.")],
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045 (typer reads the annotation at run time)
        typer.Argument(help="Hydra overrides, as of `scalerl train`: the model and the task with its files."),
    ] = None,
    low: Annotated[float, typer.Option(help="Lowest pass rate that is kept.")] = 0.1,
    high: Annotated[float, typer.Option(help="Highest pass rate that is kept.")] = 0.9,
    samples: Annotated[int, typer.Option(min=1, help="Completions a prompt.")] = 8,
    limit: Annotated[Optional[int], typer.Option(min=1, help="Measure the first so many prompts only.")] = None,  # noqa: UP045
) -> None:
    """Measure the pass rate of each training prompt and keep those in [low, high].

    Prompts that a model always or never solves teach it nothing. Held-out prompts are not measured and not written.

    `scalerl filter model=hf model.path=PATH task=math task.data.train=FILE -o kept.jsonl`
    """
    with user_errors():
        from scalerl.cli.compose import compose
        from scalerl.rl.difficulty import filter_prompts

        config = compose(overrides or []).config
        found = filter_prompts(config, Path(out), low=low, high=high, n_samples=samples, limit=limit)
        print(
            f"{out}: {found.kept} prompts kept; {found.hard} pass less often than {low}, {found.easy} more often than "
            f"{high}, {found.unjudged} have no verdict"
        )
