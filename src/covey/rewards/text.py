"""Small rewards that read the completion's text: exact match, numbers, patterns, tags, JSON, length."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from covey.errors import ConfigError, RewardError
from covey.rewards import extract
from covey.rewards.extract import Marker, completion_text
from covey.rewards.parallel import WorkerPool
from covey.types import Message

_LONGEST_WORD = 200
TextReward = Callable[..., list[float | None]]
"""A reward function whose `required_columns` names the dataset columns that it reads."""


def exact_match(column: str = "answer", *, ignore_case: bool = False) -> TextReward:
    """Reward 1.0 where the whole completion equals the row's `column`, without surrounding white space; else 0.0.

    A reference is text, a bool or a number, where 5.0 is written "5". A row with None is not scored (None). Any other
    reference raises `RewardError`.
    """

    def compare(text: str, reference: Any) -> tuple[bool, None]:
        expected = str(reference) if isinstance(reference, str | bool) else extract.number_text(reference)
        if expected is None:
            kind = type(reference).__name__
            raise ValueError(f"{column}={reference!r:.80}: no text equals a {kind}; give text or a number")
        fold = str.casefold if ignore_case else str
        return fold(text.strip()) == fold(expected.strip()), None

    return _against_column("exact_match", column, compare)


def numeric_match(
    column: str = "answer", *, strict: bool = False, markers: Iterable[Marker] = ("####", "boxed", "answer")
) -> TextReward:
    """Reward 1.0 where the completion's final number equals the row's `column` as an exact number; else 0.0.

    Args:
        column: dataset column with the reference, a number or its text; a row with None is not scored.
        strict: True accepts only a completion that consists of the number.
        markers: see `covey.rewards.extract.final_number`.

    The function raises `RewardError` for a reference that is not a number, and names the sample.
    """
    chosen = tuple(markers)

    def compare(text: str, reference: Any) -> tuple[bool, str]:
        expected = extract.as_number(reference)
        if expected is None:
            raise ValueError(
                f"{column}={reference!r:.80} is not a number of at most {extract.MAX_NUMBER_LENGTH} characters; "
                "correct the dataset, or use exact_match"
            )
        number = extract.parse_number(text) if strict else extract.final_number(text, chosen)
        return expected == number, found_word(number)

    return _against_column("strict_numeric_match" if strict else "numeric_match", column, compare)


def format_reward(
    pattern: str, *, full: bool = True, flags: int = re.DOTALL, name: str = "format_reward"
) -> TextReward:
    r"""Reward 1.0 where the completion matches a regular expression, else 0.0.

    Raises `ConfigError`: the pattern is no regular expression.

    Args:
        pattern: e.g. `r"<think>.*</think>\s*\S+"`. Python's matcher can take exponential time on nested
            repetitions such as `(a+)+`, and cannot be interrupted while it does: avoid them.
        full: the whole text must match, without surrounding white space; False = any part may match. If the prompt ends
            in a tag such as `<think>`, the text may also match with this tag before it.
        flags: of the `re` module.
        name: the key of the reward in logs.
    """
    try:
        compiled = re.compile(pattern, flags)
    except re.error as error:
        raise ConfigError(f"pattern={pattern!r}: {error}; give a Python regular expression") from None

    def reward(completions: Sequence[str | list[Message]], **columns: Any) -> list[float | None]:
        def fits(text: str) -> bool:
            return (compiled.fullmatch(text.strip()) if full else compiled.search(text)) is not None

        both = zip(map(completion_text, completions), extract.opened_texts(completions, columns), strict=True)
        return [float(any(map(fits, {*texts}))) for texts in both]

    return named(reward, name, ())


def _against_column(name: str, column: str, compare: Callable[[str, Any], tuple[bool, str | None]]) -> TextReward:
    """`compare` says of text and reference whether they agree, and what was found in the text, if that is a word."""

    def reward(completions: Sequence[str | list[Message]], **columns: Any) -> list[float | None]:
        advice = "; pass the name of the column that holds the answer"
        references = column_of(columns, column, f"{name} compares with", advice, function=name)
        found: list[tuple[bool | None, str | None]] = []
        for index, (completion, reference) in enumerate(zip(completions, references, strict=True)):
            try:
                found.append((None, None) if reference is None else compare(completion_text(completion), reference))
            except ValueError as error:
                raise RewardError(str(error), function=name, sample=index) from None
        if any(word is not None for _, word in found):
            say(columns, name, [word for _, word in found])
        return [None if right is None else float(right) for right, _ in found]

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
    """A dataset column that a reward needs; `RewardError` if absent, with what needs it (`use`) and `advice`."""
    if name not in columns:
        absent = f"which is absent (present: {', '.join(sorted(columns)) or 'none'}){advice}"
        raise RewardError(f"{use} the dataset column {name!r}, {absent}", function=function)
    return columns[name]


def named(function: TextReward, name: str, required_columns: tuple[str, ...]) -> TextReward:
    """Give a reward function its name and the columns that it reads."""
    function.__name__ = function.__qualname__ = name
    function.required_columns = required_columns  # type: ignore[attr-defined]
    return function


_JSON_BLOCK = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n?```", re.DOTALL)


def tags_reward(*tags: str, name: str = "tags") -> TextReward:
    """Reward 1.0 where a completion is `<a>...</a> <b>...</b>`: these tags once each, in order, with text in each.

    Only white space may stand outside the tags. The prompt may open the first tag. Raises `ConfigError`: there are no
    tags, or one is not a name.
    """
    if not tags or not all(re.fullmatch(r"[A-Za-z][\w-]*", tag) for tag in tags):
        raise ConfigError(f"tags={tags!r}: give names such as 'think', 'answer'")

    def reward(completions: Sequence[str | list[Message]], **columns: Any) -> list[float | None]:
        return [float(has_tags(text, tags)) for text in extract.opened_texts(completions, columns, f"<{tags[0]}>")]

    return named(reward, name, ())


def has_tags(text: str, tags: Sequence[str]) -> bool:
    """Whether `text` consists of these elements, in order."""
    rest = text.strip()
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if not rest.startswith(opening) or rest.count(opening) != 1 or rest.count(closing) != 1:
            return False
        body, _, rest = rest.removeprefix(opening).partition(closing)
        if not body.strip() or any(f"<{other}>" in body or f"</{other}>" in body for other in tags):
            return False
        rest = rest.lstrip()
    return not rest


def json_reward(schema: Mapping[str, Any] | None = None, *, name: str = "json", time_limit: float = 2.0) -> TextReward:
    """Reward 1.0 where a completion, or its last fenced block, is JSON and fits a JSON schema (if given); else 0.0.

    Raises `ConfigError`: the schema is not valid.

    Args:
        schema: checked in another process, because the check can take a time that is exponential in the text.
        name: the key of the reward in logs.
        time_limit: time limit for one completion, in seconds; a longer check scores 0.
    """
    import jsonschema

    pool = None
    if schema is not None:
        try:
            jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ConfigError(f"schema: {error.message}; give a JSON schema") from None
        # what takes time is imported in the worker before a completion's time begins
        first = partial(fits_schema, "true", "1")
        pool = WorkerPool(fits_schema, workers=1, time_limit=time_limit, memory_mb=2048, prepare=first)
    written = json.dumps(schema)

    def reward(completions: Sequence[str | list[Message]], **columns: Any) -> list[float | None]:
        found = [json_text(completion_text(completion)) for completion in completions]
        if pool is None:
            return [float(text is not None) for text in found]
        fits = iter(pool.map([(written, text) for text in found if text is not None]))
        # whatever goes wrong in checking a text that nobody vouches for, it does not fit
        return [float(text is not None and next(fits) is True) for text in found]

    return named(reward, name, ())


def json_text(text: str) -> str | None:
    """The JSON of a completion, or None if it is none (NaN and Infinity are none) or too long."""
    if len(text) > extract.MAX_JSON:
        return None
    blocks = _JSON_BLOCK.findall(text)
    found = str(blocks[-1]) if blocks else text
    try:
        extract.read_json(found)
    except ValueError:
        return None
    return found


def fits_schema(schema: str, text: str) -> bool:
    """Whether a text is JSON that fits the schema. Runs in a process of a `WorkerPool`."""
    return bool(_validator(schema).is_valid(json.loads(text)))


@lru_cache(maxsize=8)
def _validator(schema: str) -> Any:
    import jsonschema

    read = json.loads(schema)
    return jsonschema.validators.validator_for(read, default=jsonschema.Draft202012Validator)(read)


def length_reward(most: int, *, least: int = 1, over: int = 0, name: str = "length") -> TextReward:
    """Reward 1.0 where a completion has `least` to `most` tokens, falling to 0.0 over `over` more tokens.

    Raises `ConfigError`: not 1 <= least <= most, or `over` is negative.
    """
    if not 1 <= least <= most or over < 0:
        raise ConfigError(f"least={least}, most={most}, over={over}: 1 <= least <= most and over >= 0 must hold")

    def score(length: int) -> float:
        if length < least:
            return 0.0
        return max(0.0, 1.0 - max(length - most, 0) / over) if over else float(length <= most)

    def reward(
        completions: Sequence[str | list[Message]], completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        if completion_ids is None:
            problem = "lengths are counted in completion_ids, which the trainer passes; there are none"
            raise RewardError(problem, function=name)
        return [score(len(ids)) for ids in completion_ids]

    return named(reward, name, ())
