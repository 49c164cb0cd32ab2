r"""Whether two plain mathematical answers are the same, by their values: thousands a second, where a computer algebra
system does a hundred. Plain are sums, products, quotients, whole powers and square roots of numbers, pi and single
letters, and tuples and intervals of them; of anything else nothing is said."""

from __future__ import annotations

import re
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from hashlib import sha512
from typing import NamedTuple

_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+|\\(?:[dt]?frac|sqrt|cdot|times|pi)(?![a-zA-Z])|[a-ckmnx-z]|[-+*/^(){}])")
_PI = Decimal(
    "3." + "1415926535897932384626433832795028841971693993751058209749445923078164062862089986280348253421170679"
)
_CONTEXT = Context(prec=100)
_LARGEST = Decimal("1e40")  # of all values on the way: 60 digits stay for what they leave
_EQUAL, _DIFFERENT = Decimal("1e-40"), Decimal("1e-25")  # relative; in between nothing is said
_DIFFERENT_ROUNDED = Decimal("1e-4")  # math-verify takes decimals that agree to six digits for the same
_LONGEST, _DEEPEST, _HIGHEST_POWER = 200, 20, 100


class _Value(NamedTuple):
    """number: with each letter standing for a number of its own. decimals: whether a decimal point was read."""

    number: Decimal
    letters: frozenset[str]
    decimals: bool


def same_plain_answer(gold: str, answer: str) -> bool | None:
    r"""Whether two answers (LaTeX, without box and dollar signs) are the same; None where one isn't plain or it is too
    close to call. Letters stand for positive numbers.

    Equal are values that agree in 40 digits, for which no exact proof is given; so `x^2-1` is `(x+1)(x-1)`.

    >>> same_plain_answer(r"\frac{\sqrt2}{2}", r"1/\sqrt{2}"), same_plain_answer("[0, 2)", "[0, 3)")
    (True, False)
    >>> same_plain_answer(r"\{1, 2\}", r"\{2, 1\}") is None
    True
    """
    if len(gold) > _LONGEST or len(answer) > _LONGEST:
        return None
    one, other = _parts(gold), _parts(answer)
    if one is None or other is None:
        return _same_value(gold, answer)
    (brackets, golds), (others, answers) = one, other
    if brackets != others or len(golds) != len(answers):
        return None
    found = [_same_value(*pair) for pair in zip(golds, answers, strict=True)]
    return False if False in found else None if None in found else True


def _parts(text: str) -> tuple[str, list[str]] | None:
    """The brackets and the elements of a tuple or an interval; None for anything else, with brackets inside too."""
    text = text.replace(r"\left", "").replace(r"\right", "").strip()
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]" or "," not in text:
        return None
    inside = text[1:-1]
    if any(bracket in inside for bracket in "()[]"):
        return None
    return text[0] + text[-1], [part.strip() for part in inside.split(",")]


def _same_value(gold: str, answer: str) -> bool | None:
    if gold == answer:
        return True
    one, other = _value(gold), _value(answer)
    if one is None or other is None or one.letters != other.letters:
        return None
    with localcontext(_CONTEXT):
        gap = abs(one.number - other.number) / max(Decimal(1), abs(one.number), abs(other.number))
    if gap <= _EQUAL:
        return True
    return False if gap > (_DIFFERENT_ROUNDED if one.decimals or other.decimals else _DIFFERENT) else None


@lru_cache(maxsize=4096)
def _value(text: str) -> _Value | None:
    tokens = _tokens(text.replace(r"\left", "").replace(r"\right", ""))
    if not tokens:
        return None
    with localcontext(_CONTEXT):
        try:
            number = _Reader(tokens).all()
        except (ArithmeticError, _NotPlain):
            return None
    letters = frozenset(token for token in tokens if token.isalpha())
    return _Value(number, letters, any("." in token for token in tokens))


def _tokens(text: str) -> list[str]:
    """Empty where the text has anything else in it."""
    tokens, at = [], 0
    while match := _TOKEN.match(text, at):
        tokens.append(match[1])
        at = match.end()
    return [] if text[at:].strip() else tokens


class _NotPlain(Exception):
    pass


class _Reader:
    """Recursive descent over tokens; raises _NotPlain where they are no plain expression or can be read in two ways."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._at, self._depth = tokens, 0, 0

    def all(self) -> Decimal:
        number = self._sum()
        self._refuse_unless(self._next() is None)
        return number

    def _next(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self, *wanted: str) -> str | None:
        """The next token, if it is one of those."""
        token = self._next()
        if token is None or token not in wanted:
            return None
        self._at += 1
        return token

    def _refuse_unless(self, plain: bool) -> None:
        if not plain:
            raise _NotPlain

    def _sum(self) -> Decimal:
        self._depth += 1
        self._refuse_unless(self._depth <= _DEEPEST)
        total = self._product()
        while sign := self._take("+", "-"):
            term = self._product()
            total = self._bounded(total + term if sign == "+" else total - term)
        self._depth -= 1
        return total

    def _product(self) -> Decimal:
        product, divided = self._signed(), False
        while True:
            if self._take("*", r"\cdot", r"\times"):
                product = self._bounded(product * self._signed())
            elif self._take("/"):
                product, divided = self._bounded(product / self._signed()), True
            elif self._follows_without_sign():
                self._refuse_unless(not divided)  # 1/2x
                product = self._bounded(product * self._power())
            else:
                return product

    def _follows_without_sign(self) -> bool:
        """Whether the next token is a factor, as in 2x, 2(x+1), 2 pi; two numbers and mixed fractions are not plain."""
        token = self._next()
        return token is not None and (token in ("(", r"\sqrt", r"\pi") or token.isalpha())

    def _signed(self) -> Decimal:
        sign = self._take("+", "-")
        power = self._power()
        return -power if sign == "-" else power

    def _power(self) -> Decimal:
        base = self._atom()
        if not self._take("^"):
            return base
        exponent = self._argument()
        self._refuse_unless(exponent == exponent.to_integral_value() and abs(exponent) <= _HIGHEST_POWER)
        self._refuse_unless(self._next() != "^" and (base != 0 or exponent > 0))
        return self._bounded(base ** int(exponent))

    def _atom(self) -> Decimal:
        token = self._next()
        self._refuse_unless(token is not None)
        assert token is not None
        self._at += 1
        if token[0].isdigit() or token[0] == ".":
            return self._bounded(Decimal(token))
        if token.isalpha():
            return _stand_in(token)
        if token == r"\pi":
            return _PI
        if token == "(":
            inside = self._sum()
            self._refuse_unless(self._take(")") is not None)
            return inside
        if token == r"\sqrt":
            start = self._at
            inside = self._argument()
            self._refuse_unless(not any(t.isalpha() for t in self._tokens[start : self._at]))  # no sign is known
            return inside.sqrt()
        self._refuse_unless(token.endswith("frac"))
        return self._bounded(self._argument() / self._argument())

    def _argument(self) -> Decimal:
        """What stands in braces, or a single digit, of which a number may hold two: \frac12."""
        if self._take("{"):
            inside = self._sum()
            self._refuse_unless(self._take("}") is not None)
            return inside
        token = self._next()
        self._refuse_unless(token is not None and token.isdigit() and len(token) <= 2)
        assert token is not None
        two = len(token) == 2
        self._refuse_unless(not two or self._tokens[self._at - 1].endswith("frac"))
        if two:
            self._tokens[self._at] = token[1]
        else:
            self._at += 1
        return Decimal(token[0])

    def _bounded(self, number: Decimal) -> Decimal:
        self._refuse_unless(abs(number) <= _LARGEST)
        return number


@lru_cache
def _stand_in(letter: str) -> Decimal:
    """A number between 1 and 2 that no answer has."""
    return Decimal(f"1.{int(sha512(letter.encode()).hexdigest()[:80], 16)}")
