"""What stands between a configuration and its run on this machine: one check a part, each with the way out."""

from __future__ import annotations

import asyncio
import importlib.util
import netrc
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version
from torch.cuda import nccl

from scalerl.rl.config import BuiltinModel, HFModel, RunConfig, SGLangEngineConfig
from scalerl.rl.engines.sglang.client import Client, Features, ServerFault, ServerRefusal
from scalerl.rl.engines.sglang.needs import TESTED
from scalerl.rl.engines.sglang.server import is_free
from scalerl.rl.errors import UserError
from scalerl.rl.evaluation import build_eval_sets
from scalerl.rl.models.builtin import build_model
from scalerl.rl.models.load import find_model, text_config
from scalerl.rl.models.tokenizer import character_tokenizer, load_tokenizer
from scalerl.rl.prompt_room import PromptRoom, keep_all
from scalerl.rl.requests import Requests, build_sampling
from scalerl.rl.tasks import build_task

Status = Literal["ok", "warn", "fail"]
_ANSWER_LIMIT = 20.0  # seconds that a server gets to describe itself
_GB = 1e9
_WANDB = "https://api.wandb.ai"


@dataclass(frozen=True)
class Check:
    """warn: the run can start, and something about it is likely to be amiss. fail: it can't."""

    name: str
    status: Status
    words: str


def examine(config: RunConfig) -> Iterator[Check]:
    """The checks of everything that a run of `config` needs, in a sensible order of repair. Loads no weights and
    starts nothing; a model of the hub is fetched."""
    for name, look in _CHECKS.items():
        try:
            yield Check(name, *look(config))
        except UserError as error:
            yield Check(name, "fail", str(error))


def _packages(config: RunConfig) -> tuple[Status, str]:
    wrong, found = [], {}
    for requirement in map(Requirement, requires("scalerl") or ()):
        if requirement.marker is not None:
            continue  # of an extra
        try:
            found[requirement.name] = version(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"{requirement} is missing")
            continue
        if not requirement.specifier.contains(found[requirement.name], prereleases=True):
            wrong.append(f"{requirement.name} {found[requirement.name]} is not {requirement.specifier}")
    if wrong:
        return "fail", f"{'; '.join(wrong)}: install scalerl again, with pip install -e ."
    return "ok", f"Python {platform.python_version()}, torch {found['torch']}, transformers {found['transformers']}"


def _extras(config: RunConfig) -> tuple[Status, str]:
    modules = {"wandb": "wandb", "tensorboard": "tensorboard", "slurm": "submitit", "math": "math_verify"}
    absent = [extra for extra, module in modules.items() if importlib.util.find_spec(module) is None]
    if absent:
        return "ok", f"without {', '.join(absent)}; where you need one: pip install 'scalerl[{absent[0]}]'"
    return "ok", f"all there: {', '.join(modules)}"


def _devices(config: RunConfig) -> tuple[Status, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    used = _gpus_used(config)
    if not used:
        return "ok", f"the CPU, {cores} cores, gloo" if dist.is_gloo_available() else f"the CPU, {cores} cores"
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    highest = max(gpu for gpus in used.values() for gpu in gpus)
    if highest >= there:
        return "fail", (
            f"GPU {highest} is asked for, and torch {torch.__version__} sees {there}; lower engine.servers, "
            "engine.tensor_parallel or engine.first_gpu, set the devices to cpu, or install torch for your GPUs"
        )
    if not dist.is_nccl_available():
        return "fail", "this torch has no NCCL, which weights and gradients need between GPUs"
    names = f"{there} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}, NCCL {_dotted(nccl.version())}"
    if both := set(used.get("trainer", ())) & set(used.get("engine", ())):
        return "warn", f"{names}; trainer and engine share GPU {min(both)}: set engine.first_gpu higher"
    return "ok", names


def _dotted(numbers: Any) -> str:
    return ".".join(map(str, numbers))


def _gpus_used(config: RunConfig) -> dict[str, range]:
    """The GPUs of this machine that each side takes, of the trainer those of its first rank."""
    used, engine = {}, config.engine
    if "cuda" in config.trainer.device:
        used["trainer"] = _numbered(config.trainer.device)
    if isinstance(engine, SGLangEngineConfig):
        if engine.device == "cuda" and not engine.urls:
            used["engine"] = range(engine.first_gpu, engine.first_gpu + engine.servers * engine.tensor_parallel)
    elif "cuda" in engine.device:
        used["engine"] = _numbered(engine.device)
    return used


def _numbered(device: str) -> range:
    number = torch.device(device).index or 0
    return range(number, number + 1)


def _sglang(config: RunConfig) -> tuple[Status, str]:
    engine = config.engine
    if not isinstance(engine, SGLangEngineConfig):
        return "ok", "not used; engine=sglang generates on its servers (docs/cluster.md)"
    if engine.urls:
        said = [f"{url} runs {asyncio.run(_describe(url)).version}" for url in engine.urls]
        return "ok", "; ".join(said)
    if not Path(engine.python).is_file():
        raise UserError(
            f"engine.python={engine.python} is not there; scripts/setup_sglang makes it for the CPU, and on GPUs it is "
            "the Python beside your own sglang"
        )
    ask = "from importlib.metadata import version as v; print(v('sglang'), v('torch'))"
    done = subprocess.run([engine.python, "-c", ask], capture_output=True, text=True, timeout=_ANSWER_LIMIT)
    if done.returncode:
        raise UserError(f"engine.python={engine.python}: {done.stderr.strip().splitlines()[-1]}; install sglang there")
    own, its_torch = done.stdout.split()
    said = f"{own} on torch {its_torch}"
    return ("ok", said) if is_tested(own) else ("warn", f"{said}; scalerl is tested on {TESTED[0]} to {TESTED[1]}")


def is_tested(its_version: str) -> bool:
    """Whether this version of SGLang lies between those that the engine was tested on."""
    try:
        return Version(TESTED[0]) <= Version(its_version) <= Version(TESTED[1])
    except InvalidVersion:
        return False


async def _describe(url: str) -> Features:
    client = Client(url, 1)
    try:
        return await client.features(_ANSWER_LIMIT)
    except (ServerFault, ServerRefusal) as error:
        raise UserError(f"{error}; start the server, or leave engine.urls empty for scalerl to start its own") from None
    finally:
        await client.close()


def _network(config: RunConfig) -> tuple[Status, str]:
    engine = config.engine
    if not isinstance(engine, SGLangEngineConfig):
        return "ok", "not used"
    try:
        with socket.socket() as probe:
            probe.bind((engine.host, 0))
    except OSError as error:
        raise UserError(
            f"engine.host={engine.host}: nothing can be offered there ({error.strerror or error}); give this "
            "machine's address as the servers reach it"
        ) from None
    local = ("127.0.0.1", "localhost")
    far = [url for url in engine.urls if not any(name in url for name in local)]
    if far and engine.host in local and engine.transfer == "broadcast":
        return "warn", f"{far[0]} can't reach engine.host={engine.host} for weights; give this machine's own address"
    ports = range(engine.port, engine.port + engine.servers) if engine.port and not engine.urls else ()
    if taken := [port for port in ports if not is_free(port)]:
        return "fail", f"port {taken[0]} is in use: choose another engine.port, or 0 for any free one"
    return "ok", f"{engine.host}, ports {'free' if ports else 'any'}"


def _run_folder(config: RunConfig) -> tuple[Status, str]:
    """Checkpoints hold policy and AdamW's moments in fp32, and the reference where there is one; one more than is kept
    is there while it is written."""
    path = Path(config.run_dir).absolute()
    there = next(parent for parent in path.parents if parent.exists())
    if path.exists():
        return "fail", f"{path} exists already; choose another run_dir, or go on with scalerl train --resume {path}"
    if not os.access(there, os.W_OK):
        return "fail", f"{there} can't be written; choose another run_dir"
    free = shutil.disk_usage(there).free / _GB
    copies = 3 + (config.recipe.kl != "none")
    needed = (config.trainer.keep_checkpoints + 1) * copies * 4 * n_parameters(config) / _GB
    words = f"{free:.0f} GB free below {there}, checkpoints need {needed:.2g} GB"
    if free < needed:
        return "fail", f"{words}: choose another run_dir, or lower trainer.keep_checkpoints"
    return ("warn", f"{words}: that is tight") if free < 2 * needed else ("ok", words)


def _wandb(config: RunConfig) -> tuple[Status, str]:
    if config.log.wandb == "off":
        return "ok", "off; log.wandb=online or offline mirrors the run there"
    if importlib.util.find_spec("wandb") is None:
        return "fail", "not installed: pip install 'scalerl[wandb]', or log.wandb=off"
    if config.log.wandb == "offline":
        return "ok", "offline: wandb sync sends the run later"
    if not os.environ.get("WANDB_API_KEY") and not _netrc_knows(os.environ.get("WANDB_BASE_URL", _WANDB)):
        return "warn", "no API key is found: wandb login keeps one here, or log.wandb=offline"
    return "ok", f"online, project {config.log.project}"


def _netrc_knows(url: str) -> bool:
    try:
        return netrc.netrc().authenticators(urlparse(url).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _model(config: RunConfig) -> tuple[Status, str]:
    size = n_parameters(config)
    if isinstance(config.model, BuiltinModel):
        return "ok", f"built in, {size:.2g} parameters, kept in {config.model.cache_dir}"
    path = find_model(config.model.path)
    tokenizer = load_tokenizer(path)
    build_sampling(config, tokenizer)
    PromptRoom.of_run(config, path, Requests(config, tokenizer))  # refuses a budget beyond the context
    return "ok", f"{text_config(path).model_type}, {size:.2g} parameters, {config.model.dtype}"


def n_parameters(config: RunConfig) -> int:
    """Of the configuration's model; no weights are read. Raises UserError where it can't be had."""
    with torch.device("meta"):
        if isinstance(config.model, BuiltinModel):
            model = build_model(config.model.architecture, character_tokenizer(), 0)
        else:
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_config(text_config(find_model(config.model.path)))
    return sum(parameter.numel() for parameter in model.parameters())


def _task(config: RunConfig) -> tuple[Status, str]:
    task, keep = build_task(config.task), keep_all
    if isinstance(config.model, HFModel):
        path = find_model(config.model.path)
        keep = PromptRoom.of_run(config, path, Requests(config, load_tokenizer(path))).keep
    train, held_out = len(keep("training", task.train_prompts())), len(task.held_out_prompts())
    words = f"{task.name}, {train} training and {held_out} held-out prompts"
    build_eval_sets(config, task, keep)
    needed = config.recipe.prompts_per_batch
    return ("fail", f"{words}: a batch takes {needed}") if train < needed else ("ok", words)


_CHECKS: dict[str, Callable[[RunConfig], tuple[Status, str]]] = {
    "packages": _packages,
    "extras": _extras,
    "devices": _devices,
    "sglang": _sglang,
    "network": _network,
    "run folder": _run_folder,
    "wandb": _wandb,
    "model": _model,
    "task": _task,
}
