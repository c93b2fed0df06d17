"""Rewards for form: tags in order, JSON of a schema, length in tokens. For a regular expression see `format_reward`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from covey.errors import ConfigError, RewardError
from covey.rewards.extract import MAX_JSON, completion_text, opened_texts, read_json
from covey.rewards.parallel import WorkerPool
from covey.rewards.text import TextReward, named
from covey.types import Message

_JSON_BLOCK = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n?```", re.DOTALL)


def tags_reward(*tags: str, name: str = "tags") -> TextReward:
    """Reward 1.0 where a completion is `<a>...</a> <b>...</b>`: these tags once each, in order, with text in each.

    Nothing but white space may stand outside of them. The first tag may be opened by the prompt's end instead.

    Raises:
        ConfigError: no tags, or one that is no name.
    """
    if not tags or not all(re.fullmatch(r"[A-Za-z][\w-]*", tag) for tag in tags):
        raise ConfigError(f"tags={tags!r}: give names such as 'think', 'answer'")

    def reward(completions: Sequence[str | list[Message]], **columns: Any) -> list[float | None]:
        return [float(has_tags(text, tags)) for text in opened_texts(completions, columns, f"<{tags[0]}>")]

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
    """Reward 1.0 where a completion is JSON, bare or in its last fenced block, and fits a JSON schema (if given).

    Args:
        schema: its check can take time that is exponential in the text, so it runs in a process of its own.
        name: the key of the reward in logs.
        time_limit: seconds for the check of one completion; one that takes longer scores 0.

    Raises:
        ConfigError: the schema is none.
    """
    import jsonschema

    pool = None
    if schema is not None:
        try:
            jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ConfigError(f"schema: {error.message}; give a JSON schema") from None
        pool = WorkerPool(fits_schema, workers=1, time_limit=time_limit, memory_mb=2048, prepare=load)
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
    if len(text) > MAX_JSON:
        return None
    blocks = _JSON_BLOCK.findall(text)
    found = str(blocks[-1]) if blocks else text
    try:
        read_json(found)
    except ValueError:
        return None
    return found


def load() -> None:
    """Import what takes time, in a worker, before a completion's time begins."""
    fits_schema("true", "1")


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

    Raises:
        ConfigError: not 1 <= least <= most, or over below 0.
    """
    if not 1 <= least <= most or over < 0:
        raise ConfigError(f"least={least}, most={most}, over={over}: 1 <= least <= most and over >= 0 must hold")

    def score(length: int) -> float:
        if length < least:
            return 0.0
        return max(0.0, 1.0 - max(length - most, 0) / over) if over else float(length <= most)

    def reward(
        completions: Sequence[str | list[Message]],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        if completion_ids is None:
            raise RewardError(
                "lengths are counted in completion_ids, which the trainer passes; there are none", function=name
            )
        return [score(len(ids)) for ids in completion_ids]

    return named(reward, name, ())
