"""The `scalerl` command."""

from __future__ import annotations

import typer

from scalerl.cli.doctor import doctor
from scalerl.cli.export import export
from scalerl.cli.filter import filter_command
from scalerl.cli.fit import fit
from scalerl.cli.plot import plot
from scalerl.cli.serve import serve
from scalerl.cli.sweep import app as sweep
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
app.command("doctor")(doctor)
app.command("export")(export)
app.command("filter")(filter_command)
app.command("fit")(fit)
app.command("plot")(plot)
app.command("serve")(serve)
app.add_typer(sweep, name="sweep")


def main() -> None:
    app()
