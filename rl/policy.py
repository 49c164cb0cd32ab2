"""A causal LM as the trainer sees it: from a micro-batch to log-probabilities, head and all in one forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scalerl.kernels.logprob import VOCABULARY_TILE, token_logits, token_logprobs, weighted_logprob_sum
from scalerl.rl.micro_batches import MicroBatch
from scalerl.rl.recipe import Recipe
from scalerl.rl.shared_prompts import hidden_states

_LEAST_ROWS = 64  # fewer would leave the products waiting for the weights


class Scores(NamedTuple):
    """Of the completion tokens, [T] each. logp: of the distribution that the generator's are of. entropy: of the full
    vocabulary, where asked for. score: what the loss differentiates, logp but under `aux_token`. weighted: a scalar
    whose gradient is the loss's, where its coefficients were given; the others have none then."""

    logp: Tensor
    entropy: Tensor | None
    score: Tensor
    weighted: Tensor | None = None


class Policy(nn.Module):
    """`model` with its head, which must be inside the outermost module for a sharded model to gather it."""

    def __init__(self, model: Any, recipe: Recipe, *, dtype: torch.dtype, head_dtype: torch.dtype, chunk: int) -> None:
        """dtype: of autocast, where it isn't fp32. chunk: tokens, of whose logits a tile is in memory at once."""
        super().__init__()
        self.model = model
        self._recipe, self._dtype, self._head_dtype, self._chunk = recipe, dtype, head_dtype, chunk

    def forward(
        self,
        micro: MicroBatch,
        *,
        with_entropy: bool = False,
        coefficient: Callable[[Tensor, slice], Tensor] | None = None,
    ) -> Scores:
        """coefficient: the loss's, for one pass over the vocabulary in place of two; see `weighted_logprob_sum`."""
        device = micro.input_ids.device.type
        with torch.autocast(device, dtype=self._dtype, enabled=self._dtype != torch.float32):
            body = self.model.base_model
            if micro.prompts is not None:
                states = hidden_states(body, micro.input_ids, micro.prompts)
            else:
                # The library masks rows from each other by the positions, which `require_packing` has checked.
                output = body(input_ids=micro.input_ids, position_ids=micro.positions, use_cache=False)
                states = output.last_hidden_state
        hidden, weight = states[micro.line, micro.column], self.model.get_output_embeddings().weight
        temperature = self._recipe.sampling.temperature
        head: dict[str, Any] = {"temperature": temperature, "head_dtype": self._head_dtype, "kept": micro.kept}
        if coefficient is not None:
            chunk = max(_LEAST_ROWS, self._chunk * VOCABULARY_TILE // len(weight))  # as many logits as in the tiles
            weighted, logp = weighted_logprob_sum(hidden, weight, micro.targets, coefficient, chunk=chunk, **head)
            return Scores(logp, None, logp, weighted)
        logp, entropy = token_logprobs(
            hidden, weight, micro.targets, chunk=self._chunk, with_entropy=with_entropy, **head
        )
        if micro.aux is None:
            return Scores(logp, entropy, logp)
        # (z(a_t) - z(u_t)) / temperature, whose gradient stands in for that of the truncated policy's logp.
        z = token_logits(hidden, weight, torch.stack([micro.targets, micro.aux], dim=1), head_dtype=self._head_dtype)
        return Scores(logp, entropy, (z[:, 0] - z[:, 1]) / temperature)
