"""Completions that are JSON, for `response_format`: llguidance says which tokens may come next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from covey.serving.requests import RequestError
from covey.types import Allows, IntArray

_SPACE = {"whitespace_pattern": r"[ \n]{0,16}"}  # without an end, a model that repeats itself would write spaces only


def json_rules(schema: Mapping[str, Any], tokenizer: Any, size: int, ends: tuple[int, ...]) -> Callable[[], Allows]:
    """What makes the rule of one completion; one of `ends` follows the JSON. Raises `RequestError`: not served."""
    try:
        from llguidance import LLMatcher

        grammar = LLMatcher.grammar_from_json_schema(dict(schema), overrides=_SPACE)
        whole = LLMatcher(_tokens(tokenizer, size, ends), grammar, log_level=0)
    except (ImportError, ValueError) as error:
        raise RequestError(f"response_format: not served for this model, or not installed: {error!s:.300}") from error
    if whole.is_error():
        raise RequestError(f"response_format: the schema is not served: {whole.get_error():.300}")

    def rule() -> Allows:
        matcher, read = whole.deep_copy(), 0

        def allows(said: Sequence[int]) -> IntArray:
            nonlocal read
            matcher.consume_tokens(list(said[read:]))
            read = len(said)
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            return np.flatnonzero(bits[:size] * (not matcher.is_error()))

        return allows

    return rule


@lru_cache(1)
def _tokens(tokenizer: Any, size: int, ends: tuple[int, ...]) -> Any:
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, n_vocab=size, eos_token=list(ends))
