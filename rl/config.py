"""The typed configuration of a run. Hydra composes it from `conf/`; it is validated here, once, and then frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from scalerl.rl.recipe import Count, NonNegative, Off, Positive, Recipe, Share, Strict

DType = Literal["float32", "bfloat16"]


def _device(name: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"cpu, cuda, or one GPU such as cuda:1, and not {name}")
    return name


Device = Annotated[str, AfterValidator(_device)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Architecture(Strict):
    """A Llama-style decoder with tied embeddings; the vocabulary is the task tokenizer's."""

    hidden_size: Count
    layers: Count
    heads: Count
    kv_heads: Count
    intermediate_size: Count
    max_positions: Count
    rope_theta: Positive
    initializer_range: Positive

    @model_validator(mode="after")
    def _heads_divide(self) -> Architecture:
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of heads={self.heads}, and that of "
                f"kv_heads={self.kv_heads}"
            )
        if self.hidden_size // self.heads % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} over heads={self.heads} must be even: positions are rotations of pairs"
            )
        return self


class WarmStart(Strict):
    """Supervised phase on the task's demonstrations that gives the initial policy; cached by content."""

    steps: Annotated[int, Field(ge=0)]
    batch_size: Count
    lr: Positive
    seed: Seed


class BuiltinModel(Strict):
    """A small transformer made here and warm-started on the task's own demonstrations."""

    kind: Literal["builtin"]
    architecture: Architecture
    warm_start: WarmStart
    cache_dir: str
    dtype: DType
    head_dtype: DType


class HFModel(Strict):
    """Any Hugging Face causal LM: a folder, or an id of the hub."""

    kind: Literal["hf"]
    path: str
    dtype: DType
    head_dtype: DType


Model = Annotated[BuiltinModel | HFModel, Field(discriminator="kind")]


class Demonstrations(Strict):
    """Faults of the warm start's teacher: a share of demonstrations never propagates the carry, and each column sum
    is off by one with probability `slip`."""

    no_carry: Annotated[float, Field(ge=0, le=1)]
    slip: Annotated[float, Field(ge=0, le=1)]


class AdditionTask(Strict):
    """a + b worked column by column inside <think>, answered after it."""

    kind: Literal["addition"]
    min_digits: Count
    max_digits: Annotated[int, Field(ge=1, le=17)]  # operands one digit longer still fit into 64 bits
    n_train: Count
    seed: Seed
    wrong_keys: Annotated[float, Field(ge=0, le=0.5)]
    demonstrations: Demonstrations

    @model_validator(mode="after")
    def _digits(self) -> AdditionTask:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits={self.min_digits} is above max_digits={self.max_digits}")
        return self


class CountdownTask(Strict):
    """Reach a target from a few numbers with + - *, each used once."""

    kind: Literal["countdown"]
    numbers: Annotated[int, Field(ge=2, le=4)]
    max_number: Count
    tries: Count  # expressions that a demonstration tries
    n_train: Count
    seed: Seed


def _none_is_held_out(files: dict[str, str]) -> dict[str, str]:
    if "held_out" in files:
        raise ValueError("'held_out' is the set of task.data.held_out; give this one another name")
    return files


class Data(Strict):
    """Files of prompts and answers, JSONL or Parquet. Columns without a name are recognised. Without a held-out file
    `n_held_out` prompts of the training file are held out."""

    train: str
    held_out: str | None
    n_held_out: Count
    seed: Seed
    prompt_column: str | None
    answer_column: str | None
    exclude: str | None  # prompts that must not be trained on, a file
    extra: Annotated[dict[str, str], AfterValidator(_none_is_held_out)]  # further evaluation sets, name -> file


def _holds_prompt(template: str) -> str:
    if "{prompt}" not in template:
        raise ValueError("the template has no {prompt}, where the prompt's text goes")
    return template


class Asking(Strict):
    """How a prompt is put to the model. `template` holds `{prompt}`; it is the user's turn where the model has a chat
    template, and the completion goes on from `prefill` (as `<think>`, where the template doesn't open it). Without
    `chat` the model reads the template and nothing else, whether it has a chat template or not."""

    template: Annotated[str, AfterValidator(_holds_prompt)]
    chat: bool
    system: str | None
    prefill: str

    @model_validator(mode="after")
    def _turns_need_a_chat(self) -> Asking:
        if not self.chat and (self.system is not None or self.prefill):
            raise ValueError(
                "chat=false puts the template alone: write system and prefill into it, and leave them empty"
            )
        return self


class Reward(Strict):
    """Of completions without an answer: `mask` leaves them out of training, `score` counts them wrong; then their
    reward is lower than a wrong answer's by `format_penalty`."""

    unparsed: Literal["mask", "score"]
    format_penalty: NonNegative


class MathTask(Strict):
    """Prompts from files, answers in a box, compared by math-verify in processes with a time limit."""

    kind: Literal["math"]
    data: Data
    asking: Asking
    reward: Reward
    workers: Count
    time_limit: Positive  # seconds an answer may take


class CodeTask(Strict):
    """Prompts from files, answered by Python programs that are run on tests in a sandbox."""

    kind: Literal["code"]
    data: Data
    asking: Asking
    reward: Reward
    workers: Count
    time_limit: Positive  # seconds a test may take
    memory: Count  # MiB of address space
    max_tests: Count  # of a prompt, the first ones


class PythonTask(Strict):
    """The user's own module: `prompts()` gives rows with prompt and answer, `verify(completion, answer)` a verdict."""

    kind: Literal["python"]
    module: str  # a file
    n_held_out: Count
    seed: Seed
    asking: Asking
    workers: Count
    time_limit: Positive  # seconds a verdict may take


class SumsTask(Strict):
    """a + b of numbers up to `largest`, for pretrained models."""

    kind: Literal["sums"]
    largest: Count
    seed: Seed
    asking: Asking
    reward: Reward


class ReasoningGymTask(Strict):
    """One task of the library reasoning-gym, with its own scorer."""

    kind: Literal["reasoning_gym"]
    name: str
    parameters: dict[str, Any]
    n_train: Count
    n_held_out: Count
    seed: Seed
    pass_score: Share  # from which an answer counts as correct
    asking: Asking
    reward: Reward
    workers: Count
    time_limit: Positive  # seconds a score may take


PartTask = Annotated[MathTask | CodeTask | PythonTask | ReasoningGymTask | SumsTask, Field(discriminator="kind")]


class MixtureTask(Strict):
    """Several tasks, each with its weight in training and a held-out curve of its own."""

    kind: Literal["mixture"]
    tasks: dict[str, PartTask]
    weights: dict[str, Positive]

    @model_validator(mode="after")
    def _each_has_a_weight(self) -> MixtureTask:
        if set(self.tasks) != set(self.weights) or not self.tasks:
            raise ValueError(f"weights are of {sorted(self.weights)}, tasks of {sorted(self.tasks)}: name them alike")
        if reserved := {"held_out"} & set(self.tasks):
            raise ValueError(f"'{min(reserved)}' is the name of the set of all tasks; name the task otherwise")
        return self


Task = Annotated[
    AdditionTask | CountdownTask | SumsTask | MathTask | CodeTask | PythonTask | ReasoningGymTask | MixtureTask,
    Field(discriminator="kind"),
]


class TorchEngineConfig(Strict):
    """The embedded engine. `process`: `beside` generates in a process of its own while the trainer works, `inline` in
    the trainer's; both give the same run to the bit."""

    kind: Literal["torch"]
    slots: Count
    ticks_per_step: Count
    process: Literal["beside", "inline"]
    threads: Count
    device: Device
    logits_precision: Literal["fp32", "model"] | None

    @property
    def kv(self) -> dict[str, str]:
        """What becomes of the keys and values of a completion in progress."""
        return {"kv_after_update": "kept", "kv_after_interruption": "kept", "kv_after_evaluation": "kept"}


class Alarms(Strict):
    """Thresholds of `rl/health.py`; None turns an alarm off."""

    truncation: Positive | None
    truncation_unstable: Positive | None
    entropy: Positive | None
    mismatch_k3: Positive | None
    extreme_share: Positive | None
    grad_norm: Positive | None


class SGLangEngineConfig(Strict):
    """One or many SGLang servers: started and stopped by the run, or given as `urls`. Times are in seconds."""

    kind: Literal["sglang"]
    urls: tuple[str, ...]
    servers: Count
    python: str
    device: Literal["cpu", "cuda"]
    tensor_parallel: Count
    first_gpu: Annotated[int, Field(ge=0)]
    host: str
    port: Annotated[int, Field(ge=0, le=65535)]
    threads: Count
    arguments: tuple[str, ...]
    concurrency: Count
    kv_tokens: Count | None
    update: Literal["in_place", "retract", "drained"]
    transfer: Literal["broadcast", "disk"]
    check_weights: bool
    bucket_mb: Count
    start_limit: Positive
    transfer_limit: Positive
    stall_limit: Positive
    max_restarts: Annotated[int, Field(ge=0)]
    logits_precision: Literal["fp32", "model"] | None

    @property
    def n_servers(self) -> int:
        return len(self.urls) or self.servers

    @property
    def kv(self) -> dict[str, str]:
        """What becomes of the keys and values of a completion in progress."""
        after_update = {"in_place": "kept", "retract": "recomputed", "drained": "none in progress"}[self.update]
        return {
            "kv_after_update": after_update,
            "kv_after_interruption": "recomputed",
            "kv_after_evaluation": "recomputed",
        }


Engine = Annotated[TorchEngineConfig | SGLangEngineConfig, Field(discriminator="kind")]


class Trainer(Strict):
    lr: Positive
    warmup_steps: Annotated[int, Field(ge=0)]
    betas: tuple[Decay, Decay]
    eps: Positive
    weight_decay: NonNegative
    clip_norm: Positive
    micro_batch_tokens: Count  # padded tokens put through the model at once
    layout: Literal["padded", "packed", "shared"]  # of sequences in a micro-batch, see rl/micro_batches.py
    logprob_chunk: Count  # tokens whose logits are in memory at once
    activation_checkpointing: bool
    threads: Count
    device: Device
    save_every: Annotated[int, Field(ge=0)]  # 0: only at the end
    keep_checkpoints: Count
    max_bad_steps: Count
    alarms: Alarms


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("each set once")
    return names


class Eval(Strict):
    every: Count
    n_prompts: Count
    n_samples: Count
    seed: Seed
    extra: Annotated[tuple[str, ...], AfterValidator(_each_once)]


class Log(Strict):
    wandb: Annotated[Literal["off", "online", "offline"], Off]
    project: str
    name: str | None
    group: str | None


class RunConfig(Strict):
    """Everything that a run depends on; `config.json` is its dump."""

    seed: Seed
    steps: Count
    run_dir: Annotated[str, BeforeValidator(str)]
    recipe: Recipe
    model: Model
    task: Task
    engine: Engine
    trainer: Trainer
    eval: Eval
    log: Log

    @model_validator(mode="after")
    def _one_head_precision(self) -> RunConfig:
        if self.engine.logits_precision not in (None, self.recipe.logits_precision):
            raise ValueError(
                f"engine.logits_precision={self.engine.logits_precision} but recipe.logits_precision="
                f"{self.recipe.logits_precision}: with fp32 on one side only the two disagree; set both alike"
            )
        return self

    @model_validator(mode="after")
    def _kl_is_of_known_tasks(self) -> RunConfig:
        """A recipe may name tasks that this run lacks, but none that there isn't."""
        known = {kind.model_fields["kind"].annotation.__args__[0] for kind in get_args(get_args(Task)[0])}
        match self.task:
            case MixtureTask(tasks=tasks):
                known |= set(tasks)
            case ReasoningGymTask(name=name):
                known.add(name)
        if unknown := set(self.recipe.kl_params.beta_by_task) - known:
            raise ValueError(
                f"recipe.kl_params.beta_by_task: no task '{min(unknown)}'; this run knows {', '.join(sorted(known))}"
            )
        return self

    @model_validator(mode="after")
    def _prompts_can_be_shared(self) -> RunConfig:
        if self.trainer.layout == "shared":
            if self.trainer.activation_checkpointing:
                raise ValueError(
                    "trainer.layout=shared with trainer.activation_checkpointing=true: a block that is computed again "
                    "would store the prompt's keys and values again; set one of them otherwise"
                )
            if self.recipe.router_replay == "r3":
                raise ValueError(
                    "trainer.layout=shared with recipe.router_replay=r3: a prompt's experts are replayed for each "
                    "completion by itself; set trainer.layout=padded or packed"
                )
        return self

    @model_validator(mode="after")
    def _sglang_can(self) -> RunConfig:
        if self.engine.kind != "sglang":
            return self
        if self.recipe.sampling_mask == "aux_token":
            raise ValueError(
                "recipe.sampling_mask=aux_token needs engine=torch: SGLang draws one token at a position; with "
                "engine=sglang set recipe.sampling_mask=keep or off"
            )
        if self.recipe.router_replay == "r3" and self.engine.update == "retract":
            raise ValueError(
                "recipe.router_replay=r3 with engine.update=retract: a token that is computed again goes through other "
                "experts than when it was sampled, and the server reports these; set engine.update=in_place or drained"
            )
        if self.recipe.logits_precision == "model" and self.model.head_dtype != self.model.dtype:
            raise ValueError(
                f"model.head_dtype={self.model.head_dtype} but model.dtype={self.model.dtype}: SGLang computes the "
                "head in fp32 or in the model's dtype; set model.head_dtype alike, or recipe.logits_precision=fp32"
            )
        return self


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of a nested mapping; an empty mapping is a leaf."""
    leaves = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return leaves
