"""Symbolic equality; a reference means one thing: what it may be, how it is read, and what is refused."""

import logging
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from covey.errors import RewardError
from covey.rewards import exact_match, numeric_match
from covey.rewards.extract import as_number, boxed_content, boxes, final_number, number_text
from covey.rewards.maths import MathReward, answer_in, expression_of
from covey.trl.rewards import accuracy_reward, reasoning_accuracy_reward
from fakes import raises

pytest.importorskip("math_verify")
COLUMN = r"\begin{pmatrix}1 \\ 2\end{pmatrix}"
EQUAL: list[tuple[Any, dict[str, float]]] = [
    # a reference, and what completions are worth
    (r"\frac{1}{2}", {r"so we get $\frac{1}{2}$": 1.0, r"\boxed{0.5}": 1.0}),
    ("12", {"The answer is 12.": 1.0, "The answer is 13.": 0.0}),
    (r"x^2+2x+1", {r"$(x+1)^2$": 1.0}),
    (r"\{1, 2\}", {r"$\{2, 1\}$": 1.0}),
    (r"\sqrt{8}", {r"$2\sqrt{2}$": 1.0}),
    ("5", {"": 0.0, "no idea": 0.0}),
    (7, {r"\boxed{7}": 1.0}),
    (r"We add them up and find that the answer is \boxed{7}.", {"7": 1.0}),
]
BOXED: list[tuple[Any, dict[str, float]]] = [
    (5e-05, {"0.00005": 1, r"5 \times 10^{-5}": 1, "5e-05": 1, "0.00006": 0, "5e - 5": 0, "0": 0}),
    (5e-08, {r"\frac{1}{20000000}": 1, "0.00000006": 0, "0": 0}),
    (1e16, {"10000000000000000": 1, "10^{16}": 1, "10000000000000001": 0}),
    (7.0, {"7": 1, "7.0": 1, "8": 0}),
    (Fraction(1, 3), {r"\frac{1}{3}": 1, "0.333333": 1, "0.33": 0}),
    ("3 1/2", {r"\frac{7}{2}": 1, "2": 0}),
    (r"1\,234", {"1234": 1, "1,234": 1, "235": 0}),
    # units and names are as in plain text
    ("10 m/s", {r"10 \text{ m/s}": 1, r"11 \text{ m/s}": 0}),
    ("12:30 PM", {r"12:30\text{ PM}": 1, r"12:30 \text{ AM}": 0}),
    (r"12:30 \text{ PM}", {"12:30 PM": 1, "12:30 AM": 0}),
    ("O(n log n)", {r"O(n \log n)": 1, r"O(n \log m)": 0}),
    ("\u221e", {"\u221e": 1, r"-\infty": 0}),
    (COLUMN.replace(" ", ""), {COLUMN: 1, r"\begin{pmatrix}12\end{pmatrix}": 0}),
    ("1" * 300, {"1" * 300: 1, "1" * 299 + "2": 0}),
]
MATRIX = r"\begin{pmatrix} 1 & 2 & 3 \\ 4 & 5 & 6 \\ 7 & 8 & 9 \end{pmatrix}"
POLYNOMIAL = "x^9 + 3 x^8 - 2 x^7 + x^6 - 5 x^5 + x^4 + 2 x^3 - x^2 + 4 x - 7"
QUOTIENT = r"\frac{x^3 + 2 x^2 - 3 x + 7}{x^4 - 2 x^3 + 5 x^2 - x + 7}"
NUMBERS = "1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 7"
LONG = [
    (MATRIX, MATRIX.replace("4 & 5", "5 & 4")),
    (MATRIX.replace(r"\\ ", "\\\\\n"), MATRIX.replace("9", "8")),
    (POLYNOMIAL, POLYNOMIAL.replace("- 7", "+ 7")),
    (NUMBERS, NUMBERS + ", 15"),
    (r"\{" + NUMBERS + r"\}", r"\{" + NUMBERS.replace("14", "15") + r"\}"),
    (QUOTIENT, QUOTIENT.replace("+ 5 x^2 ", "")),
    (r"(-\infty, -5) \cup (-3, -1) \cup (1, 3) \cup (5, 7)", r"(-\infty, -5) \cup (-3, -1) \cup (1, 3] \cup (5, 7)"),
    ("2 x + 3 y - 4 z + 5 u - 6 v + 8 w = 7", "2 x + 3 y - 4 z + 5 u - 6 v + 8 w = 9"),
]
SENTENCE = "all whole numbers that are greater than two and at most five hundred and divisible by 7"
# fmt: off
NUMBERS_OF_TYPES: list[tuple[Any, str]] = [
    (7, "7"), (7.0, "7"), (5e-05, "0.00005"), (1e16, "10000000000000000"), (5e-08, "0.00000005"), (0.1, "0.1"),
    (-2.5, "-2.5"), (np.float32(0.1), "0.1"), (np.float64(1e22), "1" + "0" * 22), (np.int64(3), "3"),
    (Decimal("1E-7"), "0.0000001"), (Decimal("2.50"), "2.5"), (Fraction(-1, 3), "-1/3"), ("5e-05", "0.00005"),
    ("1E16", "10000000000000000"),
]
NO_VALUES = [{"a": 1}, (1, 2), [1, 2], b"7", {7}, 3j, object(), float("nan"), float("-inf"), Decimal("NaN"), 10**500]
# fmt: on


@pytest.fixture(scope="module")
def reward() -> Iterator[MathReward]:
    with closing(MathReward(workers=1, time_limit=10.0)) as reward:
        yield reward


def test_equal_answers(reward: MathReward) -> None:
    boxed = [(reference, {rf"\boxed{{{text}}}": worth[text] for text in worth}) for reference, worth in BOXED]
    for reference, worth in EQUAL + boxed:
        assert reward([*worth], answer=[reference] * len(worth)) == [*worth.values()], reference


def test_unscored_rows_and_bad_references(reward: MathReward) -> None:
    assert (reward(["1", "2"], answer=[None, "2"]), reward([], answer=[])) == ([None, 1.0], [])
    with pytest.raises(RewardError, match="holds no answer") as caught:
        reward(["1", "2"], answer=["1", ""])
    assert caught.value.sample == 1
    raises(RewardError, "absent", reward, ["1"])


@pytest.mark.slow
def test_hostile_text_ends_and_scores_nothing() -> None:
    texts = [r"$9^{9^{9^{9}}}$", "$" + "(" * 5000 + "$", r"\boxed{" * 3000, r"$\sum_{i=1}^{10^{12}} \sin(i)$", "7"]
    with closing(MathReward(workers=1, time_limit=1.5)) as reward:
        assert (reward(["1"], answer=["1"]), reward(texts, answer=["7"] * 5)) == ([1.0], [0.0, 0.0, 0.0, 0.0, 1.0])


@pytest.mark.slow
def test_a_long_reference_is_compared_whole(reward: MathReward) -> None:
    for right, wrong in [*LONG, (SENTENCE, SENTENCE.replace("two", "three"))]:
        texts = [rf"so \boxed{{{text}}}" for text in (right, wrong, "7")]
        assert reward(texts, answer=[right] * 3) == [1.0, 0.0, 0.0], right
    for right, wrong in LONG:
        texts = [rf"so \boxed{{{text}}}" for text in (right, wrong, "7")]
        assert accuracy_reward(texts, [right] * 3) == [1.0, 0.0, 0.0], right
        thought = [f"<think>{right}</think>{text}" for text in texts]
        assert reasoning_accuracy_reward(thought, [right] * 3) == [1.0, 0.0, 0.0], right


@pytest.mark.parametrize(("value", "digits"), NUMBERS_OF_TYPES)
def test_a_number_is_written_in_digits(value: Any, digits: str) -> None:
    assert number_text(value) == expression_of(value) == digits
    assert as_number(value) == Fraction(digits)
    assert numeric_match()([f"#### {digits}"], answer=[value]) == ([0.0] if "/" in digits else [1.0])
    if not isinstance(value, str):
        assert exact_match()([digits], answer=[value]) == [1.0]


@pytest.mark.parametrize("value", [*NO_VALUES, True, np.bool_(True)])
def test_what_is_no_reference_is_refused_with_its_value_and_column(value: Any) -> None:
    rows, reward = [{"right": "1"}, {"right": value}], MathReward("right")
    with pytest.raises(RewardError, match=r"right=.*correct it, or use None") as caught:
        reward.check_rows(rows)
    assert (caught.value.sample, repr(value)[:80] in str(caught.value)) == (1, True)
    raises(RewardError, "right=", numeric_match("right").check_rows, rows)
    if not isinstance(value, bool):
        raises(RewardError, "right=", exact_match("right").check_rows, rows)


def test_which_part_of_a_text_is_the_reference() -> None:
    assert expression_of(r"3 apples and 4 make \boxed{7}.") == "7"
    assert expression_of("48/2 = 24 in May, 72 in all.\n#### 72") == "72"
    assert expression_of("The answer is $x = 5$.") == "x = 5"
    assert [expression_of(text) for text in ("$5$", "$$5$$", r"\(5\)", r"\[5\]", "$5", r"\$5", " 5. ")] == ["5"] * 7
    assert expression_of("$1$, $2$ and $3$") == "1, 2, 3"
    none, many = "holds no answer", ("From $x + 2 = 5$ we see that $x = 3$.", "several expressions")
    for text, why in (("", none), ("-", none), (r"never \boxed{ends", none), many):
        raises(ValueError, why, expression_of, text)


def test_words_around_a_number_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    reward = MathReward()
    reward.check_rows([{"answer": text} for text in ("7", "x = 2 or x = 3", r"5 \text{ meters}", "Monday", POLYNOMIAL)])
    assert not caplog.messages
    reward.check_rows([{"answer": "The answer is 7"}, {"answer": "5 apples"}])
    (told,) = caplog.messages
    assert told.startswith("answer='The answer is 7': a completion must repeat these words")


def test_the_box_is_the_answer_even_one_that_cannot_be_read(reward: MathReward) -> None:
    odd = [r"7 \boxed{", r"\boxed{7", r"7 \boxed{\text{none}} 7", r"\boxed{} 7", r"\boxed 7", r"\boxed{8} so it is 7"]
    assert reward(odd, answer=["7"] * 6) == [0.0] * 6
    assert [final_number(text) for text in odd] == [None, None, None, None, None, 8]
    texts = [r"\boxed{1} and \boxed{2}", r"\boxed{1}. But then we see that it is \boxed{2}", r"\boxed{\boxed{2}}"]
    assert [answer_in(text) for text in texts] == ["1, 2", "2", "2"]
    assert answer_in("none") is None


def test_a_box_of_any_length_is_read_in_one_pass() -> None:
    assert boxed_content(r"\boxed{" + "x" * 100_000 + "}") == "x" * 100_000
    assert (boxed_content(r"\boxed{\left\{ x \right.}"), boxed_content(r"\fbox {7}")) == (r"\left\{ x \right.", "7")
    assert boxes(r"\boxed{\boxed{7}}") == [(7, 16), (14, 15)]
    assert len(boxes(r"\boxed{" * 50_000 + "}" * 50_000)) == 50_000


def test_what_trl_does_not_score_is_not_scored(caplog: pytest.LogCaptureFixture) -> None:
    unscored = [None, 7, 7.0, {"a": 7}, b"7", "", "-", "Answer is forty two.", "From $x = 2$ we get $y = 3$."]
    with caplog.at_level(logging.WARNING):
        assert accuracy_reward([r"\boxed{7}"] * 9, unscored) == [None] * 9
    told = [record.getMessage() for record in caplog.records if "solution=" in record.getMessage()]
    assert [line.split(":")[0] for line in told] == ["solution=7", "solution=7.0", "solution={'a'", "solution=b'7'"]
    assert reasoning_accuracy_reward(["no end"], [None]) == [0.0]
    assert accuracy_reward(["7", "so $7$", "The answer is $7$.", r"\boxed{7}"], ["7"] * 4) == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("value", [1e300, 10**64, Fraction(1, 10**70), "1" * 65])
def test_a_number_that_no_completion_can_equal_is_refused(value: Any) -> None:
    raises(RewardError, r"answer=.* is not a number of at most 64 characters", numeric_match(), ["1"], answer=[value])
    assert exact_match()(["0"], answer=[-0.0]) == numeric_match()(["0"], answer=[-0.0]) == [1.0]  # zero has no sign
