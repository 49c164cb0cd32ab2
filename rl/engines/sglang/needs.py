"""What a run needs of its servers, held against what they say that they can do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scalerl.rl.config import RunConfig, SGLangEngineConfig
from scalerl.rl.engines.sglang.client import Features
from scalerl.rl.engines.sglang.routing import Routing
from scalerl.rl.errors import UserError
from scalerl.rl.models.load import text_config

TESTED = ("0.5.11", "0.5.23")  # the oldest and the newest version that the engine was tested on


@dataclass(frozen=True)
class Needs:
    """version_spans: completions in progress may meet new weights. kept: tokens that a kept set may have, 0 where none
    is needed. experts: numbers that make up a token's experts, 0 where none are needed."""

    version_spans: bool
    fp32_head: bool
    kept: int
    experts: int

    @classmethod
    def of(cls, config: RunConfig, engine: SGLangEngineConfig, model_path: Path, routing: Routing | None) -> Needs:
        return cls(
            version_spans=engine.update != "drained",
            fp32_head=config.recipe.logits_precision == "fp32",
            kept=largest_kept_set(config, model_path),
            experts=0 if routing is None else routing.layers * routing.top_k,
        )

    def check(self, url: str, features: Features) -> None:
        """Raises UserError, with the way out, where the server at `url` can't do what the run needs."""
        if reason := self._missing(features):
            raise UserError(f"{url}: {reason}")

    def _missing(self, features: Features) -> str | None:
        version = f"sglang {features.version}"
        if self.version_spans and not features.version_spans:
            return (
                f"{version} does not say which weights sampled which token (0.5.19 and later do); set "
                "engine.update=drained"
            )
        if features.prefix_cache and not features.salted_cache:
            return (
                f"{version} can't keep its prefix cache apart by weight version; start it with --disable-radix-cache "
                "(engine.arguments=[--disable-radix-cache])"
            )
        if self.fp32_head and not features.fp32_head:
            return "it was started without --enable-fp32-lm-head, which recipe.logits_precision=fp32 needs"
        if self.kept and not features.most_kept:
            return f"{version} returns no kept sets; recipe.sampling_mask=keep needs a later one, or engine=torch"
        if self.kept > features.most_kept:
            return (
                f"it returns kept sets of at most {features.most_kept} tokens, and the recipe's may have {self.kept}; "
                f"start it with --sampling-mask-max-tokens {self.kept}, or lower recipe.sampling.top_k"
            )
        if self.experts and not features.experts:
            return f"{version} reports no experts; start it with --enable-return-routed-experts for router_replay=r3"
        if self.experts and self.experts != features.experts:
            return f"it reports {features.experts} experts a token, and the run's model has {self.experts}"
        return None


def largest_kept_set(config: RunConfig, model_path: Path) -> int:
    """Tokens that the recipe's kept sets may have: top_k, or the vocabulary; 0 where it keeps none."""
    recipe = config.recipe
    if recipe.sampling_mask != "keep":
        return 0
    return recipe.sampling.top_k or text_config(model_path).vocab_size
