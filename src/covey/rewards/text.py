"""Small rewards that read the completion's text: exact match, numeric match, format."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from covey.errors import ConfigError, RewardError
from covey.rewards.extract import (
    MAX_NUMBER_LENGTH,
    Marker,
    as_number,
    completion_text,
    final_number,
    number_text,
    opened_texts,
    parse_number,
)
from covey.types import Message

_LONGEST_WORD = 200
TextReward = Callable[..., list[float | None]]
"""A reward function whose `required_columns` names the dataset columns that it reads."""


def exact_match(column: str = "answer", *, ignore_case: bool = False) -> TextReward:
    """Reward 1.0 where the whole completion equals the row's `column`, white space around both aside; else 0.0.

    A row whose reference is None is not scored (None). A reference is text, a bool or a number; a number in digits, 5.0
    as "5". Anything else raises `RewardError`.
    """

    def compare(text: str, reference: Any) -> tuple[bool, None]:
        expected = str(reference) if isinstance(reference, str | bool) else number_text(reference)
        if expected is None:
            raise ValueError(
                f"{column}={reference!r:.80}: no text equals a {type(reference).__name__}; give text or a number"
            )
        left, right = text.strip(), expected.strip()
        return (left.casefold() == right.casefold() if ignore_case else left == right), None

    return _against_column("exact_match", column, compare)


def numeric_match(
    column: str = "answer", *, strict: bool = False, markers: Iterable[Marker] = ("####", "boxed", "answer")
) -> TextReward:
    """Reward 1.0 where the completion's final number equals the row's `column` as an exact number; else 0.0.

    Args:
        column: dataset column with the reference: a number, or text that is one. None: the row is not scored.
        strict: True accepts only a completion that is the number and nothing else.
        markers: where the final number is looked for; see `covey.rewards.extract.final_number`.

    The function raises `RewardError` for a reference that is no number, naming the sample.
    """
    chosen = tuple(markers)

    def compare(text: str, reference: Any) -> tuple[bool, str]:
        expected = as_number(reference)
        if expected is None:
            raise ValueError(
                f"{column}={reference!r:.80} is not a number of at most {MAX_NUMBER_LENGTH} characters; "
                "correct the dataset, or use exact_match"
            )
        number = parse_number(text) if strict else final_number(text, chosen)
        return expected == number, found_word(number)

    return _against_column("strict_numeric_match" if strict else "numeric_match", column, compare)


def format_reward(
    pattern: str, *, full: bool = True, flags: int = re.DOTALL, name: str = "format_reward"
) -> TextReward:
    r"""Reward 1.0 where the completion matches a regular expression, else 0.0.

    Args:
        pattern: e.g. `r"<think>.*</think>\s*\S+"`. Python's matcher can take exponential time on nested
            repetitions such as `(a+)+`, and cannot be interrupted while it does: avoid them.
        full: the whole text must match, white space around it aside; False searches. Where the prompt ends in a tag
            such as `<think>`, the text may match with that tag before it.
        flags: of the `re` module.
        name: the key of the reward in logs.

    Raises:
        ConfigError: the pattern is no regular expression.
    """
    try:
        compiled = re.compile(pattern, flags)
    except re.error as error:
        raise ConfigError(f"pattern={pattern!r}: {error}; give a Python regular expression") from None

    def reward(completions: Sequence[str | list[Message]], **columns: Any) -> list[float | None]:
        def fits(text: str) -> bool:
            return (compiled.fullmatch(text.strip()) if full else compiled.search(text)) is not None

        both = zip(map(completion_text, completions), opened_texts(completions, columns), strict=True)
        return [float(any(map(fits, {*texts}))) for texts in both]

    return named(reward, name, ())


def _against_column(name: str, column: str, compare: Callable[[str, Any], tuple[bool, str | None]]) -> TextReward:
    """`compare` says of text and reference whether they agree, and what was found in the text, if that is a word."""

    def reward(completions: Sequence[str | list[Message]], **columns: Any) -> list[float | None]:
        advice = "; pass the name of the column that holds the answer"
        references = column_of(columns, column, f"{name} compares with", advice, function=name)
        rewards: list[float | None] = []
        found: list[str | None] = []
        for index, (completion, reference) in enumerate(zip(completions, references, strict=True)):
            try:
                right, word = (None, None) if reference is None else compare(completion_text(completion), reference)
            except ValueError as error:
                raise RewardError(str(error), function=name, sample=index) from None
            rewards.append(None if right is None else float(right))
            found.append(word)
        if any(word is not None for word in found):
            say(columns, name, found)
        return rewards

    # the references are read before a run begins
    reward.check_rows = lambda rows: reward([""] * len(rows), **{column: [row.get(column) for row in rows]})  # type: ignore[attr-defined]
    return named(reward, name, (column,))


def say(columns: Mapping[str, Any], name: str, words: Sequence[Any]) -> None:
    """Record a short word about each completion beside the rewards, where the caller of the reward keeps such words."""
    keep = columns.get("log_extra")
    if callable(keep):
        keep(f"verdict/{name}", [None if word is None else str(word)[:_LONGEST_WORD] for word in words])


def found_word(answer: Any) -> str:
    """What is said of the answer that was found in a completion."""
    return "found no answer" if answer is None else f"found {str(answer)[:100]}"


def column_of(columns: Mapping[str, Any], name: str, use: str, advice: str = "", *, function: str) -> Any:
    """The values of a dataset column that a reward needs.

    Raises:
        RewardError: it is absent; `use` and `advice` say what needs it and what to do.
    """
    if name not in columns:
        present = ", ".join(sorted(columns)) or "none"
        raise RewardError(
            f"{use} the dataset column {name!r}, which is absent (present: {present}){advice}", function=function
        )
    return columns[name]


def named(function: TextReward, name: str, required_columns: tuple[str, ...]) -> TextReward:
    """Give a reward function its name and the columns that it reads."""
    function.__name__ = function.__qualname__ = name
    function.required_columns = required_columns  # type: ignore[attr-defined]
    return function
