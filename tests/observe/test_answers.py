"""The multiple-choice report, on numbers that can be checked by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from covey.observe.choices import (
    Answered,
    accuracy_by_length,
    accuracy_by_topic,
    choice_html,
    choice_report,
    letter_prior,
    likelihood,
    rotation_consistency,
    write_choice_report,
)

LETTERS = ["A", "B", "C", "D"]


def rows(answers: str, words: int = 3) -> list[dict]:
    options = {letter: f"option {letter}" for letter in LETTERS}
    return [
        {"question": " ".join(["word"] * (words + i)), "options": options, "answer": letter, "uid": f"q{i}"}
        for i, letter in enumerate(answers)
    ]


def answered(chosen: str, **changes) -> Answered:
    letters = [None if letter == "-" else letter for letter in chosen]
    return Answered("model", [f"I say {letter}" for letter in chosen], letters, LETTERS, **changes)


def test_accuracy_failures_and_the_letter_prior() -> None:
    report = choice_report(rows("AABB"), answered("AAA-"))
    model = report["model"]
    assert (model["accuracy"]["share"], model["accuracy"]["count"], model["accuracy"]["of"]) == (0.5, 2, 4)
    assert model["accuracy"]["low"] < 0.5 < model["accuracy"]["high"]
    assert model["extraction_failures"]["share"] == 0.25
    assert model["letters"]["chosen"] == {"A": 0.75, "B": 0.0, "C": 0.0, "D": 0.0, "none": 0.25}
    # A is chosen for three of four, and right for two of four: 3/4 * 1/2
    assert model["letters"]["own_prior"] == 0.375
    assert model["letters"]["constant"] == {"letter": "A", "accuracy": 0.5}
    assert model["letters"]["uniform"] == 0.25
    assert [error["uid"] for error in report["errors"]] == ["q2", "q3"]
    assert report["errors"][1]["chosen"] is None


def test_own_prior_is_the_mean_over_all_ways_to_deal_the_letters() -> None:
    from itertools import permutations

    questions, chosen = rows("ABCA"), "AAB-"
    dealt = [
        np.mean([letter == row["answer"] for letter, row in zip(order, questions, strict=True)])
        for order in permutations(chosen)
    ]
    assert letter_prior(questions, answered(chosen))["own_prior"] == pytest.approx(np.mean(dealt))


def test_paired_with_a_baseline() -> None:
    report = choice_report(rows("AAAA"), answered("AAAB"), answered("ABBB"))
    pair = report["against_baseline"]
    assert (pair["gained"], pair["lost"], pair["difference"], pair["p_value"]) == (2, 0, 0.5, 0.5)
    assert report["answered_against_baseline"]["difference"] == 0.0
    with pytest.raises(ValueError, match="4 answers of model to 2 questions"):
        choice_report(rows("AA"), answered("AAAA"))


def test_rotation_tells_readers_of_options_from_lovers_of_letters() -> None:
    # the option stays with the first two, the letter with the third, the fourth gave no answer
    found = rotation_consistency(
        answered("ABC-", rotated=[(["A", "B", "B", None], ["B", "C", "C", None])]),
    )
    assert found["same_option"]["share"] == 0.5
    assert found["same_letter"]["share"] == 0.25


def test_likelihood_by_hand() -> None:
    probabilities = np.array([[0.8, 0.1, 0.05, 0.05], [0.06, 0.02, 0.01, 0.01]])
    found = likelihood(rows("AB"), answered("AC", probabilities=probabilities))
    assert found["accuracy"]["share"] == 0.5
    assert found["agrees_with_text"]["share"] == 0.5
    assert found["letter_mass"] == pytest.approx((1.0 + 0.1) / 2)
    # confidences 0.8 (right) and 0.6 (wrong)
    assert found["expected_calibration_error"] == pytest.approx((0.2 + 0.6) / 2)
    first = 0.2**2 + 0.1**2 + 2 * 0.05**2
    second = 0.6**2 + 0.8**2 + 2 * 0.1**2
    assert found["brier"] == pytest.approx((first + second) / 2)
    assert [b["questions"] for b in found["bins"]] == [1, 1]


def test_questions_with_fewer_options() -> None:
    some = rows("AB")
    some[1] = some[1] | {"options": {"A": "x", "B": "y"}}
    probabilities = np.array([[0.4, 0.3, 0.2, 0.1], [0.2, 0.6, np.nan, np.nan]])
    found = likelihood(some, answered("AB", probabilities=probabilities))
    assert found["accuracy"]["share"] == 1.0
    assert letter_prior(some, answered("AB"))["uniform"] == (1 / 4 + 1 / 2) / 2


def test_by_length_and_topic() -> None:
    some = rows("A" * 40)
    right = np.arange(40) < 20  # the short half
    parts = accuracy_by_length(some, right)
    assert [(p["from"], p["to"], p["share"]) for p in parts] == [
        (3, 12, 1.0),
        (13, 22, 1.0),
        (23, 32, 0.0),
        (33, 42, 0.0),
    ]
    for index in range(10):
        some[index]["question"] += " Pericarditis"
        some[39 - index]["question"] += " porphyria"
    topics = accuracy_by_topic(some, right)
    assert [t["word"] for t in topics] == ["porphyria", "pericarditis"]
    assert [t["deviation"] for t in topics] == pytest.approx([-math.sqrt(10), math.sqrt(10)])


def test_the_page_escapes_what_models_write(tmp_path: Path) -> None:
    one = answered("AB", probabilities=np.full((2, 4), 0.2), rotated=[(["A", "B"], ["B", "C"])])
    hostile = Answered("<b>m</b>", ["<script>alert(1)</script>", "x"], one.chosen, LETTERS, one.rotated)
    report = choice_report(rows("BB"), hostile, one)
    as_json, as_html = write_choice_report(tmp_path / "a" / "b", report, "Test & report")
    page = as_html.read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "Test &amp; report" in page
    assert "not measured" in page
    assert "<td>4-4</td><td>1</td>" in page  # words of a question, by length
    assert json.loads(as_json.read_text())["model"]["accuracy"]["share"] == 0.5
    assert "not measured" not in choice_html(choice_report(rows("AB"), one), "x")


def test_a_report_without_errors_or_likelihood() -> None:
    page = choice_html(choice_report(rows("AB"), answered("AB")), "x")
    assert "0 questions, short ones first" in page
