"""The `scalerl` command."""

from __future__ import annotations

import typer

from scalerl.cli.train import train

app = typer.Typer(
    name="scalerl",
    help="Tells how an RL recipe will scale before you pay for it: train small, fit the curve, extrapolate.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command("train")(train)


def main() -> None:
    app()
