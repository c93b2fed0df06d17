"""OpenAI's answers, and the parts of a stream, as JSON."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from covey.serving.batching import Answer
from covey.serving.requests import ChatRequest, CompletionRequest
from covey.types import IntArray

_AT_ONCE = 4096
"""Entries of a list that are written without a pause: other threads wait for each such piece."""


@dataclass(frozen=True, slots=True)
class Found:
    """One completion on its way to a client.

    Attributes:
        tokens: text of each token, where log-probabilities are asked for.
    """

    prompt_ids: IntArray
    text: str
    tokens: list[str]
    answer: Answer


@dataclass(frozen=True, slots=True)
class Part:
    """What is new of one completion in a stream; the role comes first, the finish reason last, without tokens."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    version: int
    finish_reason: str | None
    text: str
    first: bool


def completion_choice(asked: CompletionRequest, one: Found) -> dict[str, Any]:
    """One of `choices` of `/v1/completions`."""
    logprobs = None
    if asked.wants_logprobs:
        logprobs = _completion_logprobs(one.tokens, one.answer.completion.logprobs.tolist())
    return {"text": one.text, **_common(asked, one), "logprobs": logprobs}


def chat_choice(asked: ChatRequest, one: Found) -> dict[str, Any]:
    """One of `choices` of `/v1/chat/completions`."""
    logprobs = _chat_logprobs(one.tokens, one.answer.completion.logprobs.tolist()) if asked.wants_logprobs else None
    return {"message": {"role": "assistant", "content": one.text}, **_common(asked, one), "logprobs": logprobs}


def completion_part(asked: Any, part: Part, tokens: list[str]) -> dict[str, Any]:
    """One choice of an event of `/v1/completions`."""
    found = {"index": part.index, "text": part.text, "finish_reason": part.finish_reason}
    if asked.wants_logprobs:
        found["logprobs"] = _completion_logprobs(tokens, part.logprobs)
    return found | ({"token_ids": part.token_ids} if asked.return_token_ids else {})


def chat_part(asked: Any, part: Part, tokens: list[str]) -> dict[str, Any]:
    """One choice of an event of `/v1/chat/completions`."""
    delta = ({"role": "assistant"} if part.first else {}) | {"content": part.text}
    found = {"index": part.index, "delta": delta, "finish_reason": part.finish_reason}
    if asked.wants_logprobs:
        found["logprobs"] = _chat_logprobs(tokens, part.logprobs)
    return found | ({"token_ids": part.token_ids} if asked.return_token_ids else {})


def answer_body(
    kind: str, prefix: str, name: str, n: int, found: Sequence[Found], choices: Sequence[dict[str, Any]]
) -> bytes:
    """A whole answer; each choice gets its index. A prompt counts once for its `n` completions, as with OpenAI."""
    prompts = sum(len(one.prompt_ids) for one in found[::n])
    tokens = sum(len(one.answer.completion.token_ids) for one in found)
    body = {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": name,
        "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
        "policy_version": min(one.answer.versions[0][1] for one in found),
        "usage": {"prompt_tokens": prompts, "completion_tokens": tokens, "total_tokens": prompts + tokens},
    }
    return "".join(_pieces(body)).encode()


def _completion_logprobs(tokens: list[str], logprobs: list[float]) -> dict[str, Any]:
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None}


def _chat_logprobs(tokens: list[str], logprobs: list[float]) -> dict[str, Any]:
    return {
        "content": [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
    }


def _common(asked: CompletionRequest | ChatRequest, one: Found) -> dict[str, Any]:
    completion, versions = one.answer.completion, one.answer.versions
    common: dict[str, Any] = {
        "finish_reason": completion.finish_reason,
        "policy_version": versions[0][1],
        "policy_versions": [list(part) for part in versions],
    }
    if asked.return_token_ids:
        common |= {"token_ids": completion.token_ids, "prompt_token_ids": one.prompt_ids}
    if asked.return_support and completion.support is not None:
        common["support"] = {"ids": completion.support.ids, "offsets": completion.support.offsets}
    return common


def _pieces(value: Any) -> Iterator[str]:
    """JSON in pieces, so that a long answer does not hold the interpreter."""
    if isinstance(value, dict):
        yield "{"
        for place, (name, one) in enumerate(value.items()):
            yield f"{', ' if place else ''}{json.dumps(name)}: "
            yield from _pieces(one)
        yield "}"
    elif isinstance(value, list | np.ndarray):
        yield "["
        for start in range(0, len(value), _AT_ONCE):
            part = value[start : start + _AT_ONCE]
            whole = part.tolist() if isinstance(part, np.ndarray) else part
            if start:
                yield ", "
            if whole and isinstance(whole[0], dict):
                for place, one in enumerate(whole):
                    yield ", " if place else ""
                    yield from _pieces(one)
            else:
                yield json.dumps(whole)[1:-1]
        yield "]"
    else:
        yield json.dumps(value)
