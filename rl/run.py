"""A run from start to end: dispatch, generate, score, train, evaluate, log."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from scalerl.rl.checkpoint import Checkpoint, CheckpointWriter, load_last_checkpoint, tidy_checkpoints
from scalerl.rl.config import BuiltinModel, RunConfig
from scalerl.rl.engines.generator import build_generator
from scalerl.rl.engines.interface import Generator, Outcome
from scalerl.rl.engines.torch_engine import Work
from scalerl.rl.errors import Preempted, RunEnded, UserError
from scalerl.rl.evaluation import Evaluator
from scalerl.rl.health import Health
from scalerl.rl.ledger import Ledger
from scalerl.rl.lock import lock_run
from scalerl.rl.models.load import find_model
from scalerl.rl.models.tokenizer import load_tokenizer
from scalerl.rl.models.warm_start import prepare_builtin
from scalerl.rl.preemption import Stop, leave_signals_to_parent
from scalerl.rl.process import set_up_process
from scalerl.rl.progress import Progress
from scalerl.rl.prompt_room import PromptRoom
from scalerl.rl.requests import Requests, build_sampling
from scalerl.rl.resume import check_changes, is_complete, record_resume, write_changes
from scalerl.rl.runlog import RunLog, create_run_dir, read_config
from scalerl.rl.sampler import build_sampler
from scalerl.rl.schedule import build_schedule
from scalerl.rl.scoring import Unscored, score
from scalerl.rl.sharding import join_world, launched, require_device
from scalerl.rl.tasks import DemonstratedTask, Task, build_task
from scalerl.rl.trainer import NonFinite, Prepared, Trainer, follow
from scalerl.rl.types import CompletedGroup, Prompt, ScoredGroup


def start_run(config: RunConfig, sources: Mapping[str, str]) -> Path:
    """Train from step 0 into a new run folder; returns the folder.

    Raises UserError on bad input, with no folder left behind, RunEnded where the run can't go on, and Preempted where a
    signal stopped it."""
    if launched()[0]:
        follow_run(config)
        return Path(config.run_dir)
    new_parent = not Path(config.run_dir).parent.exists()
    path = create_run_dir(config, sources)
    with lock_run(path), Stop() as stop:
        try:
            run = Run(config, path, stop)
        except UserError:
            shutil.rmtree(path)
            if new_parent:
                with suppress(OSError):  # another run may be in it by now
                    path.parent.rmdir()
            raise
        run.train()
    return path


def resume_run(path: Path, wanted: RunConfig | None = None, *, allow_change: bool = False) -> None:
    """Go on with the run in `path` from its last checkpoint, or from its start where it has none.

    wanted: the configuration to go on with, the one in `path` where None. What was logged after the checkpoint is
    written anew; its device hours are booked as wasted. Raises UserError where `path` is no run, where another process
    works on it, or where the configuration isn't the checkpoint's and the change isn't allowed, and otherwise as
    `start_run`."""
    written = read_config(path)
    config = wanted or written
    if launched()[0]:
        return follow_run(config)
    with lock_run(path):
        _resume(path, written, config, allow_change=allow_change)


def _resume(path: Path, written: RunConfig, config: RunConfig, *, allow_change: bool) -> None:
    tidy_checkpoints(path)
    checkpoint = load_last_checkpoint(path)
    changes = check_changes(written, config, checkpoint, allowed=allow_change)
    if checkpoint is not None and is_complete(checkpoint.state, config):
        print(f"run {path} is complete at step {checkpoint.state['ledger']['step']}: nothing is left to resume")
        return
    with Stop() as stop:
        run = Run(config, path, stop)
        if checkpoint is not None:
            run.load(checkpoint)
        if changes:
            write_changes(path, config, changes)
        run.ledger.wasted_device_hours = record_resume(path, run.ledger.step, run.ledger.hours, changes)
        run.log.cut_after(run.ledger.step if checkpoint is not None else -1, run.evaluated)
        if changes and checkpoint is not None:
            run.save()  # a checkpoint holds its configuration: the change needn't be allowed again
        run.train()


def follow_run(config: RunConfig) -> None:
    """The part of the ranks but 0 in a run under torchrun: the trainer's other shards, until rank 0 is done."""
    leave_signals_to_parent()
    set_up_process(config.trainer.threads)
    world = join_world(config.trainer.device)
    config, model_path = world.broadcast(None)
    follow(Trainer(config, model_path, world))


class Run:
    """The parts of one run and its main loop."""

    def __init__(self, config: RunConfig, path: Path, stop: Stop | None = None) -> None:
        set_up_process(config.trainer.threads)
        self.config, self.path, self._stop = config, path, stop or Stop()
        require_device("trainer.device", config.trainer.device)
        if config.engine.kind == "torch":
            require_device("engine.device", config.engine.device)
        self.task = build_task(config.task)
        model_path = model_folder(config, self.task)
        self.tokenizer = load_tokenizer(model_path)
        self.requests = Requests(config, self.tokenizer)
        keep = PromptRoom.of_run(config, model_path, self.requests).keep
        self.evaluator = Evaluator(config, self.task, self.tokenizer, self.requests, keep)
        self.schedule = build_schedule(config.recipe, config.steps)
        self.sampler = build_sampler(self.task, config, keep)
        # The generator starts before anything that runs threads: it may fork.
        self.generator: Generator = build_generator(config, model_path, build_sampling(config, self.tokenizer))
        world = join_world(config.trainer.device)
        world.broadcast((config, model_path))
        self.trainer = Trainer(config, model_path, world)
        self.ledger = Ledger(devices=world.size + self.generator.devices)
        self.open: dict[int, tuple[int, Prompt]] = {}  # dispatched and untrained: group -> (epoch, prompt)
        self.completed: dict[int, CompletedGroup] = {}  # of these, what the generator has finished
        self.generator_version = 0
        self.evaluated = -1  # the last step whose evaluation is whole
        self.log = RunLog(path, config)
        self._checkpoints = CheckpointWriter(path, config.trainer.keep_checkpoints)
        self._ended: RunEnded | None = None
        self._window_open = False
        self._bad_steps = 0
        self._saved_at = 0
        self._work, self._eval_work = Work(), Work()
        self._clock = _Clock()
        self._stop.on_request = self.generator.abandon
        if self._stop.requested:
            self.generator.abandon()

    def train(self) -> None:
        """Go on from the ledger's step to the last one, to where the prompts run out (RunEnded, log complete), or to
        where a signal asks for the end (Preempted, with a checkpoint)."""
        with Progress(self.config.steps, self.ledger.step) as self._progress:
            self._health = Health(self.config.trainer.alarms, self._progress.warn)
            try:
                self._loop()
                self.save()
                self._checkpoints.wait()
                self.trainer.close()
            finally:
                self.generator.close()
                self._checkpoints.close()
                self.log.close()
        if not self.schedule.done or self._evaluation_due():
            raise Preempted(f"at step {self.ledger.step}, resume with: scalerl train --resume {self.path}")
        if self._ended is not None:
            raise self._ended

    def _loop(self) -> None:
        """Ends when everything is done or a signal has come; either way a checkpoint may be taken."""
        while not self._stop.requested:
            if self._evaluation_due() and not self._evaluate():
                return
            if self.schedule.done:
                return
            self._save_if_due()
            self._clock.restart()
            self._dispatch()
            if not self.schedule.done:
                self._train_round()

    def _dispatch(self) -> None:
        """Hand out as many groups as the schedule allows. Where the prompts run out, the run ends with the last whole
        batch that was dispatched."""
        requests = []
        try:
            for _ in range(self.schedule.may_dispatch()):
                group, epoch, prompt = self.sampler.next()
                self.open[group] = (epoch, prompt)
                requests.append(self.requests.training(group, prompt))
        except RunEnded as ended:
            self._ended = ended
        self.schedule.dispatch(len(requests))
        if self._ended is not None:
            self.schedule.end = (
                self.schedule.dispatched // self.schedule.prompts_per_batch * self.schedule.prompts_per_batch
            )
        self.generator.call("submit", requests)

    def _train_round(self) -> None:
        """The batches between two moves of the generator's weights, each passed over `updates_per_batch` times."""
        recipe = self.config.recipe
        batches = self.schedule.next_round()
        missing = [group for batch in batches for group in batch if group not in self.completed]
        if missing:
            self._collect(self.generator.call("run_until", missing))
            if not self.completed.keys() >= set(missing):
                self._clock.lap(self.ledger)
                return  # abandoned; a resumed run goes on with these ticks
        scored = [self._score(batch) for batch in batches]
        if recipe.off_policy == "pipeline":
            self.generator.begin("window")
            self._window_open = True
        prepared: list[Prepared] = []
        metrics: list[dict[str, Any]] = [{} for _ in batches]
        for number in range(recipe.updates_per_batch):
            for i, groups in enumerate(scored):
                with self._clock.trainer():
                    if number == 0:
                        # With one pass the batches before this one have moved the version already.
                        ahead = sum(not p.batch.empty for p in prepared) if recipe.updates_per_batch > 1 else 0
                        prepared.append(self.trainer.prepare(groups, self.ledger.version + ahead))
                    metrics[i] |= self._update(prepared[i])
                if number == recipe.updates_per_batch - 1:
                    self._finish_batch(groups, prepared[i], metrics[i])
                    if i < len(scored) - 1 and self._evaluation_due():
                        # These weights are gone after the round's next batch, and no checkpoint is taken within one.
                        self._evaluate(to_the_end=True)
                        self._clock.restart()
        start = time.perf_counter()
        self._sync()
        self.ledger.add_sync(time.perf_counter() - start)

    def _update(self, prepared: Prepared) -> dict[str, Any]:
        """One optimiser step, or none where nothing survived or the gradient is not finite."""
        if prepared.batch.empty:
            return {"skipped": "nothing survives the zero-variance filter"}
        self.ledger.train_tokens += self.trainer.train_tokens(prepared)
        try:
            metrics = self.trainer.update(prepared, self.ledger.step)
        except NonFinite as error:
            self._bad_steps += 1
            self._progress.warn(f"step {self.ledger.step + 1} skipped: {error}")
            if self._bad_steps >= self.config.trainer.max_bad_steps:
                raise RunEnded(
                    f"{self._bad_steps} steps in a row were not finite (last: {error}); lower trainer.lr "
                    f"({self.config.trainer.lr}) or trainer.clip_norm ({self.config.trainer.clip_norm})"
                ) from None
            return {"skipped": str(error)}
        self._bad_steps = 0
        self.ledger.optimizer_steps += 1
        return {**metrics, "stepped": True}

    def _finish_batch(self, groups: Sequence[ScoredGroup], prepared: Prepared, metrics: dict[str, Any]) -> None:
        """Count a trained batch and log it."""
        if self._window_open:
            self._collect(self.generator.finish())
            self._window_open = False
        self.schedule.finish_batch()
        for group in groups:
            judged = ~group.verifier_error
            self.sampler.record(group.group, int(group.correct.sum()), int(judged.sum()))
            del self.open[group.group], self.completed[group.group]
        ledger = self.ledger
        ledger.step += 1
        self.trainer.finish_batch(ledger.step)
        if metrics.pop("stepped", False):
            ledger.version += 1
        else:
            ledger.skipped_steps += 1
        ledger.samples += sum(len(group.completions) for group in groups)
        ledger.generated_tokens = self._work.generated_tokens
        ledger.flops = self.trainer.flops + self._flops(self._work)
        wall = self._clock.lap(ledger)
        row = {
            **ledger.axes(),
            "skipped_steps": ledger.skipped_steps,
            "epoch": groups[0].epoch,
            "retired_prompts": self.sampler.n_retired,
            **prepared.batch.stats,
            **metrics,
            "tokens_per_second": ledger.generated_tokens / (ledger.training_hours * 3600),
            "seconds": wall,
        }
        row["alarms"] = self._health.check(row)
        self.log.training_step(row)
        self._progress.step(row)

    def _evaluation_due(self) -> bool:
        step = self.ledger.step
        return self.evaluated < step and (step % self.config.eval.every == 0 or self.schedule.done)

    def _evaluate(self, *, to_the_end: bool = False) -> bool:
        """Evaluate the current weights on every set, apart from the training clock; False where a signal cut it short,
        which `to_the_end` rules out."""
        start, step = time.perf_counter(), self.ledger.step
        self._sync()
        for number in range(len(self.evaluator.sets)):
            requests = self.evaluator.requests(number, step)
            outcome = self.generator.call("evaluate", requests, self.ledger.version, to_the_end)
            if not outcome.groups:
                return False
            rows = self.evaluator.rows(number, step, outcome.groups)
            flops = self._flops(outcome.eval_work) - self._flops(self._eval_work)
            self._eval_work = outcome.eval_work
            self.ledger.add_evaluation(time.perf_counter() - start, flops)
            start = time.perf_counter()
            for row, prompts in rows:
                row = {"set": row.pop("set"), **self.ledger.axes(), **row}
                self.log.evaluation(row, prompts)
                self._progress.evaluation(row)
        self.evaluated = self.ledger.step
        return True

    def _sync(self) -> None:
        """Give the generator the current weights, unless it has them."""
        if self.generator_version != self.ledger.version:
            self.generator.update_weights(self.trainer.weights(), self.ledger.version)
            self.generator_version = self.ledger.version

    def _collect(self, outcome: Outcome) -> None:
        self.completed |= {group.group: group for group in outcome.groups}
        self._work = outcome.work
        self._clock.generator_busy += outcome.busy

    def _score(self, batch: Sequence[int]) -> list[ScoredGroup]:
        groups = []
        for group in batch:
            epoch, prompt = self.open[group]
            groups.append(Unscored(self.completed[group], prompt, self.requests.encode(prompt), epoch))
        return score(groups, task=self.task, tokenizer=self.tokenizer)

    def _flops(self, work: Work) -> float:
        model = self.trainer.flop_model
        return model.forward(work.decode_tokens + work.prefill_tokens, work.decode_context + work.prefill_context)

    def _save_if_due(self) -> None:
        every = self.config.trainer.save_every
        if every and self.ledger.step // every > self._saved_at // every:
            self.save()

    def save(self) -> None:
        """Begin a checkpoint of the present state, which must lie between two rounds."""
        start = time.perf_counter()
        self.log.sync()
        self._checkpoints.save(self.ledger.step, self.state_dict(), self.trainer.save)
        self._saved_at = self.ledger.step
        self.ledger.add_checkpoint(time.perf_counter() - start)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on but the trainer's tensors; completions in flight with their
        stale KV cache are among it. Random draws are functions of seeds and numbers, so there is no generator state."""
        return {
            "config": self.config.model_dump(mode="json"),
            "ledger": self.ledger.state_dict(),
            "trainer": self.trainer.state_dict(),
            "sampler": self.sampler.state_dict(),
            "evaluation": self.evaluator.state_dict(),
            "schedule": self.schedule.state_dict(),
            "evaluated": self.evaluated,
            "ended": self._ended and str(self._ended),
            "bad_steps": self._bad_steps,
            "open": self.open,
            "completed": self.completed,
            "generator": self.generator.call("save").state,
        }

    def load(self, checkpoint: Checkpoint) -> None:
        """Take up a checkpoint; more `steps` than it was made for lengthen the schedule."""
        state = checkpoint.state
        for name in ("ledger", "sampler", "schedule"):
            getattr(self, name).load_state_dict(state[name])
        chosen, drawn = state["config"]["eval"], self.config.eval
        if (chosen["n_prompts"], chosen["seed"]) == (drawn.n_prompts, drawn.seed):  # else a change that was asked for
            self.evaluator.check_state(state.get("evaluation", {}))
        self.trainer.load(checkpoint.folder, state["trainer"])
        self.open, self.completed, self.evaluated = state["open"], state["completed"], state["evaluated"]
        self._ended, self._bad_steps = state["ended"] and RunEnded(state["ended"]), state["bad_steps"]
        self.generator.update_weights(self.trainer.weights(), self.ledger.version)
        self.generator_version = self.ledger.version
        self._saved_at = self.ledger.step
        loaded = self.generator.call("load", state["generator"])
        self._work, self._eval_work = loaded.work, loaded.eval_work
        if self.config.steps != state["config"]["steps"]:
            self.schedule.end, self._ended = self.config.steps * self.schedule.prompts_per_batch, None


class _Clock:
    """Wall time of training between evaluations, and each side's share of work in it."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._start = time.perf_counter()
        self.generator_busy = 0.0
        self._trainer_busy = 0.0

    @contextmanager
    def trainer(self) -> Iterator[None]:
        """The trainer works inside."""
        start = time.perf_counter()
        yield
        self._trainer_busy += time.perf_counter() - start

    def lap(self, ledger: Ledger) -> float:
        """Book the seconds since the last restart or lap, and return them."""
        wall = time.perf_counter() - self._start
        ledger.add_training(wall, self.generator_busy, self._trainer_busy)
        self.restart()
        return wall


def model_folder(config: RunConfig, task: Task) -> Path:
    """The Hugging Face folder of the initial policy; the built-in one is made, or taken from its cache. Raises
    UserError where there is none."""
    if isinstance(config.model, BuiltinModel):
        if not isinstance(task, DemonstratedTask):
            raise UserError(
                f"the built-in model learns from demonstrations, which the task {task.name} has not; choose model=hf "
                "model.path=PATH"
            )
        return prepare_builtin(config.model, task, config.task).path
    return find_model(config.model.path)
