"""`scalerl export`: a run's policy as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scalerl.cli.errors import user_errors


def export(
    run: Annotated[str, typer.Argument(help="Folder of the run.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Folder to write; it must not exist yet.")],
) -> None:
    """Write the policy of a run's last checkpoint as a Hugging Face folder: weights (fp32), configuration, tokenizer.

    It loads with `AutoModelForCausalLM.from_pretrained`, and as `model=hf model.path=FOLDER` of another run.
    """
    with user_errors():
        from scalerl.rl.export import export_run

        print(f"step {export_run(Path(run), Path(output))} of {run} is in {output}")
