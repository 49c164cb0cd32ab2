"""A whole RL step of scalerl and of Hugging Face TRL's GRPOTrainer: same model, task, batch and machine, in turns.

    ./scripts/setup_trl
    python scripts/bench/against_trl.py --size demo                                 # seconds a step
    python scripts/bench/against_trl.py --size 22m --steps 6                        # vocabulary of 32k, random weights
    python scripts/bench/against_trl.py --size demo --to-pass-rate 0.5 --seeds 3    # training seconds to a pass rate

Both sides are processes that wait while the other makes its step, and have `--threads` threads in all. TRL is in .trl,
in fp32 without gradient checkpointing, with CISPO's epsilon_high and the optimiser of scalerl's configuration.
Interruptions are off, since TRL has none. For seconds a step scalerl also keeps the prompts without variance, which TRL
trains on, unless the overrides say `recipe.zero_variance=drop`; to a pass rate it has its own recipe. The models of 14M
and 22M parameters are random, so that all completions run to their budget, and both sides generate and train as many
tokens. CPU seconds are user and system time of all of a side's processes. Further arguments are scalerl's overrides.
Linux only."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from scalerl.cli.compose import compose
from scalerl.rl.config import RunConfig
from scalerl.rl.models.tokenizer import character_tokenizer
from scalerl.rl.run import model_folder
from scalerl.rl.tasks import build_task

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TICK = os.sysconf("SC_CLK_TCK")
VOCABULARY = 32_768
SIZES: dict[str, dict[str, Any]] = {
    "14m": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "num_attention_heads": 4},
    "22m": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6},
}
COMMON = ["recipe.length_control=none", "steps=100000", "trainer.save_every=0"]
EQUAL_WORK = ["recipe.zero_variance=keep", "eval.every=100000", "eval.n_prompts=8", "eval.n_samples=1"]
# At these sizes a step's two halves gain more from two threads each than from running beside one another.
LARGE = [
    "model=hf",
    "model.dtype=float32",
    "model.head_dtype=float32",
    "recipe.prompts_per_batch=8",
    "recipe.generation_budget=40",
    "recipe.truncation=score",
    "trainer.lr=1e-4",
    "trainer.layout=shared",
    "engine.process=inline",
    "engine.slots=128",
    "engine.ticks_per_step=40",
]


class Side:
    """The processes of one trainer. They stand still until `turn`."""

    def __init__(self, commands: list[list[str]], environments: list[dict[str, str]]) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        for command, environment in zip(commands, environments, strict=True):
            first = not self._processes
            self._processes.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", **environment},
                    stdin=subprocess.PIPE if first else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if first else subprocess.DEVNULL,
                    text=True,
                    process_group=0 if first else self._processes[0].pid,
                )
            )
        self.group = self._processes[0].pid
        self.evaluations: list[dict[str, float]] = []

    def ready(self) -> None:
        self._read()

    def turn(self) -> dict[str, float]:
        """One step; its seconds, without evaluations, and the CPU seconds, with them."""
        before = cpu_seconds(self.group)
        stdin = self._processes[0].stdin
        assert stdin is not None
        stdin.write("\n")
        stdin.flush()
        message = self._read()
        return {**message, "cpu": cpu_seconds(self.group) - before}

    def _read(self) -> dict[str, float]:
        stdout = self._processes[0].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise SystemExit(f"a side died: {self._processes[0].args}")
        message = json.loads(line)
        self.evaluations += message.pop("evaluations")
        return message

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        for process in self._processes:
            process.wait()


def cpu_seconds(group: int) -> float:
    """User and system time of a process group's living processes."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / TICK


def configuration(args: argparse.Namespace, folder: Path, seed: int) -> tuple[RunConfig, Path]:
    """scalerl's configuration, which TRL's side translates, and the model's folder."""
    overrides = [*COMMON, f"seed={seed}"]
    if args.to_pass_rate is None:
        overrides += EQUAL_WORK
    else:
        overrides.append(f"eval.every={args.every}")
    if args.size == "demo":
        overrides.append("engine.process=beside")
    else:
        overrides += [*LARGE, f"model.path={folder / 'model'}", f"trainer.threads={args.threads}"]
        save_random_model(args.size, folder / "model")
    config = compose([*overrides, *args.overrides], run_dir=str(folder / f"run-{seed}")).config
    return config, model_folder(config, build_task(config.task))


def save_random_model(size: str, path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = character_tokenizer()
    config = LlamaConfig(
        **SIZES[size],
        vocab_size=VOCABULARY,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def start(config: RunConfig, model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Side]:
    file = folder / "config.json"
    file.write_text(config.model_dump_json())
    ranks = args.trl_processes
    each = args.threads // ranks
    ours = [sys.executable, str(HERE / "sides" / "scalerl_side.py"), str(file)]
    theirs = [args.trl_python, str(HERE / "sides" / "trl_side.py"), str(file), str(model)]
    theirs += [str(args.trl_at_once), str(each)]
    port = str(29_500 + os.getpid() % 1000)
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environments = [{"OMP_NUM_THREADS": str(each)} for _ in range(ranks)]
    if ranks > 1:
        environments = [{**e, **world, "RANK": str(i), "LOCAL_RANK": str(i)} for i, e in enumerate(environments)]
    sides = {
        "scalerl": Side([ours], [{"OMP_NUM_THREADS": str(args.threads)}]),
        "trl": Side([theirs] * ranks, environments),
    }
    try:
        for side in sides.values():
            side.ready()
    except BaseException:
        close(sides)
        raise
    return sides


def close(sides: dict[str, Side]) -> None:
    for side in sides.values():
        side.close()


def compare_steps(args: argparse.Namespace, folder: Path) -> None:
    config, model = configuration(args, folder, 0)
    sides = start(config, model, folder, args)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    try:
        for number in range(-args.warm_up, args.steps):
            for name in list(sides) if number % 2 else reversed(sides):
                message = sides[name].turn()
                report({"pair": number, "side": name, **message})
                if number >= 0:
                    found[name].append(message)
    finally:
        close(sides)
    print("| | s a step | generation s | training s | CPU s | tokens generated | tokens trained |")
    print("|---|---|---|---|---|---|---|")
    for name, messages in found.items():
        middle = {key: statistics.median(m[key] for m in messages) for key in messages[0]}
        print(
            f"| {name} | {middle['seconds']:.2f} | {middle['generation']:.2f} | {middle['training']:.2f} | "
            f"{middle['cpu']:.2f} | {middle['generated_tokens']:.0f} | {middle['trained_tokens']:.0f} |"
        )
    for key, unit in (("seconds", "wall"), ("cpu", "CPU")):
        ratios = [b[key] / a[key] for a, b in zip(found["scalerl"], found["trl"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        spread = f"quartiles {low:.2f} to {high:.2f}, {len(ratios)} pairs"
        print(f"TRL / scalerl, {unit} seconds: median {middle:.2f}, {spread}")


def compare_curves(args: argparse.Namespace, folder: Path) -> None:
    """Steps in turns until each side's evaluation has reached the pass rate."""
    print("| seed | side | training s to pass rate | at step | pass rate there | CPU s | pass rate before training |")
    print("|---|---|---|---|---|---|---|")
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        config, model = configuration(args, folder, seed)
        sides = start(config, model, folder, args)
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        cpu = dict.fromkeys(sides, 0.0)
        reached: dict[str, dict[str, float]] = {}
        try:
            for _ in range(args.steps):
                for name in [name for name in sides if name not in reached]:
                    message = sides[name].turn()
                    seconds[name].append(message["seconds"])
                    cpu[name] += message["cpu"]
                    last = sides[name].evaluations[-1]
                    report({"seed": seed, "side": name, **message, "last": last})
                    if last["pass_rate"] >= args.to_pass_rate:
                        reached[name] = last
        finally:
            close(sides)
        for name, side in sides.items():
            before, there = side.evaluations[0]["pass_rate"], f"not in {args.steps} steps | |"
            if name in reached:
                step = int(reached[name]["step"])
                there = f"{sum(seconds[name][:step]):.1f} | {step} | {reached[name]['pass_rate']:.3f}"
            print(f"| {seed} | {name} | {there} | {cpu[name]:.1f} | {before:.3f} |", flush=True)


def report(message: dict[str, Any]) -> None:
    print(json.dumps(message), file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["demo", *SIZES], default="demo")
    parser.add_argument("--steps", type=int, default=30, help="of each side, at most where a pass rate is the goal")
    parser.add_argument("--warm-up", type=int, default=5, help="steps of each side that are not measured")
    parser.add_argument("--threads", type=int, default=2, help="of each side, in all")
    parser.add_argument("--to-pass-rate", type=float)
    parser.add_argument("--seeds", type=int, default=3, help="how many, where a pass rate is the goal")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=4, help="steps between evaluations where a pass rate is the goal")
    parser.add_argument("--trl-python", default=str(ROOT / ".trl" / "bin" / "python"))
    parser.add_argument("--trl-processes", type=int, default=2, help="TRL's data-parallel processes")
    parser.add_argument("--trl-at-once", type=int, default=128, help="completions in one of TRL's micro-batches")
    parser.add_argument("overrides", nargs="*", help="of scalerl's configuration")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a stopped comparison stops its sides
    folder = Path(tempfile.mkdtemp(prefix="against_trl_"))
    try:
        (compare_steps if args.to_pass_rate is None else compare_curves)(args, folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
