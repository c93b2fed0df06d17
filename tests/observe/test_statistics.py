"""Statistics of evaluations, and the multiple-choice report made of them, on numbers that can be checked by hand."""

import json
import math
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.observe import choices, mcnemar_exact, paired_difference, wilson_interval
from covey.observe.choices import Answered, choice_html, choice_report, letter_prior
from fakes import raises


def test_wilson_worked_by_hand():
    # p = 0.8, n = 10, z = 1.959964: centre (0.8 + 3.841459/20) / 1.3841459, half 1.959964/1.3841459
    # sqrt(0.016 + 0.0096036)
    assert wilson_interval(8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    # 0 of n: high = z² / (n + z²)
    assert wilson_interval(0, 10) == (0.0, pytest.approx(3.841459 / 13.841459))
    assert (wilson_interval(10, 10), wilson_interval(0, 0)) == ((pytest.approx(10 / 13.841459), 1.0), (0.0, 1.0))
    raises(ValueError, "correct=3", wilson_interval, 3, 2)


@settings(deadline=None)
@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_ends_are_where_the_score_test_just_rejects(counts):
    """Definition: the p0 with |p - p0| = z sqrt(p0 (1 - p0) / n)."""
    correct, total = counts
    low, high = wilson_interval(correct, total)
    assert 0 <= low <= correct / total <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            half = 1.959963985 * math.sqrt(end * (1 - end) / total)
            assert abs(correct / total - end) == pytest.approx(half, abs=1e-9)


def test_mcnemar_worked_by_hand_and_by_the_binomial_test():
    # 8 up, 2 down: 2 (C(10,0) + C(10,1) + C(10,2)) / 2^10 = 2 * 56 / 1024
    assert mcnemar_exact(8, 2) == mcnemar_exact(2, 8) == 112 / 1024
    assert mcnemar_exact(5, 5) == mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(6, 0) == 2 / 64
    scipy = pytest.importorskip("scipy.stats")
    for gained, lost in ((0, 1), (3, 9), (9, 3), (17, 17), (40, 22), (1, 200)):
        expected = scipy.binomtest(gained, gained + lost, 0.5).pvalue
        assert mcnemar_exact(gained, lost) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("up", "down"), [(0.1, 0.1), (0.3, 0.1), (0.4, 0.3), (0.02, 0.25)])
def test_the_paired_interval_covers(up, down):
    """By brute force: the probability, over all outcomes of 40 problems that are gained with `up` and lost with `down`,
    that the interval holds the true difference.
    """
    total, covered = 40, 0.0
    for gained in range(total + 1):
        for lost in range(total + 1 - gained):
            same = total - gained - lost
            ways = math.comb(total, gained) * math.comb(total - gained, lost)
            probability = ways * up**gained * down**lost * (1 - up - down) ** same
            if probability > 1e-12:
                before, after = [0] * gained + [1] * (lost + same), [1] * gained + [0] * lost + [1] * same
                found = paired_difference(before, after)
                covered += probability * (found.low <= up - down <= found.high)
    assert 0.93 < covered < 0.995


def test_paired_right_and_wrong():
    before = [0, 0, 0, 0, 1, 1, 1, 1, 0, 1] * 2
    after = [1, 1, 1, 0, 1, 1, 1, 0, 0, 1] * 2  # 6 up, 2 down of 20
    result = paired_difference(before, after)
    assert (result.gained, result.lost, result.total, result.difference) == (6, 2, 20, pytest.approx(0.2))
    assert result.p_value == 2 * (1 + 8 + 28) / 256
    # Bonett and Price: 7/22 and 3/22, difference 4/22, se sqrt((10/22 - (4/22)²) / 22) = 0.138414
    for some, others in (([1], [1, 0]), ([], [])):
        raises(ValueError, "one value for each problem", paired_difference, some, others)
    half = 1.959964 * 0.138414
    assert (result.low, result.high) == pytest.approx((4 / 22 - half, 4 / 22 + half), abs=1e-5)


def test_paired_scores_by_bootstrap():
    random = np.random.default_rng(0)
    before, shift = random.normal(0.0, 1.0, 100), random.normal(0.5, 0.5, 100)
    result = paired_difference(before, before + shift)
    mean, half = shift.mean(), 1.96 * shift.std() / 10
    assert result.difference == pytest.approx(mean)
    assert (result.low, result.high) == pytest.approx((mean - half, mean + half), abs=0.02)
    assert result.p_value < 0.001
    assert paired_difference(before, before + shift) == result
    same = paired_difference([0.5, 0.25, 0.3], [0.5, 0.25, 0.3])
    assert (same.difference, same.low, same.high, same.p_value) == (0, 0, 0, 1.0)


LETTERS = ["A", "B", "C", "D"]


def rows(answers: str, words: int = 3) -> list[dict]:
    options = {letter: f"option {letter}" for letter in LETTERS}
    asked = [" ".join(["word"] * (words + i)) for i in range(len(answers))]
    return [{"question": q, "options": options, "answer": answers[i], "uid": f"q{i}"} for i, q in enumerate(asked)]


def answered(chosen: str, **changes) -> Answered:
    letters = [None if letter == "-" else letter for letter in chosen]
    return Answered("model", [f"I say {letter}" for letter in chosen], letters, LETTERS, **changes)


def test_accuracy_failures_and_the_letter_prior() -> None:
    report = choice_report(rows("AABB"), answered("AAA-"))
    accuracy, letters = report["model"]["accuracy"], report["model"]["letters"]
    assert (accuracy["share"], accuracy["count"], accuracy["of"]) == (0.5, 2, 4)
    assert accuracy["low"] < 0.5 < accuracy["high"]
    assert report["model"]["extraction_failures"]["share"] == 0.25
    assert letters["chosen"] == {"A": 0.75, "B": 0.0, "C": 0.0, "D": 0.0, "none": 0.25}
    # A is chosen for three of four, and right for two of four: 3/4 * 1/2
    assert (letters["own_prior"], letters["uniform"]) == (0.375, 0.25)
    assert letters["constant"] == {"letter": "A", "accuracy": 0.5}
    assert [error["uid"] for error in report["errors"]] == ["q2", "q3"]
    assert report["errors"][1]["chosen"] is None


def test_own_prior_is_the_mean_over_all_ways_to_deal_the_letters() -> None:
    questions, chosen = rows("ABCA"), "AAB-"
    pairs = [zip(order, questions, strict=True) for order in permutations(chosen)]
    dealt = [np.mean([letter == row["answer"] for letter, row in dealing]) for dealing in pairs]
    assert letter_prior(questions, answered(chosen))["own_prior"] == pytest.approx(np.mean(dealt))


def test_paired_with_a_baseline() -> None:
    report = choice_report(rows("AAAA"), answered("AAAB"), answered("ABBB"))
    pair = report["against_baseline"]
    assert (pair["gained"], pair["lost"], pair["difference"], pair["p_value"]) == (2, 0, 0.5, 0.5)
    assert report["answered_against_baseline"]["difference"] == 0.0
    raises(ValueError, "4 answers of model to 2 questions", choice_report, rows("AA"), answered("AAAA"))


def test_rotation_tells_readers_of_options_from_lovers_of_letters() -> None:
    # the option stays with the first two, the letter with the third, the fourth gave no answer
    found = choices.rotation_consistency(answered("ABC-", rotated=[(["A", "B", "B", None], ["B", "C", "C", None])]))
    assert (found["same_option"]["share"], found["same_letter"]["share"]) == (0.5, 0.25)


def test_likelihood_by_hand() -> None:
    probabilities = np.array([[0.8, 0.1, 0.05, 0.05], [0.06, 0.02, 0.01, 0.01]])
    found = choices.likelihood(rows("AB"), answered("AC", probabilities=probabilities))
    assert found["accuracy"]["share"] == found["agrees_with_text"]["share"] == 0.5
    assert found["letter_mass"] == pytest.approx((1.0 + 0.1) / 2)
    # confidences 0.8 (right) and 0.6 (wrong)
    assert found["expected_calibration_error"] == pytest.approx((0.2 + 0.6) / 2)
    first, second = 0.2**2 + 0.1**2 + 2 * 0.05**2, 0.6**2 + 0.8**2 + 2 * 0.1**2
    assert (found["brier"], [b["questions"] for b in found["bins"]]) == (pytest.approx((first + second) / 2), [1, 1])
    some = rows("AB")  # with fewer options
    some[1] = some[1] | {"options": {"A": "x", "B": "y"}}
    probabilities = np.array([[0.4, 0.3, 0.2, 0.1], [0.2, 0.6, np.nan, np.nan]])
    assert choices.likelihood(some, answered("AB", probabilities=probabilities))["accuracy"]["share"] == 1.0
    assert letter_prior(some, answered("AB"))["uniform"] == (1 / 4 + 1 / 2) / 2


def test_by_length_and_topic() -> None:
    some = rows("A" * 40)
    right = np.arange(40) < 20  # the short half
    told = [(part["from"], part["to"], part["share"]) for part in choices.accuracy_by_length(some, right)]
    assert told == [(3, 12, 1.0), (13, 22, 1.0), (23, 32, 0.0), (33, 42, 0.0)]
    for index in range(10):
        some[index]["question"] += " Pericarditis"
        some[39 - index]["question"] += " porphyria"
    topics = choices.accuracy_by_topic(some, right)
    assert [t["word"] for t in topics] == ["porphyria", "pericarditis"]
    assert [t["deviation"] for t in topics] == pytest.approx([-math.sqrt(10), math.sqrt(10)])


def test_the_page_escapes_what_models_write(tmp_path: Path) -> None:
    one = answered("AB", probabilities=np.full((2, 4), 0.2), rotated=[(["A", "B"], ["B", "C"])])
    hostile = Answered("<b>m</b>", ["<script>alert(1)</script>", "x"], one.chosen, LETTERS, one.rotated)
    report = choice_report(rows("BB"), hostile, one)
    as_json, as_html = choices.write_choice_report(tmp_path / "a" / "b", report, "Test & report")
    page = as_html.read_text()
    assert "<script>" not in page
    for words in ("&lt;script&gt;alert(1)", "Test &amp; report", "not measured", "<td>4-4</td><td>1</td>"):
        assert words in page  # the last: words of a question, by length
    assert json.loads(as_json.read_text())["model"]["accuracy"]["share"] == 0.5
    assert "not measured" not in choice_html(choice_report(rows("AB"), one), "x")
    assert "0 questions, short ones first" in choice_html(choice_report(rows("AB"), answered("AB")), "x")
