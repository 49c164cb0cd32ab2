"""Experts as a server reports them: of every layer, whether it has a router or not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scalerl.rl.errors import UserError
from scalerl.rl.models.load import text_config
from scalerl.rl.models.router_replay import top_k_routers


@dataclass(frozen=True)
class Routing:
    """A model's layers, those of them that have a router, and the experts that a router chooses."""

    layers: int
    routed: tuple[int, ...]
    top_k: int

    @classmethod
    def of_model(cls, path: Path) -> Routing:
        """Of the Hugging Face model in `path`, whose weights are not loaded. Raises UserError for a dense one."""
        from transformers import AutoModelForCausalLM

        config = text_config(path)
        with torch.device("meta"):
            routers = top_k_routers(AutoModelForCausalLM.from_config(config))
        numbers = [re.search(r"\.layers\.(\d+)\.", name) for name in routers]
        sizes: set[Any] = {getattr(router, "top_k", None) for router in routers.values()}
        if not all(numbers) or len(sizes) != 1 or None in sizes:
            raise UserError(
                f"recipe.router_replay=r3 with engine=sglang can't tell which layers of {config.model_type} have a "
                "router: set recipe.router_replay=off"
            )
        return cls(config.num_hidden_layers, tuple(int(found[1]) for found in numbers if found), sizes.pop())

    def of_routers(self, experts: np.ndarray) -> np.ndarray:
        """int32 [rows, layers x top_k], a server's, to [rows, routed layers, top_k]."""
        return experts.reshape(len(experts), self.layers, self.top_k)[:, self.routed]
