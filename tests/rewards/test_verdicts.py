"""A short word about each completion, recorded beside the reward."""

from __future__ import annotations

from typing import Any

import pytest

from covey.recipes.arithmetic.arithmetic import Arithmetic
from covey.rewards import exact_match, numeric_match
from covey.rewards.code import CodeReward
from covey.rewards.maths import MathReward
from covey.rewards.text import say
from covey.tasks.usmle import USMLERewardModel, _correct_letter


def verdicts(reward: Any, texts: list[str], **columns: Any) -> dict[str, list[Any]]:
    """What a run's table would have beside the rewards."""
    kept: dict[str, list[Any]] = {}
    reward(completions=texts, log_extra=lambda name, values: kept.setdefault(name, []).extend(values), **columns)
    return kept


def test_numbers_and_letters_are_told() -> None:
    texts = ["so it is #### 42", "no idea"]
    assert verdicts(numeric_match(), texts, answer=["42", "1"]) == {
        "verdict/numeric_match": ["found 42", "found no answer"]
    }
    assert verdicts(numeric_match(), texts, answer=["42", None]) == {"verdict/numeric_match": ["found 42", None]}
    assert verdicts(exact_match(), texts, answer=["42", "1"]) == {}
    options = [{"A": "x", "B": "y"}] * 2
    for reward, name in ((_correct_letter, "correct_letter"), (USMLERewardModel(), "usmle_reward")):
        said = verdicts(reward, ["The answer is B.", "hm"], answer=["A", "A"], options=options)
        assert said == {f"verdict/{name}": ["found B", "found no answer"]}
    (reward,) = Arithmetic().reward_funcs
    said = verdicts(reward, ["It is 7.", "seven"], answer=["7", "7"], kind=["sum", "sum"])
    assert said == {"verdict/correct_number": ["found 7", "found no answer"]}


def test_the_expression_that_was_read_is_told() -> None:
    pytest.importorskip("math_verify")
    reward = MathReward(workers=1)
    try:
        said = verdicts(reward, [r"thus $\boxed{\frac{1}{2}}$", "dunno"], answer=["0.5", "1"])["verdict/math"]
    finally:
        reward.close()
    assert "frac{1}{2}" in said[0]
    assert said[1] == "found no answer"


def test_the_test_that_failed_is_told() -> None:
    reward = CodeReward(unprotected=True, workers=1)
    texts = ["```python\ndef add(a, b):\n    return a - b\n```", "```python\ndef add(a, b):\n    return a + b\n```"]
    try:
        said = verdicts(reward, texts, tests=[["assert add(2, 0) == 2", "assert add(1, 2) == 3"]] * 2)
    finally:
        reward.close()
    failed, passed = said["verdict/passes_tests"]
    assert failed.startswith("1 of 2 tests passed; test 2: ")
    assert passed == "2 of 2 tests passed"


def test_words_are_short_and_wanted_by_nobody_else() -> None:
    kept: dict[str, list[Any]] = {}
    say({"log_extra": kept.__setitem__}, "x", ["y" * 10_000, None])
    assert [word and len(word) for word in kept["verdict/x"]] == [200, None]
    say({}, "x", ["nobody keeps it"])
    assert numeric_match()(completions=["7"], answer=["7"]) == [1.0]
