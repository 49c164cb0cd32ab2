"""From prompts to the engine's requests: tokens, budgets and sampling streams, all functions of seeds and numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from scalerl.rl.config import RunConfig
from scalerl.rl.errors import UserError
from scalerl.rl.models.tokenizer import special_ids
from scalerl.rl.types import Interrupt, Prompt, Request, Sampling

_TRAINING, _EVALUATION = 0, 1  # families of sampling streams


def build_sampling(config: RunConfig, tokenizer: Any) -> Sampling:
    """How this run samples, for training and evaluation alike. Raises UserError where the tokenizer has no thinking
    tokens and the recipe interrupts thinking."""
    recipe, special = config.recipe, special_ids(tokenizer)
    interrupt = None
    if recipe.length_control == "interrupt":
        if special.end_think is None:
            raise UserError(
                "recipe.length_control=interrupt needs a tokenizer with thinking tokens (<think>, </think>), which "
                "this model has not; set recipe.length_control=penalty or none"
            )
        interrupt = Interrupt(
            phrase=tuple(tokenizer.encode(recipe.interrupt.phrase, add_special_tokens=False)),
            end_think=special.end_think,
            answer_budget=recipe.interrupt.answer_budget,
        )
        _check_phrase(interrupt, tokenizer, config)
    return Sampling(
        temperature=recipe.sampling.temperature,
        max_tokens=recipe.generation_budget,
        stop_ids=special.stop_ids,
        top_p=recipe.sampling.top_p,
        top_k=recipe.sampling.top_k,
        interrupt=interrupt,
        return_kept=recipe.sampling_mask == "keep",
        aux_token=recipe.sampling_mask == "aux_token",
        return_experts=recipe.router_replay == "r3",
    )


def _check_phrase(interrupt: Interrupt, tokenizer: Any, config: RunConfig) -> None:
    params = config.recipe.interrupt
    if tokenizer.decode(list(interrupt.phrase)) != params.phrase:
        raise UserError(f"recipe.interrupt.phrase={params.phrase!r} has characters that the model's tokenizer lacks")
    if interrupt.end_think not in interrupt.phrase:
        raise UserError(f"recipe.interrupt.phrase={params.phrase!r} does not end the thinking: it has no </think>")
    needed = params.budget_high + len(interrupt.phrase) + params.answer_budget
    if needed > config.recipe.generation_budget:
        raise UserError(
            f"recipe.generation_budget={config.recipe.generation_budget} is too small for an interrupted completion: "
            f"budget_high, the phrase's {len(interrupt.phrase)} tokens and answer_budget make {needed}"
        )


class Requests:
    """Makes the requests of one run."""

    def __init__(self, config: RunConfig, tokenizer: Any) -> None:
        self._seed = config.seed
        self._recipe = config.recipe
        self._eval = config.eval
        self._tokenizer = tokenizer

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's tokens; with `chat`, those of the model's chat template where it has one."""
        chat = prompt.chat
        if chat is None:
            return tuple(self._tokenizer.encode(prompt.text, add_special_tokens=False))
        if not self._tokenizer.chat_template:
            return tuple(self._tokenizer.encode("\n\n".join(filter(None, (chat.system, prompt.text))) + chat.prefill))
        messages = [{"role": "user", "content": prompt.text}]
        if chat.system is not None:
            messages.insert(0, {"role": "system", "content": chat.system})
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tuple(self._tokenizer.encode(text + chat.prefill, add_special_tokens=False))

    def training(self, group: int, prompt: Prompt) -> Request:
        return self._request(group, prompt, self._recipe.group_size, (_TRAINING, self._seed))

    def evaluation(self, index: int, prompt: Prompt, n_samples: int, step: int, set_number: int) -> Request:
        """Fresh draws for each evaluation, so that the noise of a curve's points is independent."""
        return self._request(index, prompt, n_samples, (_EVALUATION, self._seed, self._eval.seed, step, set_number))

    def _request(self, group: int, prompt: Prompt, n: int, family: tuple[int, ...]) -> Request:
        stream = int(np.random.SeedSequence(family).generate_state(1, np.uint64)[0] >> 1)
        budgets = None
        if self._recipe.length_control == "interrupt":
            params = self._recipe.interrupt
            rng = np.random.default_rng((stream, group))
            drawn = rng.integers(params.budget_low, params.budget_high, size=n, endpoint=True)
            budgets = tuple(int(b) for b in drawn)
        return Request(group=group, prompt_ids=self.encode(prompt), n=n, stream=stream, thinking_budgets=budgets)
