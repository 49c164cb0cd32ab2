"""`scalerl train`: one run of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from scalerl.cli.errors import user_errors


def train(
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045 (typer reads the annotation at run time)
        typer.Argument(
            help="Hydra overrides: a group choice (`recipe=qwen_dapo`, `task=countdown`, `model=hf`) or a value "
            "(`recipe.loss=gspo`, `trainer.lr=1e-4`, `steps=200`)."
        ),
    ] = None,
    run_dir: Annotated[Optional[str], typer.Option(help="Folder of the run; it must not exist yet.")] = None,  # noqa: UP045
    resume: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Go on with this run from its last checkpoint, under its own configuration."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option(help="Print the resolved configuration and its cost estimate; run nothing.")
    ] = False,
) -> None:
    """Train one recipe by RL and log its held-out pass rate against compute.

    Without arguments: the ScaleRL recipe on multi-digit addition with a small transformer made on the spot, in
    minutes on two CPU cores. The run folder then feeds `scalerl fit` and `scalerl plot`.

    A smoke run of any recipe: `scalerl train recipe=minimax steps=2 eval.n_prompts=8 eval.n_samples=2`.
    """
    with user_errors():
        if resume is not None:
            from scalerl.rl.errors import UserError
            from scalerl.rl.run import resume_run

            if overrides or run_dir or dry_run:
                raise UserError(
                    "--resume goes on under the run's own configuration: it takes no overrides or other options"
                )
            resume_run(Path(resume))
            return
        from scalerl.cli.compose import compose

        composed = compose(overrides or [], run_dir=run_dir)
        if dry_run:
            from scalerl.cli.dry_run import print_dry_run

            print_dry_run(composed)
            return
        from scalerl.rl.run import start_run

        start_run(composed.config, composed.sources)
