"""Verifiers and reward functions, each as the other."""

from __future__ import annotations

from functools import partial

import pytest

import covey.rewards
from covey.errors import RewardError
from covey.rewards import SupportsBatchVerify, Verifier, exact_match, reward_name, verifier_from_reward


class Longer(Verifier):
    """The completion's length less the prompt's."""

    def verify(self, prompt: str, completion: str) -> float:
        return float(len(completion) - len(prompt))


class Batched(Verifier):
    """Scores a batch at once."""

    def batch_verify(self, pairs: list[tuple[str, str]]) -> list[float]:
        return [float(index) for index, _ in enumerate(pairs)]


def test_one_pair_at_a_time_or_all_at_once() -> None:
    assert Longer().batch_verify([("ab", "abc"), ("abc", "a")]) == [1.0, -2.0]
    assert Batched().verify("a", "b") == 0.0
    assert isinstance(Longer(), SupportsBatchVerify)
    with pytest.raises(NotImplementedError, match="neither verify nor batch_verify"):
        Verifier().verify("a", "b")


def test_a_verifier_is_a_reward_function() -> None:
    prompts = ["ab", [{"role": "system", "content": "long text"}, {"role": "user", "content": "ab"}]]
    completions = ["abc", [{"role": "assistant", "content": "abcd"}]]
    assert Longer()(prompts=prompts, completions=completions, answer=["x", "y"]) == [1.0, 2.0]


def test_a_failing_pair_is_named() -> None:
    class Picky(Verifier):
        def verify(self, prompt: str, completion: str) -> float:
            return float(completion)

    with pytest.raises(RewardError, match="ValueError: could not convert") as caught:
        Picky().batch_verify([("p", "1"), ("p", "one")])
    assert (caught.value.function, caught.value.sample) == ("Picky", 1)


def test_a_reward_function_is_a_verifier() -> None:
    verifier = verifier_from_reward(exact_match(), {"2+3=": {"answer": "5"}})
    assert verifier.batch_verify([("2+3=", "5"), ("2+3=", "6"), ("1+1=", "2")]) == [1.0, 0.0, None]
    assert verifier.verify("2+3=", "5") == 1.0
    assert reward_name(verifier) == "exact_match"


def test_names() -> None:
    def length(completions: list[str], scale: float) -> list[float]:
        return [scale * len(text) for text in completions]

    assert reward_name(length) == "length"
    assert reward_name(partial(length, scale=2.0)) == "length"
    assert reward_name(Longer()) == "Longer"


def test_what_the_room_exports() -> None:
    assert sorted(covey.rewards.__all__) == covey.rewards.__all__
    assert all(hasattr(covey.rewards, name) for name in covey.rewards.__all__)
