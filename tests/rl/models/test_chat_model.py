"""A model with a chat template, thinking tokens and end tokens of its own, as reasoning models have them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from scalerl.cli.compose import compose
from scalerl.rl.engines.decoder import DenseDecoder, load_decoder
from scalerl.rl.export import export_run
from scalerl.rl.models.tokenizer import load_tokenizer, special_ids
from scalerl.rl.requests import Requests, build_sampling
from scalerl.rl.run import start_run
from scalerl.rl.types import Chat, Prompt

CONTROL = ["<pad>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
PHRASE = "Time is up.</think>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two key-value heads to four query heads and tied embeddings, of random weights; one token a character."""
    path = tmp_path_factory.mktemp("chat")
    characters = sorted({*map(chr, range(32, 127)), "\n"})
    backend = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate([*CONTROL, *characters])}, unk_token="<pad>")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<|endoftext|>",
        additional_special_tokens=CONTROL[1:],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def config(folder: Path, run_dir: str | None = None):
    return compose(
        [
            "model=hf",
            f"model.path={folder}",
            "model.dtype=float32",
            "model.head_dtype=float32",
            "task=sums",
            "task.asking.template='What is {prompt}?'",
            "task.asking.chat=true",
            "task.asking.system=Add.",
            "recipe.length_control=interrupt",
            "recipe.generation_budget=48",
            "recipe.interrupt.budget_low=6",
            "recipe.interrupt.budget_high=9",
            "recipe.interrupt.answer_budget=12",
            f"recipe.interrupt.phrase='{PHRASE}'",
            "recipe.truncation=score",
            "task.reward.format_penalty=0.5",  # completions that end earn less than truncated ones
            "trainer.lr=1e-3",
            "trainer.warmup_steps=0",
            "recipe.prompts_per_batch=4",
            "recipe.group_size=4",
            "recipe.k=1",
            "engine.process=inline",
            "engine.slots=16",
            "eval.n_prompts=4",
            "eval.n_samples=2",
            "eval.every=2",
            "steps=2",
        ],
        run_dir=run_dir,
    ).config


def test_the_tokenizers_own_tokens_think_and_end(folder):
    tokenizer = load_tokenizer(folder)
    special = special_ids(tokenizer)
    assert (special.think, special.end_think) == (CONTROL.index("<think>"), CONTROL.index("</think>"))
    assert special.stop_ids == (CONTROL.index("<|im_end|>"), CONTROL.index("<|endoftext|>"))
    sampling = build_sampling(config(folder), tokenizer)
    assert sampling.interrupt is not None and sampling.stop_ids == special.stop_ids
    assert (sampling.interrupt.end_think, sampling.interrupt.phrase[-1]) == (special.end_think, special.end_think)
    assert len(sampling.interrupt.phrase) == len("Time is up.") + 1


def test_a_prompt_goes_through_the_models_template_with_its_thinking_opened(folder):
    tokenizer = load_tokenizer(folder)
    ids = Requests(config(folder), tokenizer).encode(Prompt("id", "1 + 2?", "3", "t", Chat("Be brief.", "So ")))
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nSo "
    )
    assert tokenizer.decode(list(ids)) == expected
    assert ids.count(CONTROL.index("<think>")) == 1


def test_a_run_interrupts_the_thinking_and_exports_tied_weights(folder, tmp_path):
    path = start_run(config(folder, str(tmp_path / "run")), {})
    steps = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2 and all(row["interruption_rate"] > 0.5 for row in steps)
    export_run(path, tmp_path / "policy")
    before, after = (AutoModelForCausalLM.from_pretrained(p) for p in (folder, tmp_path / "policy"))
    assert after.lm_head.weight.data_ptr() == after.model.embed_tokens.weight.data_ptr()
    assert not torch.equal(after.lm_head.weight, before.lm_head.weight)
    assert load_tokenizer(tmp_path / "policy").chat_template == TEMPLATE


def test_grouped_queries_and_tied_embeddings_decode_as_the_library_does(folder):
    decoder = load_decoder(folder, dtype=torch.float32, head_dtype=torch.float32, device="cpu")
    assert isinstance(decoder, DenseDecoder)
    ids, model = torch.tensor([[9, 8, 7, 30]]), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        found = decoder.prefill(ids, torch.tensor([4]), decoder.new_cache(1, 4)).logits
        torch.testing.assert_close(found, model(input_ids=ids).logits[:, -1].float(), rtol=0, atol=1e-5)
