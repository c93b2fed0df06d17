"""The reward functions of `trl.rewards`, with the same meaning."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from covey.algorithms import soft_overlong_punishment
from covey.rewards.extract import completion_text, opened_texts
from covey.rewards.maths import MathReward, expression_of, is_words

log = logging.getLogger(__name__)

_told: set[str] = set()
_THOUGHT = re.compile(r"<think>(?!.*<think>)(.*?)</think>.*", re.DOTALL)


@cache
def _equal() -> MathReward:
    found = MathReward("solution")
    found._as_trl = True
    return found


def accuracy_reward(completions: Sequence[Any], solution: Sequence[Any], **columns: Any) -> list[float | None]:
    r"""1.0 where the final answer equals the row's `solution` symbolically, else 0.0, by math-verify.

    Args:
        completions: N completions; an answer is in `\boxed{}`, or LaTeX after words such as "the answer is".
        solution: N references, texts as in `covey.rewards.MathReward`. As in TRL, a completion is not scored (None) if
            its reference is not text (with a warning), is words only or holds no answer.
        columns: not used.

    Raises `ConfigError`: math-verify is not installed.
    """
    known = [answer if _has_answer(answer) else None for answer in solution]
    return _equal()(list(completions), solution=known)


def _has_answer(reference: Any) -> bool:
    kind = type(reference).__name__
    if reference is not None and not isinstance(reference, str) and kind not in _told:
        _told.add(kind)
        log.warning("solution=%.80r: TRL scores no %s, so the row is not scored; give text: str(x)", reference, kind)
    try:
        return isinstance(reference, str) and not is_words(expression_of(reference))
    except ValueError:
        return False


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
    return [score if done else 0.0 for score, done in zip(scores, ended, strict=True)]


def think_format_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1.0 where a completion begins with one `<think>...</think>`, else 0.0.

    If the prompt ends in `<think>` (`prompt_ends`, from the trainer), the completion must only close it, and a second
    `<think>` is wrong.
    """
    return [1.0 if _THOUGHT.fullmatch(text) else 0.0 for text in opened_texts(completions, columns, "<think>")]


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
