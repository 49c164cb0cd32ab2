"""Kept sets and experts, from a real server's answers to the trainer's log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from scalerl.rl.engines.sampling import kept_mask
from scalerl.rl.engines.sglang.generator import SGLangGenerator
from scalerl.rl.engines.sglang.server import ServerProcess
from scalerl.rl.run import start_run
from scalerl.rl.runlog import read_rows
from scalerl.rl.trainer import Trainer
from scalerl.rl.types import Completion, Interrupt, Sampling, ScoredGroup

from .conftest import TOKENIZER, generate, make_config, requests, running

pytestmark = pytest.mark.slow
END, END_THINK = TOKENIZER.eos_token_id, TOKENIZER.convert_tokens_to_ids("</think>")
RUN = [
    "task.max_digits=4",
    "task.n_train=64",
    "recipe.k=2",
    "recipe.prompts_per_batch=2",
    "recipe.group_size=3",
    "recipe.zero_variance=keep",
    "recipe.truncation=score",
    "recipe.entropy_control=bonus",  # a random model solves nothing: this is its gradient
    "trainer.lr=1e-3",
    "trainer.warmup_steps=0",
    "eval.n_prompts=2",
    "eval.n_samples=2",
    "eval.every=2",  # at step 2 completions in progress are aborted, and go on after it
    "steps=4",
]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3-MoE with random weights."""
    path = tmp_path_factory.mktemp("moe")
    config = Qwen3MoeConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,  # pyright: ignore[reportCallIssue]
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        initializer_range=0.25,
        pad_token_id=TOKENIZER.pad_token_id,
        eos_token_id=END,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def bf16_server(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """On the mixture of experts, in bf16 under a trainer in fp32."""
    overrides = ("recipe.router_replay=r3", "engine.arguments=[--dtype, bfloat16]")
    with running(make_config(tmp_path_factory.mktemp("server"), moe, *overrides), moe) as (process,):
        yield process


def scored(group: int, prompt: Sequence[int], completions: tuple[Completion, ...], make_group: Any) -> ScoredGroup:
    made = make_group(completions, [True, *[False] * (len(completions) - 1)], group=group)
    return ScoredGroup(**{**vars(made), "prompt_ids": tuple(prompt)})


def paths_taken(model: Any) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """The experts that the model's tokens go through from now on, a tensor [tokens, top_k] a layer and pass; and the
    end of it."""
    taken: list[torch.Tensor] = []
    blocks = [module for module in model.modules() if type(module).__name__.endswith("MoeExperts")]
    hooks = [block.register_forward_pre_hook(lambda _, given: taken.append(given[1])) for block in blocks]

    def stop() -> None:
        for hook in hooks:
            hook.remove()

    return taken, stop


def measure(trainer: Trainer, groups: Sequence[ScoredGroup]) -> tuple[float, float]:
    """Share of the tokens' routings that are the generator's, and k3 KL, over a batch."""
    taken, stop = paths_taken(trainer.model)
    prepared = trainer.prepare(groups, version=1)
    stop()
    same, log_ratios = [], []
    layers = len(taken) // len(prepared.micro_batches)
    for number, micro in enumerate(prepared.micro_batches):
        assert micro.tokens.logp_old is not None
        log_ratios.append((micro.tokens.logp_old - micro.tokens.logp_gen)[micro.tokens.mask])
        passed = torch.stack(taken[layers * number : layers * (number + 1)], dim=1)
        passed = passed.unflatten(0, micro.input_ids.shape).sort(-1).values
        for row, experts in zip(micro.rows, passed, strict=True):
            recorded = torch.as_tensor(row.completion.experts).sort(-1).values
            same.append((experts[: len(recorded)] == recorded).all(-1).flatten())
    log_ratio = torch.cat(log_ratios).double()
    return float(torch.cat(same).double().mean()), float((log_ratio.expm1() - log_ratio).mean())


def test_with_replay_the_trainer_takes_the_generators_paths_and_mismatch_shrinks(
    moe: Path, bf16_server: ServerProcess, tmp_path: Path, make_group: Any
) -> None:
    """Completions that met an update, so that tokens of the older weights are among them; the trainer has the newer."""
    asked, sampling = requests(8, 8), Sampling(1.0, 200, (), return_experts=True)
    overrides = ["recipe.ratio=trainer_old", "recipe.length_control=none", "recipe.zero_variance=keep"]
    overrides += [f"engine.urls=[http://127.0.0.1:{bf16_server.port}]", "recipe.truncation=score"]
    configs = {
        axis: make_config(tmp_path / axis, moe, *overrides, f"recipe.router_replay={axis}") for axis in ("r3", "off")
    }
    trainers = {axis: Trainer(config, moe) for axis, config in configs.items()}
    generator = SGLangGenerator(configs["r3"], moe, sampling)
    try:
        generator.call("submit", asked)
        time.sleep(1.0)
        for trainer in trainers.values():
            random = torch.Generator().manual_seed(1)
            for parameter in trainer.model.parameters():
                parameter.data += 0.01 * torch.randn(parameter.shape, generator=random)
        generator.update_weights(dict(trainers["r3"].weights()), 1)
        found = generator.call("run_until", [request.group for request in asked]).groups
    finally:
        generator.close()
    completions = {group.group: group.completions for group in found}
    versions = np.concatenate([c.versions for group in found for c in group.completions])
    assert 0 < versions.mean() < 1
    groups = [scored(r.group, r.prompt_ids, completions[r.group], make_group) for r in asked]
    for group in groups:
        for completion in group.completions:
            assert completion.experts is not None
            assert completion.experts.shape == (len(group.prompt_ids) + len(completion.tokens) - 1, 3, 2)
    (agreement, k3), (own_agreement, own_k3) = (measure(trainers[axis], groups) for axis in ("r3", "off"))
    print(f"{versions.mean():.2f} of tokens are new; agreement {agreement}, without replay {own_agreement}")
    print(f"k3 KL {k3:.2e}, without replay {own_k3:.2e}")
    assert agreement == 1.0
    assert own_agreement < 1.0
    assert k3 < own_k3


def test_a_run_on_a_mixture_of_experts(moe: Path, bf16_server: ServerProcess, tmp_path: Path) -> None:
    urls = f"engine.urls=[http://127.0.0.1:{bf16_server.port}]"
    path = start_run(make_config(tmp_path / "run", moe, urls, "recipe.router_replay=r3", *RUN), {})
    rows = read_rows(path / "metrics.jsonl")
    assert [row["optimizer_steps"] for row in rows] == [1, 2, 3, 4]
    assert max(row["lag_max"] for row in rows) > 0
    assert all(0 < row["mismatch_k3"] < 0.1 for row in rows)


@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, 0), (1.0, 5), (0.9, 7)])
def test_kept_sets_renormalise_to_the_servers_log_probabilities(
    make_generator, models, top_p: float, top_k: int
) -> None:
    phrase = (*TOKENIZER.encode("stop", add_special_tokens=False), END_THINK)
    interrupt = Interrupt(phrase, END_THINK, answer_budget=6)
    sampling = Sampling(0.7, 30, (END,), top_p=top_p, top_k=top_k, interrupt=interrupt, return_kept=True)
    asked = requests(16, 4, budgets=(5, 9, 20, 24))
    overrides = ["recipe.sampling_mask=keep", f"recipe.sampling.top_p={top_p}", f"recipe.sampling.top_k={top_k}"]
    groups = generate(make_generator(sampling, *overrides), asked)
    model = AutoModelForCausalLM.from_pretrained(models["first"], dtype=torch.float32)
    differences, sizes, ours = [], [], []
    for request in asked:
        for completion in groups[request.group]:
            full = distributions(model, request.prompt_ids, completion, 0.7)
            wanted = kept_mask(full, top_p, top_k)
            assert completion.kept is not None and len(completion.kept) == len(completion.tokens)
            for t, kept in enumerate(completion.kept):
                assert (len(kept) == 0) == completion.injected[t]
                if len(kept):
                    among = full[t, torch.as_tensor(kept).long()].logsumexp(0)
                    differences.append(float(full[t, completion.tokens[t]] - among) - completion.logprobs[t])
                    sizes.append(len(kept))
                    ours.append(set(kept.tolist()) == set(wanted[t].nonzero()[:, 0].tolist()))
    print(f"{len(sizes)} sets of {min(sizes)} to {max(sizes)} tokens, difference {np.abs(differences).max():.1e}")
    assert np.abs(differences).max() < 1e-4
    assert 1 < max(sizes) < len(TOKENIZER) and (not top_k or max(sizes) <= top_k)
    assert np.mean(ours) > 0.99  # where rounding puts the cut


@torch.inference_mode()
def distributions(model: Any, prompt: Sequence[int], completion: Completion, temperature: float) -> torch.Tensor:
    """[T, V] log-probabilities by the library's model."""
    ids = torch.tensor([[*prompt, *completion.tokens.tolist()]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def test_a_run_with_kept_sets_starts_without_mismatch(server, models, tmp_path: Path) -> None:
    """The trainer renormalises over the server's sets: on the same weights the two agree."""
    urls = f"engine.urls=[http://127.0.0.1:{server.port}]"
    keep = ["recipe.sampling_mask=keep", "recipe.sampling.top_p=0.9"]
    path = start_run(make_config(tmp_path / "run", models["first"], urls, *keep, *RUN), {})
    rows = read_rows(path / "metrics.jsonl")
    assert rows[0]["max_abs_log_ratio"] < 1e-4
    assert [row["optimizer_steps"] for row in rows] == [1, 2, 3, 4]
