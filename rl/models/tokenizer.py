"""Tokenizers: the built-in model's, character by character, and the special tokens of any."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalerl.rl.errors import UserError

PAD, THINK, END_THINK, END = "<pad>", "<think>", "</think>", "<end>"
ALPHABET = "0123456789+-*=(),. abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class SpecialIds:
    """think, end_think: None where the tokenizer has no thinking tokens of its own. stop_ids end a completion."""

    think: int | None
    end_think: int | None
    stop_ids: tuple[int, ...]


def character_tokenizer() -> Any:
    """A fast tokenizer of one token a character of `ALPHABET`, with `<pad>`, `<think>`, `</think>` and `<end>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, THINK, END_THINK, END]
    vocab = {token: i for i, token in enumerate([*special, *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[THINK, END_THINK],
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a Hugging Face folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"the tokenizer in {path} can't be loaded: {str(error).splitlines()[0]}") from None


def special_ids(tokenizer: Any) -> SpecialIds:
    """The ids of `<think>`, `</think>` and the end tokens. Raises UserError where no token ends a completion."""
    vocab = tokenizer.get_vocab()
    stops = {vocab[name] for name in (tokenizer.eos_token, "<|im_end|>", "<|eot_id|>") if name in vocab}
    if not stops:
        raise UserError("the tokenizer has no end token (eos_token); completions could not end")
    return SpecialIds(vocab.get(THINK), vocab.get(END_THINK), tuple(sorted(stops)))
