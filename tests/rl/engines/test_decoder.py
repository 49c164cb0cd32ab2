"""Loading decoders and weights: precision, names, limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from scalerl.kernels.head import head_logits
from scalerl.rl.engines.decoder import load_decoder
from scalerl.rl.engines.hf_decoder import HFDecoder
from scalerl.rl.errors import UserError

IDS = torch.tensor([[3, 9, 4, 2], [6, 5, 0, 0]])
LENGTHS = torch.tensor([4, 2])


def decoder_of(model, dtype=torch.float32, head_dtype=torch.float32):
    return load_decoder(model, dtype=dtype, head_dtype=head_dtype, device="cpu")


@torch.inference_mode()
def prefill(decoder):
    return decoder.prefill(IDS, LENGTHS, decoder.new_cache(2, 4)).logits


@torch.inference_mode()
def library(model):
    return torch.stack([model(input_ids=IDS[row : row + 1, :n]).logits[0, -1].float() for row, n in ((0, 4), (1, 2))])


@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "qwen3", "qwen3_moe"])
def test_weights_load_in_place_and_are_not_shared(name, make_model):
    first, second = make_model(name, seed=0), make_model(name, seed=1)
    decoder = decoder_of(first)
    before = library(first)
    for parameter in first.parameters():
        parameter.data.zero_()  # the caller's model is not the decoder's
    torch.testing.assert_close(prefill(decoder), before, rtol=0, atol=1e-5)
    for state in (second.state_dict(), dict(second.named_parameters())):  # with and without the tied name
        decoder.load_weights({key: torch.zeros_like(value) for key, value in state.items()})
        decoder.load_weights(state)
        torch.testing.assert_close(prefill(decoder), library(second), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_misnamed_weights_are_refused(name, make_model):
    model = make_model(name)
    decoder, state = decoder_of(model), model.state_dict()
    with pytest.raises(ValueError, match=r"no parameter 'model\.extra'"):
        decoder.load_weights({**state, "model.extra": torch.zeros(1)})
    missing = {key: value for key, value in state.items() if key != "model.layers.1.self_attn.v_proj.weight"}
    with pytest.raises(ValueError, match=r"v_proj\.weight' is missing"):
        decoder.load_weights(missing)
    with pytest.raises(ValueError, match="model's"):
        decoder.load_weights({**state, "model.norm.weight": torch.zeros(3)})


@pytest.mark.parametrize("name", ["llama", "llama_tied", "llama_dynamic_rope"])
def test_head_precision(name, make_model):
    """A bfloat16 head under a float32 body, and a float32 head under a bfloat16 body, also after new weights."""
    model, other = make_model(name), make_model(name, seed=1)
    with torch.inference_mode():
        hidden = torch.stack([model.model(input_ids=IDS[r : r + 1, :n])[0][0, -1] for r, n in ((0, 4), (1, 2))])
    rounded = head_logits(hidden, model.lm_head.weight, torch.bfloat16)
    coarse = decoder_of(model, head_dtype=torch.bfloat16)
    assert (rounded - library(model)).abs().max() > 1e-3
    torch.testing.assert_close(prefill(coarse), rounded, rtol=1e-2, atol=1e-2)

    body = decoder_of(other, dtype=torch.bfloat16, head_dtype=torch.float32)
    body.load_weights(model.state_dict())
    wide = prefill(body)
    assert wide.dtype == torch.float32 and not torch.equal(wide, wide.bfloat16().float())
    torch.testing.assert_close(wide, library(model), rtol=0.1, atol=0.3)


def test_a_bfloat16_model_keeps_its_rotary_frequencies(make_model):
    """Rounded to bfloat16, a frequency is off by up to 0.4 %, which is radians at position 1000."""
    model = make_model("llama_dynamic_rope")
    decoder = decoder_of(model, dtype=torch.bfloat16)
    assert isinstance(decoder, HFDecoder)
    kept, frequencies = decoder._model.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq
    assert torch.equal(kept, frequencies) and not torch.equal(frequencies, frequencies.bfloat16().float())


def test_loads_a_folder(make_model, tmp_path):
    make_model("qwen3_tied").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(prefill(decoder_of(tmp_path)), library(model), rtol=0, atol=1e-5)
    with pytest.raises(UserError, match=r"model\.path"):
        decoder_of(tmp_path / "nothing")


def test_windows_shorter_than_the_budget_are_refused():
    shape: dict[str, Any] = dict(
        vocab_size=23, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    windowed = Qwen2Config(
        **shape, num_key_value_heads=2, use_sliding_window=True, sliding_window=16, max_window_layers=1
    )
    limit = decoder_of(Qwen2ForCausalLM(windowed)).limit
    assert limit.tokens == 16
    limit.check(6, 10)
    with pytest.raises(UserError, match="sliding_window=16"):
        limit.check(7, 10)


def refused(model) -> str:
    with pytest.raises(UserError, match=r"model\.path") as error:
        decoder_of(model)
    return str(error.value)


def test_models_that_the_fallback_would_get_wrong_are_refused():
    torch.manual_seed(0)
    small: dict[str, Any] = dict(vocab_size=23, hidden_size=32, num_hidden_layers=2)
    dense = dict(small, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.25)
    ends: dict[str, Any] = dict(bos_token_id=1, eos_token_id=2)
    assert "can't run mamba" in refused(MambaForCausalLM(MambaConfig(**small, **ends)))
    assert "off from a plain forward pass" in refused(CohereForCausalLM(CohereConfig(**dense, **ends)))
    bloom = BloomConfig(vocab_size=23, hidden_size=32, n_layer=2, n_head=4, **ends)
    assert "can't run bloom" in refused(BloomForCausalLM(bloom))
    assert "caps its logits" in refused(Gemma2ForCausalLM(Gemma2Config(**dense, **ends, head_dim=8)))


def test_other_architectures_run_on_the_librarys_forward_pass():
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=23,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.25,
    )
    model = GPTNeoXForCausalLM(config).eval()
    torch.testing.assert_close(prefill(decoder_of(model)), library(model), rtol=0, atol=1e-5)
