"""Mathematical answers, compared by math-verify in processes that can be killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from covey.errors import RewardError
from covey.rewards.maths import MathReward


@pytest.fixture(scope="module")
def reward() -> Iterator[MathReward]:
    reward = MathReward(workers=1, time_limit=5.0)
    yield reward
    reward.close()


def test_equal_answers(reward: MathReward) -> None:
    cases = [
        (r"\frac{1}{2}", r"so we get $\frac{1}{2}$", 1.0),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
        ("12", "The answer is 12.", 1.0),
        ("12", "The answer is 13.", 0.0),
        (r"x^2+2x+1", r"$(x+1)^2$", 1.0),
        (r"\{1, 2\}", r"$\{2, 1\}$", 1.0),
        (r"\sqrt{8}", r"$2\sqrt{2}$", 1.0),
        ("5", "", 0.0),
        ("5", "no idea", 0.0),
        (7, r"\boxed{7}", 1.0),
        (r"We add them up and find that the answer is \boxed{7}.", "7", 1.0),
    ]
    found = reward([text for _, text, _ in cases], answer=[reference for reference, _, _ in cases])
    assert found == [expected for _, _, expected in cases]


def test_unscored_rows_and_bad_references(reward: MathReward) -> None:
    assert reward(["1", "2"], answer=[None, "2"]) == [None, 1.0]
    assert reward([], answer=[]) == []
    with pytest.raises(RewardError, match="holds no answer") as caught:
        reward(["1", "2"], answer=["1", ""])
    assert caught.value.sample == 1
    with pytest.raises(RewardError, match="absent"):
        reward(["1"])


def test_hostile_text_ends_and_scores_nothing() -> None:
    reward = MathReward(workers=1, time_limit=1.5)
    try:
        reward(["1"], answer=["1"])
        texts = [r"$9^{9^{9^{9}}}$", "$" + "(" * 5000 + "$", r"\boxed{" * 3000, r"$\sum_{i=1}^{10^{12}} \sin(i)$", "7"]
        assert reward(texts, answer=["7"] * 5) == [0.0, 0.0, 0.0, 0.0, 1.0]
    finally:
        reward.close()
