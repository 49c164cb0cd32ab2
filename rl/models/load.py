"""Load a policy from an ordinary Hugging Face folder, or from the hub."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import torch

from scalerl.kernels.linear import replace_linear_layers
from scalerl.kernels.rms_norm import fuse_rms_norms
from scalerl.rl.errors import UserError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")  # weights, configuration, tokenizer


def find_model(path: str) -> Path:
    """The folder of `model.path`: itself, or the local copy of the Hugging Face hub's model of that id, which is
    downloaded where it isn't there yet.

    Raises UserError where it is neither, the hub can't be reached or has no such model, or what is there is no Hugging
    Face folder with a configuration and a tokenizer."""
    folder = Path(path)
    if not folder.is_dir():
        # A folder that exists but for its last part is a misspelt path, about which the hub is not asked.
        if not _HUB_ID.fullmatch(path) or folder.parent.is_dir():
            raise UserError(f"model.path={path} is no folder; give the folder of a Hugging Face causal LM, or a hub id")
        folder = _from_hub(path)
    for name, what in (("config.json", "model configuration"), ("tokenizer_config.json", "tokenizer")):
        if not (folder / name).is_file():
            raise UserError(f"model.path={path} has no {name}: it is no Hugging Face folder with a {what}")
    return folder


def _from_hub(name: str) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except GatedRepoError:
        reason = "the Hugging Face hub gives it to accounts that have asked for it: `hf auth login` with one"
    except RepositoryNotFoundError:
        reason = "it is no folder, and the Hugging Face hub has no such model"
    except LocalEntryNotFoundError:
        reason = (
            "it is no folder, and the Hugging Face hub, of which there is no copy of it here, can't be reached; give a "
            "folder, or run once where there is a network"
        )
    except (OSError, ValueError, httpx.HTTPError) as error:
        reason = f"it can't be had from the Hugging Face hub: {str(error).splitlines()[0]}"
    raise UserError(f"model.path={name}: {reason}")


def text_config(path: Path) -> Any:
    """The library's configuration of the language model in `path`."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
    except (OSError, ValueError) as error:
        raise UserError(f"model.path={path} can't be read: {str(error).splitlines()[0]}") from None


def load_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The causal LM in `path`, in training precision."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # RuntimeError: tensors of another shape
        raise UserError(f"model.path={path} can't be loaded: {str(error).splitlines()[0]}") from None


def load_for_training(path: Path, device: torch.device) -> Any:
    """The causal LM in `path` as the trainer computes with it: in fp32 on `device`, on a CPU by faster code."""
    model = load_model(path).to(device)
    if device.type == "cpu":
        replace_linear_layers(model)
        fuse_rms_norms(model)
    return model


def cache_argument(body: Any) -> str:
    """What a base model calls its cache of keys and values, which depends on the library's version."""
    return "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"
