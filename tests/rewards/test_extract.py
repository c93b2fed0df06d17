"""Finding answers in text, hostile text included."""

import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.rewards import boxed_content, completion_text, final_number, last_number, parse_number, prompt_text
from covey.rewards.extract import as_number

ALL = ("####", "boxed", "answer", "=")
# fmt: off
NUMBERS: dict[Any, Any] = {
    "7": 7, " 1,234 ": 1234, "$1,234.50": Fraction(2469, 2), "-$5": -5, "−3": -3, "+3": 3, "18.00": 18, "18.": 18,
    "25%": 25, ".5": Fraction(1, 2), "1/2": Fraction(1, 2), r"\frac{3}{6}": Fraction(1, 2),
    r"-\dfrac{1}{4}": Fraction(-1, 4), "1/0": None, "1e3": None, "1,23": None, "1 2": None, "seven": None, "": None,
    ".": None, "-": None, "٣": None, "²": None, "1" * 65: None, "1" * 64: Fraction(int("1" * 64)),
}
REFERENCES: list[tuple[Any, Any]] = [
    (7, 7), (10**30, Fraction(10**30)), (0.1, Fraction(1, 10)), (np.int64(3), 3), (np.float32(0.5), Fraction(1, 2)),
    ("1,000", 1000), (float("nan"), None), (float("inf"), None), (True, None), (None, None), ([], None),
]
LAST: dict[Any, Any] = {
    "3 apples and 4 pears": 4, "That is 1,234.": 1234, "10-3": 3, "it is -3": -3, "= -3.5!": Fraction(-7, 2),
    "1,2,3": 3, "12cm": 12, "x2": None, "1e9": None, "1e999999999": None, "none": None, "٣٤٥": None,
}
# fmt: on
FINAL = {
    "3 + 4 = 7\n#### 7\nor maybe 8": 7,
    "#### 1\n#### $1,250.00": 1250,
    r"so \boxed{42}, found in 3 steps": 42,
    r"\boxed{\text{about } 42 \text{ dollars}}": 42,
    r"\boxed{\frac{1}{2}}": Fraction(1, 2),
    "The answer is 18. I used 3 steps.": 18,
    "Final answer: **$18**, in 3 steps": 18,
    "the answers are 5; the answer is 6; 7": 6,
    "The answer to question 2 is 18": 18,
    "The answer is 5 + 3 = 8": 8,
    "The answer is 8 = 5 + 3": 8,
    "3 + 4 = 7, because 4 is even": 7,
    "#### none, but 5": 5,
    "I cannot say": None,
}
# fmt: off
MEGABYTES = [
    "9" * 1_000_000, "1,234" * 200_000, "1," * 500_000, ".1" * 500_000, "\\boxed{" * 140_000,
    "\\boxed{" + "{" * 1_000_000, "answer " * 140_000, "answer is " * 100_000, "answer" + " is" * 300_000,
    "answer:" + " " * 1_000_000, "= " * 500_000, "#### " * 200_000, "-$" * 500_000, "1e" * 500_000 + "999999999",
    "\ud800" * 100_000,
]
# fmt: on


def test_numbers() -> None:
    assert {text: parse_number(text) for text in NUMBERS} == NUMBERS
    assert {text: last_number(text) for text in LAST} == LAST
    assert [as_number(value) for value, _ in REFERENCES] == [number for _, number in REFERENCES]


def test_final_number() -> None:
    assert {text: final_number(text, ALL) for text in FINAL} == FINAL


def test_markers_are_tried_in_the_order_given() -> None:
    text = r"#### 1 \boxed{2} answer: 3 = 4 and 5"
    assert final_number(text, ("####", "boxed")) == 1
    assert final_number(text, ("boxed", "####")) == 2
    assert (final_number(text, ("answer",)), final_number(text, ("=",)), final_number(text, ())) == (3, 4, 5)


def test_boxed_braces_are_balanced() -> None:
    assert (boxed_content(r"\boxed{a{b}c}}"), boxed_content(r"\boxed{1} \boxed{2}")) == ("a{b}c", "2")
    assert boxed_content(r"\boxed{never closed") is None
    assert boxed_content("nothing") is None


@pytest.mark.parametrize("text", MEGABYTES, ids=range(len(MEGABYTES)))
def test_a_megabyte_of_anything_is_fast_and_no_answer(text: str) -> None:
    begin, number = time.perf_counter(), final_number(text, ALL)
    assert number is None or number in (1, 234)
    assert parse_number(text) is None
    assert time.perf_counter() - begin < 1.0  # measured: below 0.03 s


@given(st.text(alphabet="0123456789.,-−$#=e{}\\boxdansweri ٣/%\n", max_size=200))
def test_any_text_gives_a_number_or_none(text: str) -> None:
    number = final_number(text, ALL)
    assert number is None or isinstance(number, Fraction)


@given(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "#### {}", r"\boxed{{{}}}", "answer is {}.", "1 = {}"]))
def test_every_integer_is_found_in_every_form(value: int, form: str) -> None:
    assert (final_number(form.format(value), ALL), final_number(form.format(f"{value:,}"), ALL)) == (value, value)


def test_texts_of_messages() -> None:
    question = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}]
    chat = [*question, {"role": "assistant", "content": "5"}]
    assert (completion_text("5"), completion_text([{"role": "assistant", "content": "5"}])) == ("5", "5")
    assert (completion_text([]), completion_text([{"role": "assistant", "content": None}])) == ("", "")
    assert (prompt_text("2+3="), prompt_text(chat), prompt_text(chat[:1])) == ("2+3=", "2+3?", "Be brief.")
