"""Verifiers: objects that score (prompt, completion) pairs, and their two-way bridge to reward functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from covey.errors import RewardError
from covey.rewards.extract import completion_text, prompt_text
from covey.types import Message

RewardFunction = Callable[..., Any]
"""TRL's signature: `f(prompts, completions, **dataset_columns) -> list[float | None]`, sync or async."""


@runtime_checkable
class SupportsBatchVerify(Protocol):
    """An object with `batch_verify`; it can take the place of a reward function."""

    def batch_verify(self, pairs: list[tuple[str, str]]) -> Sequence[float | None]:
        """One score for each (prompt, completion) pair, in order."""


class Verifier:
    """Base class of verifiers. Override `verify` (one pair) or `batch_verify` (all at once).

    A verifier sees the text of the completion and of the prompt (the last user message of a conversation), but no
    dataset columns. It can be called like a reward function, also by TRL.

        class IsEven(Verifier):
            def verify(self, prompt: str, completion: str) -> float:
                return 1.0 if completion.strip().endswith(tuple("02468")) else 0.0

        IsEven().batch_verify([("Name an even number.", "14")])  # [1.0]
    """

    def verify(self, prompt: str, completion: str) -> float | None:
        """Score one pair; None = it cannot be scored."""
        if type(self).batch_verify is Verifier.batch_verify:
            raise NotImplementedError(f"{type(self).__name__} overrides neither verify nor batch_verify; define one")
        return self.batch_verify([(prompt, completion)])[0]

    def batch_verify(self, pairs: list[tuple[str, str]]) -> Sequence[float | None]:
        """N scores for N tuples of prompt text and completion text, None for what cannot be scored.

        Raises `RewardError`: `verify` raised; `sample` is the index of the pair.
        """
        scores = []
        for index, (prompt, completion) in enumerate(pairs):
            try:
                scores.append(self.verify(prompt, completion))
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
                raise RewardError(message, function=type(self).__name__, sample=index) from error
        return scores

    def __call__(
        self, prompts: Sequence[str | list[Message]], completions: Sequence[str | list[Message]], **columns: Any
    ) -> Sequence[float | None]:
        """Score as a reward function does; the dataset columns are not used."""
        return self.batch_verify(as_pairs(prompts, completions))


class _RewardVerifier(Verifier):
    def __init__(self, function: RewardFunction, columns: Mapping[str, Mapping[str, Any]]) -> None:
        self.__name__ = reward_name(function)
        self._function, self._columns = function, columns

    def batch_verify(self, pairs: list[tuple[str, str]]) -> Sequence[float | None]:
        prompts = [prompt for prompt, _ in pairs]
        rows = [self._columns.get(prompt, {}) for prompt in prompts]
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row.get(name) for row in rows] for name in names}
        rewards = self._function(prompts=prompts, completions=[text for _, text in pairs], **columns)
        return list(rewards)


def verifier_from_reward(function: RewardFunction, columns: Mapping[str, Mapping[str, Any]] | None = None) -> Verifier:
    """Make a `Verifier` of a synchronous reward function; it gets prompts and completions as plain strings.

    Args:
        function: a reward function with TRL's signature.
        columns: prompt text -> dataset columns for the function, such as `{"2+3=": {"answer": "5"}}`, because a
            verifier has no dataset row. A missing column is None.
    """
    return _RewardVerifier(function, columns or {})


def as_pairs(
    prompts: Sequence[str | list[Message]], completions: Sequence[str | list[Message]]
) -> list[tuple[str, str]]:
    """Reward-function arguments as the (prompt, completion) texts that a verifier scores."""
    return [(prompt_text(one), completion_text(other)) for one, other in zip(prompts, completions, strict=True)]


def reward_name(function: object) -> str:
    """The name of a reward function in logs: its `__name__` (also inside a partial), or the name of its class."""
    while hasattr(function, "func") and not hasattr(function, "__name__"):
        function = function.func
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) and name else type(function).__name__
