"""Whether two mathematical answers are the same, by math-verify. It may hang: call it in a `TimedPool`."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from scalerl.rl.tasks.plain_answers import same_plain_answer

_SIZES = re.compile(r"\\[bB]igg?[lrm]?(?![a-zA-Z])")
_DIGIT_SPACES = re.compile(r"(?<=\d)(?:\\[,;!: ]|\{,\})(?=\d)")
_LONGEST = 2000  # characters; no answer of a data set comes near


def same_answer(gold: str, answer: str) -> bool:
    """Whether `answer` (LaTeX, without its box) says what `gold` does.

    Raises ValueError where `gold` can't be read, and what math-verify raises where it can't compare the two."""
    gold, answer = clean(gold), clean(answer)
    if gold == answer:
        return True
    if (same := same_plain_answer(gold, answer)) is not None:  # the usual case, a hundred times as fast
        return same
    if not answer or len(answer) > _LONGEST:
        return False
    from math_verify import verify

    return bool(
        verify(
            list(_parsed_gold(gold)),
            _parse(answer),
            allow_set_relation_comp=True,
            timeout_seconds=None,
            raise_on_error=True,
        )
    )


def clean(text: str) -> str:
    r"""Without what the parser stumbles over and means nothing: sizes of brackets, thin spaces in numbers, percent
    signs, a final full stop, dollar signs around it; `\varnothing` as `\emptyset`.

    >>> clean(r"$\bigl(1, 10\,000\bigr)$.")
    '(1, 10000)'
    """
    text = text.strip().removesuffix(".").strip().removeprefix("$").removesuffix("$")
    text = _DIGIT_SPACES.sub("", _SIZES.sub("", text))
    return text.replace(r"\%", "").replace("%", "").replace(r"\varnothing", r"\emptyset").strip()


@lru_cache(maxsize=4096)
def _parsed_gold(gold: str) -> tuple[Any, ...]:
    parsed = tuple(_parse(gold))
    if not parsed:
        raise ValueError(f"the answer {gold!r} of the data set can't be read")
    return parsed


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return parse(rf"\boxed{{{text}}}", parsing_timeout=None, raise_on_error=True)  # type: ignore[arg-type]
