"""Policy losses, one a file. A new loss is one file `<name>.py` with a function `<name>`, and one line here."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

# name: the parameters that its function takes by keyword, whose values are in `recipe.loss_params.<name>`.
# Torch is not imported here, so that configurations are validated without it.
LOSSES: dict[str, tuple[str, ...]] = {
    "cispo": ("eps_max",),
    "dapo": ("eps_low", "eps_high"),
    "grpo": (),
    "gspo": ("eps_low", "eps_high"),
    "reinforce": (),
}
# Those of which each token's term depends on the policy through that token's log-probability alone: their gradient
# takes one pass over the vocabulary (`rl/objective.py`). A loss that isn't named here is right too, and slower.
TOKENWISE = ("cispo", "dapo", "grpo", "reinforce")


def get_loss(name: str) -> Callable:
    """The loss function `name`: (logp, tokens, **params) -> (terms [T], metrics)."""
    return getattr(import_module(f"{__name__}.{name}"), name)
