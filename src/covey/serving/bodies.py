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
    """One completion on its way to a client."""

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


def envelope(asked: CompletionRequest | ChatRequest, model: str) -> dict[str, Any]:
    """What every answer, and every event of a stream, begins with."""
    chat = isinstance(asked, ChatRequest)
    kind = "chat.completion" if chat else "text_completion"
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": f"{kind}.chunk" if chat and asked.stream else kind,
        "created": int(time.time()),
        "model": model,
    }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The count of tokens at an answer's end."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def answer_body(asked: CompletionRequest | ChatRequest, model: str, found: Sequence[Found]) -> bytes:
    """A whole answer. A prompt counts once for its `n` completions, as with OpenAI."""
    body = envelope(asked, model) | {
        "choices": [{"index": index, **_choice(asked, one)} for index, one in enumerate(found)],
        "policy_version": min(one.answer.versions[0][1] for one in found),
        "usage": usage(
            sum(len(one.prompt_ids) for one in found[:: asked.n]),
            sum(len(one.answer.completion.token_ids) for one in found),
        ),
    }
    return "".join(_pieces(body)).encode()


def stream_choice(asked: CompletionRequest | ChatRequest, part: Part, tokens: list[str]) -> dict[str, Any]:
    """One choice of an event."""
    found: dict[str, Any] = {"index": part.index}
    if isinstance(asked, ChatRequest):
        found["delta"] = ({"role": "assistant"} if part.first else {}) | {"content": part.text}
    else:
        found["text"] = part.text
    found["finish_reason"] = part.finish_reason
    if asked.wants_logprobs:
        found["logprobs"] = _logprobs(asked, tokens, part.logprobs)
    return found | ({"token_ids": part.token_ids} if asked.return_token_ids else {})


def _choice(asked: CompletionRequest | ChatRequest, one: Found) -> dict[str, Any]:
    chat, completion, versions = isinstance(asked, ChatRequest), one.answer.completion, one.answer.versions
    found: dict[str, Any] = {"message": {"role": "assistant", "content": one.text}} if chat else {"text": one.text}
    found |= {
        "finish_reason": completion.finish_reason,
        "policy_version": versions[0][1],
        "policy_versions": [list(part) for part in versions],
    }
    if asked.return_token_ids:
        found |= {"token_ids": completion.token_ids, "prompt_token_ids": one.prompt_ids}
    if asked.return_support and completion.support is not None:
        found["support"] = {"ids": completion.support.ids, "offsets": completion.support.offsets}
    wanted = asked.wants_logprobs
    return found | {"logprobs": _logprobs(asked, one.tokens, completion.logprobs.tolist()) if wanted else None}


def _logprobs(asked: CompletionRequest | ChatRequest, tokens: list[str], logprobs: list[float]) -> dict[str, Any]:
    if not isinstance(asked, ChatRequest):
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None}
    return {
        "content": [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
    }


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
