"""Which option a text chooses: a table of texts with the letter that a reader would take from them."""

import time

import pytest

from covey.errors import ConfigError
from covey.rewards.option_letter import extract_choice

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
