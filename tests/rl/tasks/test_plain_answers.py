"""Plain answers by their values: by hand, against math-verify, and what is left to it."""

from __future__ import annotations

import json
import time
from decimal import Decimal
from pathlib import Path

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.rl.tasks.boxes import last_box
from scalerl.rl.tasks.math_verifier import clean
from scalerl.rl.tasks.plain_answers import _PI, same_plain_answer

PAIRS = [json.loads(line) for line in (Path(__file__).parent / "math_pairs.jsonl").read_text().splitlines()]


def test_no_digit_of_pi_is_wrong():
    with mpmath.workdps(120):
        assert abs(mpmath.mpf(str(_PI)) - mpmath.pi) < mpmath.mpf(10) ** -100


@pytest.mark.parametrize(
    "gold,answer,same",
    [
        ("42", "42", True),
        ("42", "-42", False),
        ("0", "-0", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac{1}{2}", r"\dfrac12", True),
        ("1/3", "0.3333333333", None),  # math-verify compares decimals to six digits
        ("1/3", "0.34", False),
        ("2^{10}", "1024", True),
        (r"2\sqrt{2}", r"\sqrt 8", True),
        (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}", True),
        (r"\sqrt{3+2\sqrt{2}}", r"1-\sqrt{2}", False),
        (r"\frac{\pi}{4}", r"\pi/4", True),
        (r"\pi", r"\frac{355}{113}", False),
        ("x^2-1", "(x+1)(x-1)", True),
        ("x^2-1", "(x+1)(x-2)", False),
        ("ab", "ba", True),
        ("x^{-1}", r"\frac{1}{x}", True),
        ("n(n+1)/2", r"\frac{n^2+n}{2}", True),
        ("-2^2", "-4", True),
        ("-2^2", "4", False),
        ("(1, 2)", r"\left(1,\frac{4}{2}\right)", True),
        ("(1,2)", "(2,1)", False),
        ("[0,1)", "[0, 1.0)", True),
        ("12345678901234567890", "12345678901234567891", False),
    ],
)
def test_by_hand(gold, answer, same):
    assert same_plain_answer(gold, answer) is same
    assert same_plain_answer(answer, gold) is same


@pytest.mark.parametrize(
    "text",
    [
        r"\{1,2\}", "x=5", "1,204", "1,2", r"5\text{ cm}", r"90^\circ", r"\sin x", r"1\frac{1}{2}", "5 5", "1/2x",
        r"\sqrt[3]{8}", r"\sqrt{-4}", r"\sqrt{x^2}", "5/0", "0^{0}", "i", "e", "f(x)", "x^10", r"\frac123", "2^{0.5}",
        "2^3^2", "5!", "9^{9^{9}}", "(" * 60 + "1" + ")" * 60, "1" * 300, "", "(", "{", r"\frac", "^2", "**", "five",
    ],
)  # fmt: skip
def test_nothing_is_said_of_what_is_not_plain(text):
    started = time.process_time()
    assert same_plain_answer(text, "7") is None
    assert same_plain_answer("7", text) is None
    assert time.process_time() - started < 1


def test_letters_tuples_and_brackets_that_differ_are_left_to_the_library():
    for gold, answer in [("5", "5m"), ("x", "y"), ("(0,1)", "[0,1]"), ("(1,2)", "(1,2,3)"), (r"(-\infty,2)", "(0,2]")]:
        assert same_plain_answer(gold, answer) is None


def test_it_agrees_with_the_labels_of_what_it_decides():
    """But for the one pair whose percent sign `clean` drops, which the file notes."""
    decided = wrong = 0
    for pair in PAIRS:
        answer = last_box(pair["completion"].rpartition("</think>")[2])
        found = None if answer is None else same_plain_answer(clean(pair["gold"]), clean(answer))
        if found is not None:
            decided += 1
            wrong += found is not pair["correct"]
            assert found is pair["correct"] or pair["kind"] == "percent"
    assert decided >= 80 and wrong <= 1


NUMBERS = st.integers(-50, 50).map(lambda n: f"({n})") | st.sampled_from("abxy")


def expressions():
    return st.recursive(
        NUMBERS,
        lambda inner: st.one_of(
            st.tuples(inner, st.sampled_from([" + ", " - ", r" \cdot "]), inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})"),
            inner.map(lambda e: f"{{{e}}}^2".replace("{", "(", 1).replace("}^", ")^")),
        ),
        max_leaves=6,
    )


@settings(max_examples=200, deadline=None)
@given(expressions(), expressions())
def test_it_says_what_sympy_does(one, other):
    import sympy

    def value(text):
        return sympy.expand(sympy.sympify(text.replace(r"\cdot", "*").replace("^", "**")))

    found = same_plain_answer(one, other)
    if found is not None:
        assert found == (value(one) - value(other) == 0)
    assert same_plain_answer(one, f"{one} + 1") in (False, None)
    assert same_plain_answer(one, f"{one} + 0") is True or abs(Decimal(len(one))) > 190
