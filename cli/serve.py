"""`scalerl serve`: the servers of a run, on a machine other than the trainer's."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from scalerl.cli.errors import user_errors


def serve(
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045 (typer reads the annotation at run time)
        typer.Argument(help="Hydra overrides, as of the run's `scalerl train`, with `engine=sglang`."),
    ] = None,
    logs: Annotated[str, typer.Option(help="Folder of the servers' logs.")] = "servers",
) -> None:
    """Start the SGLang servers of a run on this machine, and keep them until Ctrl-C, SIGTERM, or the end of one.

    For a run whose servers are on other machines than its trainer. Each machine of theirs starts its own, with the
    arguments that the run's recipe and model need, and the trainer is given all of their URLs:

    `scalerl serve engine=sglang engine.device=cuda engine.servers=8 engine.port=30000 engine.host=node7 model=hf
    model.path=PATH`

    `scalerl train engine=sglang 'engine.urls=[http://node7:30000,...]' engine.device=cuda model=hf model.path=PATH`

    Exit 1 where a server ends by itself: the trainer waits for it to answer again.
    """
    with user_errors():
        from scalerl.cli.compose import compose
        from scalerl.rl.engines.sglang.serve import serve_until_stopped

        serve_until_stopped(compose(overrides or [], run_dir=logs).config)
