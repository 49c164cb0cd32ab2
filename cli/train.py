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
        typer.Option(
            help="Go on with this run from its last checkpoint, under its own configuration. `steps=N` may lengthen "
            "it; other overrides need --allow-change."
        ),
    ] = None,
    allow_change: Annotated[
        bool,
        typer.Option(
            "--allow-change",
            help="With --resume: go on although the configuration differs from the checkpoint's (trainer.lr=1e-5); "
            "what the checkpoint depends on (model, task, group sizes, sampling) can't change.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option(help="Print the resolved configuration and its cost estimate; run nothing.")
    ] = False,
) -> None:
    """Train one recipe by RL and log its held-out pass rate against compute.

    Without arguments: the ScaleRL recipe on multi-digit addition with a small transformer made on the spot, in
    minutes on two CPU cores. The run folder then feeds `scalerl fit` and `scalerl plot`.

    A smoke run of any recipe: `scalerl train recipe=minimax steps=2 eval.n_prompts=8 eval.n_samples=2`.

    SIGTERM, or Ctrl-C once, ends the run at a checkpoint with exit 0; the second time it ends at once. After either, or
    after a kill, `--resume` goes on as if nothing had happened.
    """
    with user_errors():
        if resume is not None:
            _resume(Path(resume), overrides or [], allow_change=allow_change, others=bool(run_dir or dry_run))
            return
        from scalerl.cli.compose import compose
        from scalerl.rl.errors import UserError

        if allow_change:
            raise UserError("--allow-change goes with --resume")
        composed = compose(overrides or [], run_dir=run_dir)
        if dry_run:
            from scalerl.cli.dry_run import print_dry_run

            print_dry_run(composed)
            return
        from scalerl.rl.run import start_run

        start_run(composed.config, composed.sources)


def _resume(path: Path, overrides: list[str], *, allow_change: bool, others: bool) -> None:
    from scalerl.cli.compose import recompose
    from scalerl.rl.errors import UserError
    from scalerl.rl.run import resume_run
    from scalerl.rl.runlog import read_config

    if others:
        raise UserError("--resume takes overrides and --allow-change only: the run has its folder, and is started")
    resume_run(path, recompose(read_config(path), overrides), allow_change=allow_change)
