"""The small rewards, called as the scorer and TRL call them."""

from __future__ import annotations

import pytest

from covey.errors import ConfigError, RewardError
from covey.rewards import exact_match, format_reward, numeric_match


def chat(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_exact_match() -> None:
    reward = exact_match()
    assert reward.__name__ == "exact_match"
    assert reward(completions=["Paris", " Paris\n", "paris", "In Paris"], answer=["Paris"] * 4) == [
        1,
        1,
        0,
        0,
    ]
    assert exact_match(ignore_case=True)(completions=chat("PARIS"), answer=["Paris"]) == [1.0]
    assert exact_match("capital")(completions=["Rome"], capital=["Rome"], answer=["x"]) == [1.0]


def test_numeric_match_lenient_and_strict() -> None:
    texts = ["7", "It is 7.", "The answer is 7, not 8", "8", "no idea"]
    lenient, strict = numeric_match(), numeric_match(strict=True)
    assert lenient(completions=texts, answer=["7"] * 5) == [1, 1, 1, 0, 0]
    assert strict(completions=texts, answer=[7] * 5) == [1, 0, 0, 0, 0]
    assert (lenient.__name__, strict.__name__) == ("numeric_match", "strict_numeric_match")


def test_numbers_are_compared_exactly() -> None:
    reward = numeric_match()
    assert reward(completions=["0.1", "1/10", "0.10000000000000001"], answer=[0.1, 0.1, 0.1]) == [
        1.0,
        0.0,
        0.0,
    ]
    assert reward(completions=["9007199254740993"], answer=[9007199254740992]) == [0.0]


def test_a_row_without_reference_is_not_scored() -> None:
    assert numeric_match()(completions=["1", "1"], answer=[None, 1]) == [None, 1.0]
    assert exact_match()(completions=["1"], answer=[None]) == [None]


def test_a_bad_reference_is_the_datasets_fault() -> None:
    with pytest.raises(RewardError, match="answer='seven' is not a number") as caught:
        numeric_match()(completions=["1", "7"], answer=["1", "seven"])
    assert caught.value.sample == 1
    with pytest.raises(RewardError, match="'answer', which is absent \\(present: label\\)"):
        numeric_match()(completions=["1"], label=["1"])


def test_format_reward() -> None:
    reward = format_reward(r"<think>.*</think>\s*\d+", name="think")
    assert reward.__name__ == "think"
    assert reward(completions=chat("<think>a\nb</think> 4\n", "<think>a</think>", "x <think></think>4")) == [
        1,
        0,
        0,
    ]
    assert format_reward("[0-9]", full=False)(completions=["a1b", "ab"]) == [1.0, 0.0]
    with pytest.raises(ConfigError, match="pattern='\\('"):
        format_reward("(")
