"""What a run needs of its servers, and how it asks its own for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from scalerl.rl.engines.sglang.client import Features
from scalerl.rl.engines.sglang.needs import Needs
from scalerl.rl.engines.sglang.routing import Routing
from scalerl.rl.engines.sglang.server import server_processes
from scalerl.rl.errors import UserError

from .conftest import TOKENIZER, make_config

ABLE = Features(
    version="0.5.21",
    version_spans=True,
    salted_cache=True,
    prefix_cache=True,
    bracketed_updates=True,
    fp32_head=True,
    tensor_parallel=1,
    most_kept=100,
    experts=4,
)
DEMANDING = Needs(version_spans=True, fp32_head=True, kept=100, experts=4)


@pytest.mark.parametrize(
    ("lacks", "way_out"),
    [
        ({"version_spans": False}, r"set engine\.update=drained"),
        ({"salted_cache": False}, "--disable-radix-cache"),
        ({"fp32_head": False}, "without --enable-fp32-lm-head"),
        ({"most_kept": 0}, r"0\.5\.21 returns no kept sets; .* a later one, or engine=torch"),
        ({"most_kept": 99}, "--sampling-mask-max-tokens 100, or lower recipe.sampling.top_k"),
        ({"experts": 0}, "--enable-return-routed-experts"),
        ({"experts": 6}, "6 experts a token, and the run's model has 4"),
    ],
)
def test_a_server_that_lacks_something_is_refused_with_the_way_out(lacks, way_out):
    DEMANDING.check("here", ABLE)
    with pytest.raises(UserError, match=f"^here: .*{way_out}"):
        DEMANDING.check("here", replace(ABLE, **lacks))


def test_a_server_may_lack_what_the_run_does_not_need():
    modest = Needs(version_spans=False, fp32_head=False, kept=0, experts=0)
    poor = replace(ABLE, version_spans=False, salted_cache=False, prefix_cache=False, fp32_head=False, most_kept=0)
    modest.check("here", poor)


def test_the_needs_are_the_recipes(models, tmp_path):
    def needs(*overrides, routing=None):
        config = make_config(tmp_path, models["first"], *overrides)
        assert config.engine.kind == "sglang"
        return Needs.of(config, config.engine, models["first"], routing)

    assert needs() == Needs(version_spans=True, fp32_head=True, kept=0, experts=0)
    assert not needs("engine.update=drained").version_spans
    assert not needs("recipe.logits_precision=model").fp32_head
    assert needs("recipe.sampling_mask=keep", "recipe.sampling.top_k=5").kept == 5
    assert needs("recipe.sampling_mask=keep", "recipe.sampling.top_p=0.9").kept == len(TOKENIZER)
    assert needs(routing=Routing(3, (1, 2), 2)).experts == 6


def test_our_own_servers_are_started_with_what_the_recipe_needs(models, tmp_path):
    def command(*overrides):
        config = make_config(tmp_path, models["first"], f"engine.python={tmp_path / 'python'}", *overrides)
        assert config.engine.kind == "sglang"
        (process,) = server_processes(config, config.engine, models["first"])
        return process._command

    (tmp_path / "python").touch()
    assert not {"--enable-return-routed-experts", "--sampling-mask-max-tokens"} & set(command())
    assert "--enable-return-routed-experts" in command("recipe.router_replay=r3")
    assert "--nccl-port" in command() and "--nccl-port" not in command("engine.arguments=['--dp-size=2']")
    further = "engine.arguments=[--mem-fraction-static, '0.5']"
    keep = command("recipe.sampling_mask=keep", "recipe.sampling.top_k=5", further)
    assert keep[keep.index("--sampling-mask-max-tokens") + 1] == "10"
    assert keep[-2:] == ["--mem-fraction-static", "0.5"]  # last, so that they have the last word


def test_only_layers_with_a_router_are_replayed(tmp_path):
    config = Qwen3MoeConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        moe_intermediate_size=8,
        num_hidden_layers=4,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_experts=5,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    routing = Routing.of_model(tmp_path)
    assert routing == Routing(layers=4, routed=(0, 2, 3), top_k=2)
    found = routing.of_routers(np.arange(16).reshape(2, 8))
    assert found.tolist() == [[[0, 1], [4, 5], [6, 7]], [[8, 9], [12, 13], [14, 15]]]


def test_a_dense_model_has_no_experts_to_report(models):
    with pytest.raises(UserError, match=r"router_replay=r3 needs a mixture-of-experts model and llama has no"):
        Routing.of_model(models["first"])
