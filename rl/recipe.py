"""The recipe: one field an axis (see `docs/recipes.md`), validated. Values live in `conf/recipe/*.yaml` only."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from scalerl.rl.losses import LOSSES

Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Strict(BaseModel):
    """Frozen, and every key known: a misspelt one is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _off(value: object) -> object:
    return "off" if value is False else value  # YAML 1.1 reads a bare `off` as a boolean


def _known_loss(value: str) -> str:
    if value not in LOSSES:
        raise ValueError(f"unknown loss '{value}'; one of {', '.join(LOSSES)}")
    return value


Off = BeforeValidator(_off)
KLForm = Literal["none", "k1_in_reward", "k2_as_loss", "k3_as_loss", "mse", "k1_as_loss"]
Correction = Literal["none", "tis_token", "tis_sequence", "tis_geometric", "mis_token", "mis_sequence", "mis_geometric"]


class InterruptParams(Strict):
    """Thinking budget drawn uniformly over the integers budget_low..budget_high, inclusive ([S] A.10)."""

    budget_low: Count
    budget_high: Count
    answer_budget: Count
    phrase: str


class PenaltyParams(Strict):
    """Reward of correct completions += clip((max_length - |y|) / cache_length - 1, -1, 0) ([S] A.10)."""

    max_length: Count
    cache_length: Count


class KLParams(Strict):
    beta: NonNegative
    beta_by_task: dict[str, NonNegative]
    importance_weighted: bool
    reset_ref_every: Count | None


class ClipCovParams(Strict):
    share: Share
    cov_low: Finite
    cov_high: Finite


class KLCovParams(Strict):
    share: Share
    beta: NonNegative


class BonusParams(Strict):
    coef: Finite


class SamplingParams(Strict):
    temperature: Positive
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: Annotated[int, Field(ge=0)]  # 0: no limit


class Recipe(Strict):
    """Every design choice of a recipe; the sources are named in the YAML."""

    name: str
    off_policy: Literal["pipeline", "ppo"]
    k: Annotated[int, Field(ge=0)]
    loss: Annotated[str, AfterValidator(_known_loss)]
    loss_params: dict[str, dict[str, Positive]]
    loss_aggregation: Literal["prompt", "sample", "token"]
    advantage_norm: Literal["batch", "prompt", "none"]
    logits_precision: Literal["fp32", "model"]
    zero_variance: Literal["drop", "keep"]
    resample_positive: bool
    positive_threshold: Share
    length_control: Literal["interrupt", "penalty", "none"]
    interrupt: InterruptParams
    penalty: PenaltyParams
    truncation: Literal["mask", "score"]
    ratio: Literal["generator", "trainer_old"]
    mismatch_correction: Correction
    mismatch_cap: Positive
    offpolicy_sequence_mask: Annotated[Literal["off"] | Positive, Off]
    kl: KLForm
    kl_params: KLParams
    entropy_control: Literal["none", "clip_cov", "kl_cov", "bonus"]
    clip_cov: ClipCovParams
    kl_cov: KLCovParams
    bonus: BonusParams
    sampling_mask: Annotated[Literal["off", "keep", "aux_token"], Off]
    sampling: SamplingParams
    router_replay: Annotated[Literal["off", "r3"], Off]
    updates_per_batch: Count
    group_size: Count
    prompts_per_batch: Count
    generation_budget: Count

    @property
    def loss_arguments(self) -> dict[str, float]:
        return self.loss_params.get(self.loss, {})

    @model_validator(mode="after")
    def _loss_params_fit(self) -> Recipe:
        for name, params in self.loss_params.items():
            if name not in LOSSES:
                raise ValueError(f"loss_params.{name}: unknown loss; one of {', '.join(LOSSES)}")
            if unknown := set(params) - set(LOSSES[name]):
                raise ValueError(f"loss_params.{name}: unknown parameter '{min(unknown)}'; takes {LOSSES[name]}")
        if missing := set(LOSSES[self.loss]) - set(self.loss_arguments):
            raise ValueError(f"loss_params.{self.loss}: '{min(missing)}' is missing")
        return self

    @model_validator(mode="after")
    def _makes_sense(self) -> Recipe:
        for check in _REFUSALS:
            if reason := check(self):
                raise ValueError(reason)
        return self


def _refuse_k1_as_loss(r: Recipe) -> str | None:
    if r.kl == "k1_as_loss":
        return "kl=k1_as_loss: its expected on-policy gradient is zero; use kl=k1_in_reward or kl=k2_as_loss"
    return None


def _refuse_ppo_without_k(r: Recipe) -> str | None:
    if r.off_policy == "ppo" and r.k < 1:
        return "k=0: off_policy=ppo trains k batches a round, so k must be at least 1"
    return None


def _refuse_double_correction(r: Recipe) -> str | None:
    if r.mismatch_correction != "none" and r.ratio == "generator" and r.loss != "reinforce":
        return (
            f"mismatch_correction={r.mismatch_correction} with ratio=generator corrects twice: the ratio is already "
            "to the generator; set ratio=trainer_old or loss=reinforce"
        )
    return None


def _refuse_unmasked_truncated_sampling(r: Recipe) -> str | None:
    if (r.sampling.top_p < 1 or r.sampling.top_k > 0) and r.sampling_mask == "off":
        return (
            "sampling.top_p < 1 or sampling.top_k > 0 with sampling_mask=off: trainer and generator would use "
            "different distributions; set sampling_mask=keep, or top_p=1 and top_k=0"
        )
    return None


def _refuse_off_policy_aux_token(r: Recipe) -> str | None:
    if r.sampling_mask == "aux_token" and (
        r.off_policy != "pipeline" or r.k != 0 or r.updates_per_batch != 1 or r.loss != "reinforce"
    ):
        return (
            "sampling_mask=aux_token is on-policy REINFORCE: it needs off_policy=pipeline, k=0, updates_per_batch=1 "
            "and loss=reinforce"
        )
    return None


def _refuse_aux_token_with_logprobs(r: Recipe) -> str | None:
    if r.sampling_mask != "aux_token":
        return None
    for axis, off in (
        ("kl", "none"),
        ("mismatch_correction", "none"),
        ("offpolicy_sequence_mask", "off"),
        ("entropy_control", "none"),
    ):
        if (value := getattr(r, axis)) != off:
            return (
                f"{axis}={value} with sampling_mask=aux_token: the auxiliary token's score is a difference of logits, "
                f"and {axis} needs log-probabilities; set {axis}={off} or sampling_mask=keep"
            )
    return None


def _refuse_empty_cov_band(r: Recipe) -> str | None:
    if r.entropy_control == "clip_cov" and r.clip_cov.cov_low > r.clip_cov.cov_high:
        return f"clip_cov.cov_low={r.clip_cov.cov_low} is above clip_cov.cov_high={r.clip_cov.cov_high}"
    return None


def _refuse_tight_interrupt(r: Recipe) -> str | None:
    if r.length_control != "interrupt":
        return None
    i = r.interrupt
    if i.budget_low > i.budget_high:
        return f"interrupt.budget_low={i.budget_low} is above interrupt.budget_high={i.budget_high}"
    if i.budget_high + i.answer_budget > r.generation_budget:
        return (
            f"interrupt.budget_high={i.budget_high} and answer_budget={i.answer_budget} do not fit into "
            f"generation_budget={r.generation_budget}"
        )
    return None


def _refuse_idle_penalty(r: Recipe) -> str | None:
    first = r.penalty.max_length - r.penalty.cache_length
    if r.length_control == "penalty" and r.generation_budget <= first:
        return (
            f"length_control=penalty takes nothing off before {first} tokens (penalty.max_length - cache_length), and "
            f"generation_budget={r.generation_budget} ends a completion before; lower penalty.max_length"
        )
    return None


_REFUSALS = (
    _refuse_k1_as_loss,
    _refuse_ppo_without_k,
    _refuse_double_correction,
    _refuse_unmasked_truncated_sampling,
    _refuse_off_policy_aux_token,
    _refuse_aux_token_with_logprobs,
    _refuse_empty_cov_band,
    _refuse_tight_interrupt,
    _refuse_idle_penalty,
)
