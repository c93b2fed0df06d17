r"""Symbolic equality of mathematical answers, by `math-verify`: `\frac{1}{2}`, `0.5` and `1/2` are one answer.

`math-verify` reads LaTeX and compares with SymPy, which can run for minutes on hostile expressions, and its own time
limits are signals, which do not work outside the main thread. So it runs in processes that are killed at the limit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from covey.errors import ConfigError, RewardError
from covey.rewards.extract import completion_text
from covey.rewards.parallel import ItemTimeout, WorkerPool
from covey.rewards.text import found_word, say
from covey.types import Message

_MAX_TEXT = 20_000
_MOST_WORDS = 12
"""A reference of more words is a text with an answer in it, not an expression."""


class MathReward:
    r"""1.0 where a completion's final answer equals its row's `column`, else 0.0.

    Args:
        column: the reference: a number, an expression, or a solution that ends in `\boxed{}`. None: not scored.
        workers: processes.
        time_limit: seconds for one completion; one that takes longer scores 0.

    Raises:
        ConfigError: `math-verify` is not installed.
    """

    __name__ = "math"

    def __init__(self, column: str = "answer", *, workers: int = 2, time_limit: float = 5.0) -> None:
        try:
            import math_verify  # noqa: F401
        except ImportError:
            raise ConfigError("math answers are compared by math-verify; pip install 'covey[math]'") from None
        self.required_columns = (column,)
        self._column = column
        self._pool = WorkerPool(compared, workers=workers, time_limit=time_limit, prepare=load)
        self.timeouts = 0

    def __call__(self, completions: Sequence[str | list[Message]], **columns: Any) -> list[float | None]:
        """Score as a reward function does.

        Raises:
            RewardError: the column is absent, or a reference holds no answer; `sample` names it.
        """
        if self._column not in columns:
            raise RewardError(
                f"answers are compared with the dataset column {self._column!r}, which is absent", function="math"
            )
        references = columns[self._column]
        items = [
            (str(reference), completion_text(completion)[-_MAX_TEXT:])
            for completion, reference in zip(completions, references, strict=True)
            if reference is not None
        ]
        found = iter(self._pool.map(items))
        results = [None if reference is None else self._score(next(found), i) for i, reference in enumerate(references)]
        say(columns, self.__name__, [None if result is None else result[1] for result in results])
        return [None if result is None else result[0] for result in results]

    def close(self) -> None:
        """Ends the processes; the next call starts them anew."""
        self._pool.close()

    def _score(self, found: Any, index: int) -> tuple[float, str]:
        if isinstance(found, ItemTimeout):
            self.timeouts += 1
            return 0.0, "took too long to compare"
        if isinstance(found, Exception):
            raise RewardError(str(found), function="math", sample=index)
        score, word = found
        return float(score), str(word)


def load() -> None:
    """Import what takes seconds, in a worker, before an answer's time begins."""
    compared("1", "1")


def compared(reference: str, text: str) -> tuple[float, str]:
    """Runs in a worker. 1.0 if the last answer in `text` equals the reference, and what was found in it.

    Raises:
        ValueError: the reference holds no answer.
    """
    from math_verify import parse, verify

    # their time limits are off, which they warn of: they need the main thread's signals; this process is killed instead
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    is_text = len(reference.split()) > _MOST_WORDS or any(mark in reference for mark in ("$", "\\boxed", "\\(", "\\["))
    expected = parse(reference if is_text else f"${reference}$", parsing_timeout=None)
    if not expected:
        raise ValueError(f"the reference {reference!r:.80} holds no answer that math-verify can read")
    try:
        answer = parse(text, parsing_timeout=None)
        # the last one is the text that was read; an expression may take for ever to be written out
        word = found_word(
            next((each for each in reversed(answer) if isinstance(each, str)), "an answer") if answer else None
        )
        return float(bool(answer) and verify(expected, answer, timeout_seconds=None)), word
    except Exception:  # text that breaks the parser is no answer
        return 0.0, found_word(None)
