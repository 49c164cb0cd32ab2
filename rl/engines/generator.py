"""The generation side of a run on the `torch` engine: in the trainer's process, or beside it in one of its own.

Both do the same work in the same order on the engine's logical clock, so both give the same run to the bit: a command
is begun, the trainer works, and the command's result is taken at the next switch of weights.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from scalerl.rl.config import RunConfig, TorchEngineConfig
from scalerl.rl.engines.decoder import load_decoder
from scalerl.rl.engines.interface import Generator, Outcome
from scalerl.rl.engines.torch_engine import TorchEngine, Work
from scalerl.rl.errors import RunEnded, UserError
from scalerl.rl.preemption import leave_signals_to_parent
from scalerl.rl.process import set_up_process
from scalerl.rl.types import CompletedGroup, Request, Sampling


def torch_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def head_dtype(config: RunConfig) -> torch.dtype:
    """Precision of the language-model head on both sides."""
    return torch.float32 if config.recipe.logits_precision == "fp32" else torch_dtype(config.model.head_dtype)


class GeneratorCore:
    """Owns the decoder, the rollout engine and the evaluation engine, and executes the commands.

    `abandoned` is a shared flag: once its value is set, the commands that may take long end between two ticks."""

    def __init__(self, config: RunConfig, model_path: Path, sampling: Sampling, abandoned: Any) -> None:
        engine = config.engine
        assert isinstance(engine, TorchEngineConfig)
        decoder = load_decoder(
            model_path,
            dtype=torch_dtype(config.model.dtype),
            head_dtype=head_dtype(config),
            device=engine.device,
        )
        self._decoder = decoder
        self._slots = engine.slots
        self._ticks_per_step = engine.ticks_per_step
        self._sampling = sampling
        self._abandoned = abandoned
        self._engine = TorchEngine(decoder, slots=self._slots, sampling=sampling)
        self._evaluator: TorchEngine | None = None
        self._eval_work = Work()

    def execute(self, command: str, *args: Any) -> Outcome:
        start = time.perf_counter()
        groups, state = [], None
        try:
            if command in ("save", "load", "prefill_logprobs"):
                state = getattr(self, command)(*args)
            else:
                groups = getattr(self, command)(*args) or []
        except FloatingPointError as error:
            raise RunEnded(f"{error}; lower trainer.lr or trainer.clip_norm") from None
        return Outcome(groups, replace(self._engine.work), self._eval_work, time.perf_counter() - start, state)

    def submit(self, requests: Sequence[Request]) -> None:
        self._engine.submit(requests)

    def window(self) -> list[CompletedGroup]:
        """Let the ticks of one trainer's step pass, fewer when nothing is left to decode."""
        done: list[CompletedGroup] = []
        for _ in range(self._ticks_per_step):
            if self._engine.idle:
                break
            done += self._engine.tick()
        return done

    def run_until(self, groups: Sequence[int]) -> list[CompletedGroup]:
        """Let ticks pass until `groups` are complete. Abandoned, it may be asked again and goes on from there."""
        missing, done = set(groups), []
        while missing and not self._abandoned.value:
            if self._engine.idle:
                raise RuntimeError(f"groups {sorted(missing)} are waited for and were never submitted")
            completed = self._engine.tick()
            done += completed
            missing -= {c.group for c in completed}
        return done

    def update_weights(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        self._engine.update_weights(state, version)

    def evaluate(self, requests: Sequence[Request], version: int, to_the_end: bool) -> list[CompletedGroup]:
        """All requests from start to end under the current weights, apart from the rollouts in flight. Abandoned,
        unless `to_the_end`, it brings nothing."""
        if self._evaluator is None:
            self._evaluator = TorchEngine(self._decoder, slots=self._slots, sampling=self._sampling)
        self._evaluator.version = version
        self._evaluator.submit(requests)
        done: list[CompletedGroup] = []
        while not self._evaluator.idle:
            if self._abandoned.value and not to_the_end:
                self._evaluator = None
                return []
            done += self._evaluator.tick()
        self._eval_work = replace(self._evaluator.work)
        return done

    def prefill_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The log-probability of each sequence's last token after a prefill of those before it, at temperature 1 and
        over the whole vocabulary."""
        found = []
        for *context, last in sequences:
            cache = self._decoder.new_cache(1, len(context))
            ids = torch.tensor([context], device=self._decoder.device)
            lengths = torch.tensor([len(context)], device=self._decoder.device)
            with torch.inference_mode():
                logits = self._decoder.prefill(ids, lengths, cache).logits[0]
            found.append(float(logits.log_softmax(-1)[last]))
        return found

    def save(self) -> dict[str, Any]:
        return self._engine.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        self._engine.load_state_dict(state)


class InlineGenerator(Generator):
    """In the trainer's process: a command runs when its result is asked for. The decoder has weights of its own, which
    change only at `update_weights`."""

    devices = 0

    def __init__(self, config: RunConfig, model_path: Path, sampling: Sampling) -> None:
        super().__init__()
        self._core = GeneratorCore(config, model_path, sampling, self._abandoned)
        self._pending: tuple[str, tuple[Any, ...]] | None = None

    def begin(self, command: str, *args: Any) -> None:
        self._pending = (command, args)

    def finish(self) -> Outcome:
        assert self._pending is not None, "finish without begin"
        (command, args), self._pending = self._pending, None
        return self._core.execute(command, *args)

    def update_weights(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        self._core.update_weights(state, version)

    def close(self) -> None:
        pass


class BesideGenerator(Generator):
    """In a process of its own. Weights go through shared memory, which the child reads only while the parent waits."""

    devices = 1

    def __init__(self, config: RunConfig, model_path: Path, sampling: Sampling) -> None:
        super().__init__()
        # Forking is four times as fast as spawning, but a process that has used CUDA must not fork.
        cuda = "cuda" in (config.engine.device + config.trainer.device)
        context: Any = mp.get_context("spawn" if cuda else "fork")
        self._connection, theirs = context.Pipe()
        self._shared: dict[str, torch.Tensor] | None = None
        self._process = context.Process(
            target=_serve,
            args=(theirs, self._connection, config, model_path, sampling, self._abandoned),
            daemon=True,
        )
        self._process.start()
        atexit.register(self.close)  # multiprocessing would send it SIGTERM, which it ignores, and wait for ever
        theirs.close()
        self._receive()  # ready, or the error that kept it from starting

    def begin(self, command: str, *args: Any) -> None:
        self._send(command, *args)

    def finish(self) -> Outcome:
        return self._receive()

    def update_weights(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        if self._shared is None:
            self._shared = {name: torch.empty_like(t, device="cpu").share_memory_() for name, t in state.items()}
            self._send("share", self._shared)
            self._receive()
        for name, tensor in state.items():
            self._shared[name].copy_(tensor)
        self._send("update_shared", version)
        self._receive()

    def close(self) -> None:
        atexit.unregister(self.close)
        self._connection.close()
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.kill()

    def _send(self, command: str, *args: Any) -> None:
        try:
            self._connection.send((command, args))
        except OSError:
            raise self._died() from None

    def _died(self) -> RunEnded:
        self._process.join(timeout=10)
        return RunEnded(
            f"the generator's process died with exit code {self._process.exitcode} (-9: perhaps for want of memory); "
            "go on with --resume"
        )

    def _receive(self) -> Any:
        try:
            kind, value = self._connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if kind == "error":
            raise value
        return value


def _serve(
    connection: Any, parents_end: Any, config: RunConfig, model_path: Path, sampling: Sampling, abandoned: Any
) -> None:
    parents_end.close()  # else the pipe would not end when the parent is killed
    leave_signals_to_parent()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    set_up_process(config.engine.threads)
    try:
        handle = _handler(GeneratorCore(config, model_path, sampling, abandoned))
        connection.send(("ok", None))
        while True:
            command, args = connection.recv()
            connection.send(("ok", handle(command, args)))
    except (EOFError, BrokenPipeError):
        return  # the parent has gone
    except (UserError, RunEnded) as error:
        connection.send(("error", error))
    except Exception as error:
        import traceback

        connection.send(("error", RuntimeError(f"in the generator process: {error}\n{traceback.format_exc()}")))


def _end_with_parent() -> None:
    """A killed parent can't say so, and a command may take minutes."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _handler(core: GeneratorCore) -> Callable[[str, tuple[Any, ...]], Any]:
    shared: dict[str, torch.Tensor] = {}

    def handle(command: str, args: tuple[Any, ...]) -> Any:
        if command == "share":
            shared.update(args[0])
            return None
        if command == "update_shared":
            core.update_weights(shared, args[0])
            return None
        return core.execute(command, *args)

    return handle


def build_generator(config: RunConfig, model_path: Path, sampling: Sampling) -> Generator:
    """The engine that the configuration asks for. Raises UserError where it can't be had."""
    if config.engine.kind == "sglang":
        from scalerl.rl.engines.sglang.generator import SGLangGenerator

        return SGLangGenerator(config, model_path, sampling)
    kind = {"beside": BesideGenerator, "inline": InlineGenerator}[config.engine.process]
    return kind(config, model_path, sampling)
