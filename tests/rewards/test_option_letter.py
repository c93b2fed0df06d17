"""Which option a text chooses: a table of texts with the letter that a reader would take from them."""

from __future__ import annotations

import time

import pytest

from covey.errors import ConfigError
from covey.rewards.option_letter import extract_choice

OPTIONS = "A. Fever\nB. Cough\nC. Rash\nD. Gout"

STATEMENTS = [
    ("The answer is A", "A"),
    ("Answer: A", "A"),
    ("answer: b", "B"),
    ("The correct answer is (C).", "C"),
    ("The correct option is C because of the rash", "C"),
    ("Option B is correct.", "B"),
    ("B is the correct answer", "B"),
    ("C is the most likely diagnosis", "C"),
    ("I choose B", "B"),
    ("I would go with option D.", "D"),
    ("The best answer choice is D", "D"),
    ("My final answer is: C", "C"),
    ("Final answer: (A)", "A"),
    ("Correct answer: A. Fever", "A"),
    ("So, the answer would be B) Gout", "B"),
    ("answer = C", "C"),
    ("Answer - C", "C"),
    ("The answer: **B. Cough**", "B"),
    ("The answer is a.", "A"),
    ("the answer is d", "D"),
    ("Therefore, B.", "B"),
    (r"\boxed{B}", "B"),
    (r"Thus \boxed{\text{D}}", "D"),
    ("#### C", "C"),
    ("<answer>B</answer>", "B"),
    ("<answer> c </answer>", "C"),
    ("The answer is option C: gout", "C"),
    ("The letter is D.", "D"),
    ("Answer (A, B, C, or D): B", "B"),
    ("The answer is A because the pain radiates", "A"),
    ("The answer is A. No wait, the answer is C.", "C"),
    ("Answer is: D. The reason is that A is wrong.", "D"),
    ("The treatment is vitamin C, so the answer is B", "B"),
    ("Drug A causes rash; the answer is therefore B.", "B"),
]
LINES = [
    ("A. Myocardial infarction", "A"),
    ("(b)", "B"),
    ("b", "B"),
    ("B.", "B"),
    ("**C**", "C"),
    ("C) Gout", "C"),
    ("[C]", "C"),
    ("{D}", "D"),
    ('"B"', "B"),
    ("d)", "D"),
    ("A: Fever", "A"),
    (" B\nExplanation: A 40-year-old man has...", "B"),
    (OPTIONS + "\n\nB", "B"),
    ("A. Fever is wrong.\nB. Cough is right", "B"),
]
MENTIONS = [
    ("Based on the symptoms, A", "A"),
    ("A, because of the pain", "A"),
    ("A because of the pain", "A"),
    ("A 65-year-old man. The most likely diagnosis is D. Aortic dissection.", "D"),
    ("The diagnosis is B (gout).", "B"),
    ("Choice B", "B"),
    ("We can rule out A and B, leaving C.", "C"),
    ("I would eliminate D. The remaining choice is A.", "A"),
    ("Options: A. MI, B. PE, C. Pneumothorax, D. Dissection. The answer is C.", "C"),
]
DENIALS = [
    ("The answer is not A.", None),
    ("It is not A.", None),
    ("It can't be B.", None),
    ("the answer isn't B", None),
    ("I don't think the answer is A.", None),
    ("The answer is not A, it is B.", "B"),
    ("The correct answer is B, not A.", "B"),
    ("Not B but C", "C"),
    ("A is incorrect. B is wrong. C is correct.", "C"),
    ("A is incorrect because of fever.\nB is unlikely.\nThe answer is D", "D"),
]
NOTHING = [
    "",
    "A 65-year-old man presents with chest pain.",
    "A patient with fever needs rest",
    "This patient could have several conditions. Chest pain is concerning...",
    "the answer is a viral infection",
    "The answer is A patient-centered approach",
    "Answer: A or B",
    "The answer is either A or B.",
    "Answer: B, C",
    "B or C",
    "Is the answer A?",
    OPTIONS,
    "Options: A. MI, B. PE, C. Pneumothorax, D. Dissection.",
    "Vitamin D deficiency is likely.",
    "Hepatitis B infection",
    "He has blood type A.",
    "C. difficile colitis",
    "T cells and B cells",
    "The patient has grade A esophagitis.",
    "E",
    "The answer is E",
]


@pytest.mark.parametrize(("text", "letter"), STATEMENTS + LINES + MENTIONS + DENIALS)
def test_the_letter_that_a_reader_would_take(text: str, letter: str | None) -> None:
    assert extract_choice(text) == letter


@pytest.mark.parametrize("text", NOTHING)
def test_texts_that_choose_nothing(text: str) -> None:
    assert extract_choice(text) is None


def test_a_question_before_the_answer_is_no_answer() -> None:
    assert extract_choice("Is the answer A? No, the answer is B.") == "B"


def test_other_letters() -> None:
    assert extract_choice("The answer is E", "ABCDE") == "E"
    assert extract_choice("The answer is C", "AB") is None
    for letters in ("", "AA", "ab", ["A", "BC"]):
        with pytest.raises(ConfigError, match="letters="):
            extract_choice("A", letters)


@pytest.mark.parametrize(
    "text",
    [
        "A " * 5000,
        "not " * 2500,
        "answer is " * 1000,
        "(" * 10000,
        "A. " * 3000,
        " " * 10000,
        "answer: " + "so " * 3000,
        "is not " * 1500 + "A",
        "answer (" * 1200,
        "A or " * 2000,
        "\n" * 10000 + "x",
        "A is " * 2000,
    ],
)
def test_no_text_takes_long(text: str) -> None:
    began = time.thread_time()
    extract_choice(text)
    assert time.thread_time() - began < 2.0  # a pattern that backtracks takes minutes
