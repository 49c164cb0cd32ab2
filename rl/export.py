"""A run's policy as an ordinary Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from scalerl.rl.checkpoint import load_last_checkpoint, read_tensors
from scalerl.rl.config import BuiltinModel, RunConfig
from scalerl.rl.errors import UserError
from scalerl.rl.models.builtin import build_model
from scalerl.rl.models.load import find_model, load_model
from scalerl.rl.models.tokenizer import character_tokenizer, load_tokenizer
from scalerl.rl.process import keep_bars_to_terminals
from scalerl.rl.runlog import beside_of, read_config


def export_run(run_dir: Path, output: Path) -> int:
    """Write the policy of the last checkpoint into the new folder `output`: weights in fp32, configuration, tokenizer.
    Returns its step.

    Raises UserError where the run has no checkpoint, or `output` exists or can't be made."""
    config = read_config(run_dir)
    checkpoint = load_last_checkpoint(run_dir)
    if checkpoint is None:
        raise UserError(f"run {run_dir} has no checkpoint yet; go on with --resume {run_dir}")
    if output.exists():
        raise UserError(f"{output} exists already; choose another folder")
    keep_bars_to_terminals()
    model, tokenizer = _initial(config)
    read_tensors({f"model.{name}": p.detach() for name, p in model.named_parameters()}, checkpoint.folder)
    beside = beside_of(output)
    try:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        beside.rename(output)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise UserError(f"{output} can't be made ({error.strerror}); choose another folder") from None
    return checkpoint.state["ledger"]["step"]


def _initial(config: RunConfig) -> tuple[Any, Any]:
    """The run's model, whose weights are about to be replaced, and its tokenizer."""
    if isinstance(config.model, BuiltinModel):
        tokenizer = character_tokenizer()
        return build_model(config.model.architecture, tokenizer, config.model.warm_start.seed), tokenizer
    path = find_model(config.model.path)
    return load_model(path), load_tokenizer(path)
