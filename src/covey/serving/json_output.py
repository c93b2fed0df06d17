"""Completions that are JSON, for `response_format`: llguidance says which tokens may come next."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from covey.errors import GenerationError
from covey.serving.requests import RequestError
from covey.types import Allows, IntArray

_SPACE = {"whitespace_pattern": r"[ \n]{0,16}"}  # without an end, a model that repeats itself would write spaces only
# about 0.1 s to compile, and as much for one token: decoding of all waits while a token's mask is computed
_LIMITS = {"initial_lexer_fuel": 100_000, "step_lexer_fuel": 50_000, "max_lexer_states": 50_000}
_AT_ONCE, _EACH = 0.5, 0.003
"""Seconds that masks of one request's completions may take at once, and each on average, before it is refused."""


def json_rules(schema: Mapping[str, Any], tokenizer: Any, size: int, ends: tuple[int, ...]) -> Callable[[], Allows]:
    """What makes the rule of one completion, ended by `ends`. Raises `RequestError`, `GenerationError`: not served."""
    try:
        from llguidance import LLMatcher, LLParserLimits

        tokens = _tokens(tokenizer, size, ends)
    except (ImportError, ValueError) as error:
        raise RequestError(f"response_format: not served for this model, or not installed: {error!s:.300}") from error
    try:
        grammar = LLMatcher.grammar_from_json_schema(dict(schema), overrides=_SPACE)
    except ValueError as error:
        raise RequestError(f"response_format: the schema is not served: {error!s:.300}") from error
    whole = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False, **_LIMITS))
    if whole.is_error():
        raise RequestError(f"response_format: the schema is not served: {whole.get_error():.300}")
    refused: list[GenerationError] = []  # for one completion: the others need not find out for themselves
    left = _AT_ONCE

    def rule() -> Allows:
        matcher, read = whole.deep_copy(), 0

        def allows(said: Sequence[int]) -> IntArray:
            nonlocal read, left
            if refused:
                raise refused[0]
            began = time.thread_time()
            matcher.consume_tokens(list(said[read:]))
            read = len(said)
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            left = min(left + _EACH - (time.thread_time() - began), _AT_ONCE)
            if matcher.is_error() or left < 0:
                trouble = "too complex, or refers to itself without an end" if matcher.is_error() else "takes too long"
                told = f"response_format: the schema is not served: {trouble}: {matcher.get_error():.300}"
                refused.append(GenerationError(told.splitlines()[0].rstrip(": ")))
                raise refused[0]
            return np.flatnonzero(bits[:size])

        return allows

    # most of what the limits refuse shows where a pattern begins: here it costs no other request any time
    allows, said = rule(), list[int]()
    while len(ids := allows(said)) == 1 and ids[0] not in ends and len(said) < 4:
        said += ids.tolist()
    return rule


@lru_cache(1)
def _tokens(tokenizer: Any, size: int, ends: tuple[int, ...]) -> Any:
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, n_vocab=size, eos_token=list(ends))
