"""Two and four ranks that share a trainer equal one process: gradients, clipped norm and parameters.

Float32, since that is what shards and their sums over ranks are kept in. NCCL and bf16 shards need GPUs and are not
covered here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scalerl.cli.compose import compose
from scalerl.rl.checkpoint import read_tensors
from scalerl.rl.micro_batches import Layout, balance
from scalerl.rl.models.builtin import build_model
from scalerl.rl.models.tokenizer import character_tokenizer
from scalerl.rl.runlog import read_rows
from scalerl.rl.sharding import collective, join_world, whole
from scalerl.rl.trainer import NonFinite, Trainer, follow
from tests.rl.ranks import on_ranks
from tests.rl.small_run import SMALL, rows

STEPS = 5
KL = ("recipe.kl=k3_as_loss", "recipe.ratio=trainer_old", "recipe.loss=grpo", "trainer.activation_checkpointing=true")
COV = (
    *("recipe.entropy_control=clip_cov", "recipe.clip_cov.share=0.2", "recipe.clip_cov.cov_low=-10"),
    *("trainer.layout=packed", "trainer.micro_batch_tokens=40"),
)
SHARED = ("trainer.layout=shared", "trainer.micro_batch_tokens=32")


class Probe(Trainer):
    @collective
    def gradients(self):
        return {name: whole(p.grad).clone() for name, p in self.model.named_parameters()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path, tokenizer = tmp_path_factory.mktemp("model"), character_tokenizer()
    shape = {"hidden_size": 16, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate_size": 24, "max_positions": 64}
    wanted = compose([f"model.architecture.{key}={value}" for key, value in shape.items()], run_dir="unused").config
    assert wanted.model.kind == "builtin"
    build_model(wanted.model.architecture, tokenizer, seed=0).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def groups(make_completion, make_group):
    """Ragged: seven rows of three prompts are trained, one prompt is dropped and one has nothing unmasked."""

    def c(n, seed, **kind):
        return make_completion(n, seed=seed, **kind)

    return [
        make_group([c(3, 0), c(17, 1, injected=(2, 3)), c(4, 2, truncated=True)], [True, False, False], group=0),
        make_group([c(2, 3), c(5, 4)], [False, False], group=1),
        make_group([c(1, 5), c(9, 6), c(3, 7)], [False, True, True], group=2),
        make_group([c(6, 8, truncated=True)], [False], group=3),
        make_group([c(4, 9), c(8, 10, injected=(5,))], [True, False], group=4),
    ]


def config(folder, *overrides):
    fixed = ["model=hf", f"model.path={folder}", "model.dtype=float32", "trainer.lr=1e-3", "trainer.eps=1e-8"]
    fixed += ["trainer.warmup_steps=2", "trainer.clip_norm=0.1", "trainer.micro_batch_tokens=24"]
    return compose([*fixed, *overrides], run_dir="unused").config


def train(trainer, groups):
    """(first gradients, metrics of each step, parameters at the end)."""
    gradients, metrics = None, []
    for step in range(STEPS):
        metrics.append(trainer.update(trainer.prepare(groups, version=step), step))
        gradients = gradients or trainer.gradients()
        trainer.finish_batch(step + 1)
    return gradients, metrics, {name: w.clone() for name, w in trainer.weights().items()}


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() < 1e-6, name


def _rank(rank, size, store, config, folder, groups, expected, checkpoints):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    trainer = Probe(config, folder, join_world("cpu"))
    if rank:
        follow(trainer)
        assert not dist.is_initialized()
        return
    gradients, metrics, weights = train(trainer, groups)
    assert_close(gradients, expected[0])
    assert_close(weights, expected[2])
    for found, wanted in zip(metrics, expected[1], strict=True):
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
        assert found.keys() == wanted.keys()
        assert found["mismatch_k3"] == pytest.approx(wanted["mismatch_k3"], rel=1e-4, abs=1e-6)
        assert found["lag_histogram"] == wanted["lag_histogram"]
    trainer.save(checkpoints / str(size)).result()
    # What another world size wrote is taken up, moments and all: the next step is the same.
    one = checkpoints / "1"
    trainer.load(one, {"updates": STEPS, "flops": 0.0})
    trainer.update(trainer.prepare(groups, version=STEPS), STEPS)
    assert_close(trainer.weights(), expected[3])
    trainer.close()
    assert not dist.is_initialized()  # no thread of gloo outlives the interpreter


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("overrides", [(), KL, COV, SHARED], ids=["cispo", "reference", "clip_cov-packed", "shared"])
def test_ranks_equal_one_process(size, overrides, folder, groups, tmp_path):
    wanted = config(folder, *overrides)
    one = Probe(wanted, folder)
    expected = train(one, groups)
    (tmp_path / "1").mkdir()
    one.save(tmp_path / "1").result()
    one.update(one.prepare(groups, version=STEPS), STEPS)
    expected = (*expected, {name: w.clone() for name, w in one.weights().items()})
    on_ranks(size, _rank, size, str(tmp_path / "store"), wanted, folder, groups, expected, tmp_path)
    again = Probe(wanted, folder)  # one process takes up what the ranks wrote
    again._updates = STEPS
    tensors = {f"model.{name}": torch.zeros_like(w) for name, w in again.weights().items()}
    read_tensors(tensors, tmp_path / str(size))
    assert_close({name.removeprefix("model."): t for name, t in tensors.items()}, expected[2])


def _not_finite(rank, store, config, folder, groups):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    trainer = Probe(config, folder, join_world("cpu"))
    if rank:
        return follow(trainer)
    groups[0].completions[0].logprobs[:] = -1e4  # rho overflows on the rank that has this row
    before = {name: w.clone() for name, w in trainer.weights().items()}
    with pytest.raises(NonFinite):
        trainer.update(trainer.prepare(groups, version=0), 0)
    assert_close(trainer.weights(), before)
    trainer.close()


def test_a_rank_whose_gradient_is_not_finite_stops_the_step_on_all(folder, groups, tmp_path):
    wanted = config(folder, "recipe.loss=dapo", "recipe.loss_params.dapo.eps_high=1e30")
    on_ranks(2, _not_finite, str(tmp_path / "store"), wanted, folder, groups)


def _row(tokens) -> Any:
    return SimpleNamespace(prompt_ids=(1,), completion=SimpleNamespace(tokens=[0] * (tokens - 1)), length=tokens)


def _balanced(lengths, ranks, budget, layout: Layout = "padded"):
    parts = balance([_row(n) for n in lengths], ranks, budget, layout)
    return [[[[row.length for row in line] for line in micro] for micro in rank] for rank in parts]


def test_micro_batches_are_balanced_over_ranks_and_equally_many():
    assert _balanced([9, 8, 7, 6, 5, 4, 3, 2, 1], 2, 12) == [
        [[[9]], [[6], [5]], [[2], [1]]],
        [[[8]], [[7]], [[4], [3]]],
    ]
    assert _balanced([9, 8, 2], 2, 9) == [[[[9]], []], [[[8]], [[2]]]]
    assert _balanced([], 2, 12) == [[], []]


def test_packed_rows_fill_the_lines_of_a_micro_batch():
    """By hand: at width 9 two lines are in the budget, and of what is left three at width 5."""
    assert _balanced([9, 7, 5, 4, 3, 2, 2, 1], 1, 18, "packed") == [[[[9], [7, 2]], [[5], [4, 1], [3, 2]]]]
    assert _balanced([6, 3, 3], 1, 4, "packed") == [[[[6]], [[3]], [[3]]]]


@pytest.mark.slow
def test_a_run_under_torchrun_has_the_curve_of_one_process(tmp_path):
    torchrun = Path(sys.executable).with_name("torchrun")
    scalerl = Path(sys.executable).with_name("scalerl")
    overrides = [*SMALL, f"model.cache_dir={tmp_path / 'cache'}", "steps=8"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, launcher in (("one", [scalerl]), ("two", [torchrun, "--nproc-per-node", "2", "--no-python", scalerl])):
        done = subprocess.run(
            [*launcher, "train", *overrides, "--run-dir", tmp_path / name],
            capture_output=True,
            text=True,
            env=environment,
            timeout=1200,
        )
        assert done.returncode == 0, done.stderr
    curves = [[row["pass_rate"] for row in rows(tmp_path / name, "eval.jsonl")] for name in ("one", "two")]
    assert len(curves[0]) == 3
    assert curves[0] == curves[1]


@pytest.mark.slow
@pytest.mark.parametrize("heard", [True, False], ids=["torchrun hears it", "torchrun ignores it"])
def test_a_signal_to_a_job_of_two_ranks_stops_at_a_checkpoint(heard, tmp_path):
    """SIGTERM to every process, as Slurm sends it; torchrun hands it on once more, unless it was told not to hear it,
    and then ends with 0 too. Resumed, the run is one that was never stopped."""
    torchrun, scalerl = (Path(sys.executable).with_name(name) for name in ("torchrun", "scalerl"))
    settings = ["--standalone", "--nproc-per-node", "2", "--shutdown-timeout", "300"]
    if not heard:
        settings += ["--signals-to-handle", "SIGINT"]
    launcher = [torchrun, *settings, "--no-python", scalerl, "train"]
    overrides = [*SMALL, f"model.cache_dir={tmp_path / 'cache'}", "steps=12"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def finish(*arguments):
        done = subprocess.run([*launcher, *arguments], capture_output=True, text=True, env=environment, timeout=1200)
        assert done.returncode == 0, done.stderr

    finish(*overrides, "--run-dir", tmp_path / "whole")
    run = tmp_path / "run"
    quietly = ["sh", "-c", "trap '' TERM; exec \"$@\"", "sh"] if not heard else []
    job = subprocess.Popen(
        [*quietly, *launcher, *overrides, "--run-dir", run],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        limit = time.monotonic() + 600
        while len(read_rows(run / "metrics.jsonl")) < 3:
            assert time.monotonic() < limit and job.poll() is None
            time.sleep(0.02)
        ranks = [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
        assert len(ranks) == 2
        for pid in [job.pid, *ranks]:
            os.kill(pid, signal.SIGTERM)
        said, _ = job.communicate(timeout=600)
    finally:
        job.kill()
    assert "resume with: scalerl train --resume" in said
    assert (job.returncode == 0) == (not heard)
    assert 3 <= len(read_rows(run / "metrics.jsonl")) < 12
    finish("--resume", run)
    for name in ("eval.jsonl", "metrics.jsonl"):
        assert rows(run, name) == rows(tmp_path / "whole", name)
    assert read_rows(run / "eval.jsonl")[-1]["wasted_device_hours"] == 0
