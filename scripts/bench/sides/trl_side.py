"""TRL's side of against_trl.py: GRPOTrainer, making a step for each line on its standard input, answers with JSON.

The arguments are scalerl's configuration, a JSON file, whose values TRL is given; the model's folder; completions that
go through the model at once; and threads of this process. Several processes, told by RANK and WORLD_SIZE, share the
batch (DDP, gloo). Task, verifier and held-out evaluation are scalerl's own."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from scalerl.rl.config import RunConfig
from scalerl.rl.engines.decoder import load_decoder
from scalerl.rl.engines.torch_engine import TorchEngine
from scalerl.rl.evaluation import Evaluator
from scalerl.rl.models.tokenizer import load_tokenizer
from scalerl.rl.requests import Requests, build_sampling
from scalerl.rl.tasks import Task, build_task, verdicts

trl: Any = importlib.import_module("trl")  # of this environment, not of scalerl's
datasets: Any = importlib.import_module("datasets")

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
FIRST = int(os.environ.get("RANK", "0")) == 0


class Timed(trl.GRPOTrainer):
    """Counts the seconds of generation, scoring included, and the tokens."""

    generation = 0.0
    generated_tokens = trained_tokens = 0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        start = time.perf_counter()
        made = super()._generate_and_score_completions(inputs)
        self.generation += time.perf_counter() - start
        completion = int(made["completion_mask"].sum()) * RANKS
        self.generated_tokens += completion
        self.trained_tokens += completion + int(made["prompt_mask"].sum()) * RANKS
        return made


class Turns(TrainerCallback):
    """After each step the first process answers, and all wait for its next line."""

    def __init__(self, evaluate: Any, every: int) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is no answer
        self._evaluate, self._every = evaluate, every
        self.trainer: Any = None
        self._passed: list[float] = []

    def rewarded(self, rewards: list[float]) -> None:
        self._passed += [float(reward > 0) for reward in rewards]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._answer({}, 0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if FIRST and not sys.stdin.readline():
            os._exit(0)
        if RANKS > 1:
            torch.distributed.barrier()
        self._start, self._before = time.perf_counter(), self._totals()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seconds = time.perf_counter() - self._start
        spent = {name: total - self._before[name] for name, total in self._totals().items()}
        passed, self._passed = self._passed, []
        rate = sum(passed) / len(passed)
        self._answer(
            {"seconds": seconds, **spent, "training": seconds - spent["generation"], "reward_pass_rate": rate},
            state.global_step,
        )

    def _totals(self) -> dict[str, float]:
        return {name: getattr(self.trainer, name) for name in ("generation", "generated_tokens", "trained_tokens")}

    def _answer(self, message: dict[str, Any], step: int) -> None:
        if not FIRST:
            return
        evaluations = []
        if step % self._every == 0:
            evaluations.append({"step": step, "pass_rate": self._evaluate(self.trainer.model, step)})
        self._answers.write(json.dumps({**message, "evaluations": evaluations}) + "\n")
        self._answers.flush()


def evaluation(config: RunConfig, task: Task, tokenizer: Any) -> Any:
    """(model, step) -> pass rate on scalerl's held-out set, sampled by scalerl's engine."""
    requests = Requests(config, tokenizer)
    evaluator, sampling = Evaluator(config, task, tokenizer, requests), build_sampling(config, tokenizer)
    assert config.engine.kind == "torch"
    slots = config.engine.slots

    def evaluate(model: Any, step: int) -> float:
        decoder = load_decoder(model, dtype=torch.float32, head_dtype=torch.float32, device="cpu")
        engine, done = TorchEngine(decoder, slots=slots, sampling=sampling), []
        engine.submit(evaluator.requests(0, step))
        while not engine.idle:
            done += engine.tick()
        return evaluator.rows(0, step, done)[0][0]["pass_rate"]

    return evaluate


def arguments(config: RunConfig, at_once: int) -> Any:
    """scalerl's configuration in TRL's words: fp32, no checkpointing, CISPO whose epsilon_high is eps_max."""
    recipe, trainer = config.recipe, config.trainer
    completions = recipe.prompts_per_batch * recipe.group_size
    return trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=completions // (at_once * RANKS),
        num_generations=recipe.group_size,
        max_completion_length=recipe.generation_budget,
        temperature=recipe.sampling.temperature,
        loss_type="cispo",
        epsilon_high=recipe.loss_params["cispo"]["eps_max"],
        beta=0.0,
        scale_rewards={"batch": "batch", "prompt": "group", "none": "none"}[recipe.advantage_norm],
        mask_truncated_completions=recipe.truncation == "mask",
        learning_rate=trainer.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=trainer.warmup_steps,
        adam_beta1=trainer.betas[0],
        adam_beta2=trainer.betas[1],
        adam_epsilon=trainer.eps,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.clip_norm,
        max_steps=config.steps,
        seed=config.seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )


def main() -> None:
    config = RunConfig.model_validate_json(Path(sys.argv[1]).read_text())
    model_path, at_once, threads = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(threads)
    task, tokenizer = build_task(config.task), load_tokenizer(model_path)
    prompts = {prompt.id: prompt for prompt in task.train_prompts()}
    turns = Turns(evaluation(config, task, tokenizer), config.eval.every)
    stop = tokenizer.eos_token_id

    def reward(completion_ids: list[list[int]], id: list[str], **kwargs: Any) -> list[float]:
        """+1 or -1; a truncated completion is not correct, and special tokens are part of what the verifier reads."""
        ended = [bool(ids) and ids[-1] == stop for ids in completion_ids]
        pairs = [(prompts[i], tokenizer.decode(ids[:-1])) for i, ids in zip(id, completion_ids, strict=True)]
        found = verdicts(task, pairs)
        rewards = [1.0 if end and verdict.correct else -1.0 for end, verdict in zip(ended, found, strict=True)]
        turns.rewarded(rewards)
        return rewards

    turns.trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
        reward_funcs=reward,
        args=arguments(config, at_once),
        train_dataset=datasets.Dataset.from_list([{"prompt": p.text, "id": p.id} for p in prompts.values()]),
        processing_class=tokenizer,
        callbacks=[turns],
    )
    turns.trainer.train()


if __name__ == "__main__":
    main()
