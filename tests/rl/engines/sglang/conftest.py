"""A real SGLang server on a tiny model, set up by scripts/setup_sglang; without it tests that need one are skipped."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scalerl.cli.compose import compose
from scalerl.rl.config import RunConfig, SGLangEngineConfig
from scalerl.rl.engines.sglang.client import Client, ServerFault
from scalerl.rl.engines.sglang.generator import SGLangGenerator
from scalerl.rl.engines.sglang.server import ServerProcess, server_processes
from scalerl.rl.models.tokenizer import character_tokenizer
from scalerl.rl.types import Completion, Request, Sampling

PYTHON = Path(__file__).resolve().parents[4] / ".sglang" / "bin" / "python"
TOKENIZER = character_tokenizer()


def save_model(path: Path, seed: int, **shape: Any) -> Path:
    """A random Llama of the small run's shape whose distributions are far from uniform, as an ordinary folder."""
    settings: dict[str, Any] = {
        "vocab_size": len(TOKENIZER),
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "initializer_range": 0.25,
        "tie_word_embeddings": True,
        "pad_token_id": TOKENIZER.pad_token_id,
        "eos_token_id": TOKENIZER.eos_token_id,
        "bos_token_id": None,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**settings | shape)).save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`first` and `second` differ in their weights, `wide` in its shape, `shallow` and `deep` in their layers."""
    root = tmp_path_factory.mktemp("models")
    return {
        "first": save_model(root / "first", 0),
        "second": save_model(root / "second", 1),
        "wide": save_model(root / "wide", 0, hidden_size=64),
        "shallow": save_model(root / "shallow", 0, num_hidden_layers=1),
        "deep": save_model(root / "deep", 0, num_hidden_layers=3),
    }


def make_config(run_dir: Path, model: Path, *overrides: str) -> RunConfig:
    return compose(
        [
            "engine=sglang",
            f"engine.python={PYTHON}",
            "engine.kv_tokens=16384",
            "model=hf",
            f"model.path={model}",
            "model.dtype=float32",
            "model.head_dtype=float32",
            *overrides,
        ],
        run_dir=str(run_dir),
    ).config


@contextlib.contextmanager
def running(config: RunConfig, model: Path) -> Iterator[list[ServerProcess]]:
    """The servers that a run of `config` would start; the test is skipped where none can be."""
    if not PYTHON.is_file():
        pytest.skip("no SGLang server here: scripts/setup_sglang sets one up")
    assert isinstance(config.engine, SGLangEngineConfig)
    processes = server_processes(config, config.engine, model)
    try:
        for process in processes:
            process.start()
        for process in processes:
            try:
                asyncio.run(ready(f"http://127.0.0.1:{process.port}", 300, lambda process=process: process.alive))
            except ServerFault as error:
                pytest.fail(f"{error}\n{process.log.read_text()[-4000:]}")
        yield processes
    finally:
        for process in processes:
            process.stop()


@pytest.fixture(scope="session")
def server(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server on the model `first`, which the tests reach by its URL; each gives it its own weights first."""
    with running(make_config(tmp_path_factory.mktemp("server"), models["first"]), models["first"]) as (process,):
        yield process


@contextlib.contextmanager
def slowed(server: ServerProcess) -> Iterator[None]:
    """For so long the server takes its time over every token: what it was given before will be in progress."""
    url = f"http://127.0.0.1:{server.port}/slow_down"
    httpx.post(url, json={"forward_sleep_time": 0.05}, timeout=60).raise_for_status()
    yield
    httpx.post(url, json={"forward_sleep_time": None}, timeout=60).raise_for_status()


def answered(server: ServerProcess) -> int:
    """Requests for completions that it has answered."""
    return server.log.read_text().count("POST /generate ")


async def ready(url: str, limit: float, alive: Callable[[], bool]) -> None:
    client = Client(url, 1)
    await client.wait_until_ready(limit, alive)
    await client.close()


@pytest.fixture
def make_generator(
    server: ServerProcess, models: dict[str, Path], tmp_path: Path
) -> Iterator[Callable[..., SGLangGenerator]]:
    """Generators on the session's server, with the model `first` as version 0; closed after the test."""
    made: list[SGLangGenerator] = []

    def make(sampling: Sampling, *overrides: str, model: str = "first") -> SGLangGenerator:
        urls = f"engine.urls=[http://127.0.0.1:{server.port}]"
        config = make_config(tmp_path / "run", models[model], urls, *overrides)
        made.append(SGLangGenerator(config, models[model], sampling))
        return made[-1]

    yield make
    for generator in made:
        generator.close()


def requests(n: int, samples: int, *, budgets: Sequence[int] | None = None, first: int = 0) -> list[Request]:
    """n groups of different short prompts."""
    made = []
    for group in range(first, first + n):
        prompt = tuple(TOKENIZER.encode(f"{group}+{7 * group % 10}=", add_special_tokens=False))
        made.append(
            Request(group, prompt, samples, stream=5, thinking_budgets=None if budgets is None else tuple(budgets))
        )
    return made


def generate(generator: SGLangGenerator, asked: Sequence[Request]) -> dict[int, tuple[Completion, ...]]:
    generator.call("submit", asked)
    outcome = generator.call("run_until", [request.group for request in asked])
    return {group.group: group.completions for group in outcome.groups}


@torch.inference_mode()
def trainer_logprobs(model: Any, request: Request, completion: Completion, temperature: float) -> torch.Tensor:
    """float32 [T] by the library's model."""
    ids = torch.tensor([[*request.prompt_ids, *completion.tokens.tolist()]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, ids[0, len(request.prompt_ids) :, None])[:, 0]
