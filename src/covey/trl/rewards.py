"""Reward functions that scripts import from `trl.rewards`, with what they mean there."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from covey.algorithms import soft_overlong_punishment
from covey.rewards.extract import completion_text
from covey.rewards.maths import MathReward

_THOUGHT = re.compile(r"<think>(?!.*<think>)(.*?)</think>.*", re.DOTALL)


@cache
def _equal() -> MathReward:
    return MathReward("solution")


def accuracy_reward(completions: Sequence[Any], solution: Sequence[str], **columns: Any) -> list[float | None]:
    r"""1.0 where the final answer equals the row's `solution` symbolically, else 0.0, by math-verify.

    Args:
        completions: N completions.
        solution: N references: expressions, or texts with `\boxed{}`; one without an answer in it is not scored.
        columns: not used.

    Raises:
        ConfigError: math-verify is not installed.
    """
    known = [answer if _has_answer(answer) else None for answer in solution]
    return _equal()(list(completions), solution=known)


@cache
def _has_answer(reference: str) -> bool:
    return bool(re.search(r"\w", reference)) and (len(reference.split()) <= 12 or bool(re.search(r"\$|\\", reference)))


def reasoning_accuracy_reward(
    completions: Sequence[Any], solution: Sequence[str], reasoning_delimiters: Sequence[str] | None = None, **_: Any
) -> list[float | None]:
    """`accuracy_reward` of what follows the reasoning; 0.0 where the reasoning does not end.

    Args:
        completions: N completions.
        solution: N references.
        reasoning_delimiters: ends of the reasoning; None = `</think>`.
    """
    ends = list(reasoning_delimiters or ["</think>"])
    answers, ended = [], []
    for text in map(completion_text, completions):
        end = next((end for end in ends if end in text), None)
        ended.append(end is not None)
        answers.append("" if end is None else text.split(end)[-1])
    scores = accuracy_reward(answers, solution)
    return [score if done or score is None else 0.0 for score, done in zip(scores, ended, strict=True)]


def think_format_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1.0 where a completion begins with one `<think>...</think>`, else 0.0."""
    return [1.0 if _THOUGHT.fullmatch(completion_text(completion)) else 0.0 for completion in completions]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """DAPO's penalty on long completions as a reward function (arXiv 2503.14476, equation 13).

    Args:
        max_completion_len: in tokens.
        soft_punish_cache: width of the range in which the penalty falls from 0 to -1, in tokens.
    """

    def soft_overlong_punishment_reward(
        completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float]:
        lengths = [len(ids) for ids in completion_ids]
        penalties: Any = soft_overlong_punishment(lengths, max_completion_len, soft_punish_cache)
        return [float(penalty) for penalty in penalties]

    return soft_overlong_punishment_reward
