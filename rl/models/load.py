"""Load a policy from an ordinary Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from scalerl.rl.errors import UserError


def check_model_dir(path: Path) -> None:
    """Raises UserError unless `path` is a folder with a Hugging Face configuration and tokenizer."""
    if not path.is_dir():
        raise UserError(f"model.path={path} is no folder; give the folder of a Hugging Face causal LM")
    for name, what in (("config.json", "model configuration"), ("tokenizer_config.json", "tokenizer")):
        if not (path / name).is_file():
            raise UserError(f"model.path={path} has no {name}: it is no Hugging Face folder with a {what}")


def text_config(path: Path) -> Any:
    """The library's configuration of the language model in `path`."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
    except (OSError, ValueError) as error:
        raise UserError(f"model.path={path} can't be read: {str(error).splitlines()[0]}") from None


def load_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The causal LM in `path`, in training precision."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"model.path={path} can't be loaded: {str(error).splitlines()[0]}") from None
