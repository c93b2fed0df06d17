"""Rewards for form: tags in order, JSON of a schema, length in tokens. For a regular expression see `format_reward`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from covey.errors import ConfigError, RewardError
from covey.rewards.extract import completion_text
from covey.rewards.text import TextReward, named
from covey.types import Message

_JSON_BLOCK = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n?```", re.DOTALL)
_MAX_JSON = 200_000


def tags_reward(*tags: str, name: str = "tags") -> TextReward:
    """Reward 1.0 where a completion is `<a>...</a> <b>...</b>`: these tags once each, in order, with text in each.

    Nothing but white space may stand outside of them.

    Raises:
        ConfigError: no tags, or one that is no name.
    """
    if not tags or not all(re.fullmatch(r"[A-Za-z][\w-]*", tag) for tag in tags):
        raise ConfigError(f"tags={tags!r}: give names such as 'think', 'answer'")

    def reward(completions: Sequence[str | list[Message]], **columns: Any) -> list[float | None]:
        return [float(has_tags(completion_text(completion), tags)) for completion in completions]

    return named(reward, name, ())


def has_tags(text: str, tags: Sequence[str]) -> bool:
    """Whether `text` consists of these elements, in order."""
    rest = text.strip()
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if not rest.startswith(opening) or rest.count(opening) != 1 or rest.count(closing) != 1:
            return False
        body, _, rest = rest.removeprefix(opening).partition(closing)
        if not body.strip() or any(f"<{other}>" in body for other in tags):
            return False
        rest = rest.lstrip()
    return not rest


def json_reward(schema: Mapping[str, Any] | None = None, *, name: str = "json") -> TextReward:
    """Reward 1.0 where a completion is JSON, bare or in its last fenced block, and fits a JSON schema (if given).

    Raises:
        ConfigError: the schema is none.
    """
    import jsonschema

    validator = None
    if schema is not None:
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ConfigError(f"schema: {error.message}; give a JSON schema") from None
        # jsonschema's own compares each item with each other one where they cannot be sorted
        validator = jsonschema.validators.extend(kind, {"uniqueItems": _unique_items})(schema)

    def reward(completions: Sequence[str | list[Message]], **columns: Any) -> list[float | None]:
        return [float(_is_json(completion_text(completion), validator)) for completion in completions]

    return named(reward, name, ())


def _unique_items(validator: Any, wanted: bool, items: Any, schema: Any) -> Iterator[Any]:
    if wanted and validator.is_type(items, "array"):
        texts = [json.dumps(_plain(item), sort_keys=True) for item in items]
        if len(set(texts)) < len(texts):
            import jsonschema

            yield jsonschema.ValidationError("items are not unique")


def _plain(value: Any) -> Any:
    """The same text for values that JSON schema calls equal: 1 and 1.0, not 1 and true."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _is_json(text: str, validator: Any) -> bool:
    if len(text) > _MAX_JSON:
        return False
    blocks = _JSON_BLOCK.findall(text)
    try:
        value = json.loads(blocks[-1] if blocks else text)
        return validator is None or bool(validator.is_valid(value))
    except (ValueError, RecursionError):
        return False


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
