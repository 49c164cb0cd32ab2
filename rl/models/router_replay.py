"""Router replay: the generator's choice of experts, with the trainer's own gates (R3, "Stabilizing MoE Reinforcement
Learning by Aligning Training and Inference Routers", arXiv 2510.11370)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from scalerl.rl.errors import UserError


def gates(logits: Tensor, experts: Tensor, *, normalise: bool) -> Tensor:
    """Gate values of the chosen experts: g_i = I_i exp(s_i) / sum_j I_j exp(s_j), in fp32 or finer.

    logits: [N, E], s of every expert; experts: int64 [N, K], the ones with I = 1; returns [N, K]. Without `normalise`
    (`norm_topk_prob: false`) the sum runs over all E experts, as in the model itself. The choice is data, so that the
    gradient reaches the router through s alone.

    By hand: I = (1, 0, 1, 0), s = (1.3, 0.1, 2.5, 1.9): g = (0.2315, 0, 0.7685, 0)."""
    # The library's own operations in its own order: its own choice gives its own gates to the bit.
    probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    chosen = probabilities.gather(-1, experts)
    return chosen / chosen.sum(-1, keepdim=True) if normalise else chosen


@contextmanager
def replay(model: nn.Module, experts: Tensor) -> Iterator[None]:
    """Inside, `model` sends each token to the given experts instead of those of its own choice.

    experts: integers [n, S, layers, K] for inputs [n, S], layers counted over those that have a router; a position
    whose entries are -1 (padding, a token that the generator never fed) keeps the model's own choice. With activation
    checkpointing the backward pass must run inside too, since it makes the gates again. Raises UserError where the
    model has no router that can be replayed, ValueError where the shape doesn't fit it."""
    routers = replayable_routers(model)
    wanted = (len(routers), routers[0].top_k)
    if tuple(experts.shape[2:]) != wanted:
        raise ValueError(f"experts of (layers, top_k) {tuple(experts.shape[2:])}, but the model has {wanted}")
    flat = experts.flatten(0, 1).long()
    hooks = [router.register_forward_hook(_Choice(flat[:, layer])) for layer, router in enumerate(routers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def top_k_routers(model: nn.Module) -> dict[str, Any]:
    """The top-k routers of a model by name, in the order of their layers. Raises UserError for a dense model."""
    routers = {name: m for name, m in model.named_modules() if type(m).__name__.endswith("TopKRouter")}
    if not routers:
        raise UserError(
            f"recipe.router_replay=r3 needs a mixture-of-experts model and {_kind(model)} has no top-k router: set "
            "recipe.router_replay=off"
        )
    return routers


def replayable_routers(model: nn.Module) -> list[Any]:
    """The top-k routers of an MoE built like Qwen3-MoE, in the order of their layers.

    Raises UserError for a dense model, and for routers whose gates are not those of `gates`."""
    routers = list(top_k_routers(model).values())
    for router in routers:
        if not (hasattr(router, "norm_topk_prob") and hasattr(router, "top_k") and _plain(router)):
            raise UserError(
                f"recipe.router_replay=r3 knows the softmax top-k routers of Qwen3-MoE and its kin, and {_kind(model)} "
                f"has {type(router).__name__}: set recipe.router_replay=off"
            )
    return routers


def _kind(model: nn.Module) -> str:
    return getattr(getattr(model, "config", None), "model_type", type(model).__name__)


@torch.no_grad()
def _plain(router: Any) -> bool:
    """Whether the router's gates are `gates` of its first output at its last one."""
    outputs = router(torch.ones(1, router.weight.shape[-1], dtype=router.weight.dtype, device=router.weight.device))
    if not (isinstance(outputs, tuple) and len(outputs) == 3):
        return False
    logits, scores, experts = outputs
    return torch.allclose(gates(logits, experts, normalise=router.norm_topk_prob).to(scores.dtype), scores)


class _Choice:
    """A router's forward hook: replaces its choice [N, K] and the gates that go with it."""

    def __init__(self, experts: Tensor) -> None:
        self._experts = experts

    def __call__(self, router: Any, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        logits, scores, own = outputs
        given = self._experts.to(own.device)
        experts = torch.where(given >= 0, given, own)
        return logits, gates(logits, experts, normalise=router.norm_topk_prob).to(scores.dtype), experts
