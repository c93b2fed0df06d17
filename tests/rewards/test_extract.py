"""Finding answers in text, hostile text included; and which option of a question a text chooses."""

import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.errors import ConfigError
from covey.rewards import boxed_content, completion_text, final_number, last_number, parse_number, prompt_text
from covey.rewards.extract import as_number
from covey.rewards.option_letter import extract_choice

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


OPTIONS = "A. Fever\nB. Cough\nC. Rash\nD. Gout"

# fmt: off
CHOSEN: dict[str | None, list[str]] = {
    # of each letter: statements, then lines that are a letter, then letters where an option is named
    "A": [
        "The answer is A", "Answer: A", "Final answer: (A)", "Correct answer: A. Fever", "The answer is a.",
        "The answer is A because the pain radiates", "A. Myocardial infarction", "A: Fever", "Based on the symptoms, A",
        "A, because of the pain", "A because of the pain", "I would eliminate D. The remaining choice is A.",
    ],
    "B": [
        "answer: b", "Option B is correct.", "B is the correct answer", "I choose B", "So, the answer would be B) Gout",
        "The answer: **B. Cough**", "Therefore, B.", r"\boxed{B}", "<answer>B</answer>", "Answer (A, B, C, or D): B",
        "The treatment is vitamin C, so the answer is B", "Drug A causes rash; the answer is therefore B.", "(b)", "b",
        "B.", '"B"', " B\nExplanation: A 40-year-old man has...", OPTIONS + "\n\nB",
        "A. Fever is wrong.\nB. Cough is right", "The diagnosis is B (gout).", "Choice B",
        "The answer is not A, it is B.", "The correct answer is B, not A.", "Is the answer A? No, the answer is B.",
    ],
    "C": [
        "The correct answer is (C).", "The correct option is C because of the rash", "C is the most likely diagnosis",
        "My final answer is: C", "answer = C", "Answer - C", "#### C", "<answer> c </answer>",
        "The answer is option C: gout", "The answer is A. No wait, the answer is C.", "**C**", "C) Gout", "[C]",
        "We can rule out A and B, leaving C.",
        "Options: A. MI, B. PE, C. Pneumothorax, D. Dissection. The answer is C.", "Not B but C",
        "A is incorrect. B is wrong. C is correct.",
    ],
    "D": [
        "I would go with option D.", "The best answer choice is D", "the answer is d", r"Thus \boxed{\text{D}}",
        "The letter is D.", "Answer is: D. The reason is that A is wrong.", "{D}", "d)",
        "A 65-year-old man. The most likely diagnosis is D. Aortic dissection.",
        "A is incorrect because of fever.\nB is unlikely.\nThe answer is D",
    ],
    None: [
        "The answer is not A.", "It is not A.", "It can't be B.", "the answer isn't B",
        "I don't think the answer is A.", "", "A 65-year-old man presents with chest pain.",
        "A patient with fever needs rest", "This patient could have several conditions. Chest pain is concerning...",
        "the answer is a viral infection", "The answer is A patient-centered approach", "Answer: A or B",
        "The answer is either A or B.", "Answer: B, C", "B or C", "Is the answer A?", OPTIONS,
        "Options: A. MI, B. PE, C. Pneumothorax, D. Dissection.", "Vitamin D deficiency is likely.",
        "Hepatitis B infection", "He has blood type A.", "C. difficile colitis", "T cells and B cells",
        "The patient has grade A esophagitis.", "E", "The answer is E",
    ],
}
# fmt: on
LONG = [
    *("A " * 5000, "not " * 2500, "answer is " * 1000, "(" * 10000, "A. " * 3000, " " * 10000, "A is " * 2000),
    *("answer: " + "so " * 3000, "is not " * 1500 + "A", "answer (" * 1200, "A or " * 2000, "\n" * 10000 + "x"),
]


@pytest.mark.parametrize(("text", "letter"), [(text, letter) for letter in CHOSEN for text in CHOSEN[letter]])
def test_the_letter_that_a_reader_would_take(text: str, letter: str | None) -> None:
    assert extract_choice(text) == letter


def test_other_letters() -> None:
    assert extract_choice("The answer is E", "ABCDE") == "E"
    assert extract_choice("The answer is C", "AB") is None
    for letters in ("", "AA", "ab", ["A", "BC"]):
        with pytest.raises(ConfigError, match="letters="):
            extract_choice("A", letters)


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_no_text_takes_long(text: str) -> None:
    began = time.thread_time()
    extract_choice(text)
    assert time.thread_time() - began < 2.0  # a pattern that backtracks takes minutes
