"""What clients may ask: OpenAI's fields, and those that training needs besides.

A request is read strictly: types are not guessed at, unknown fields are refused, null means that a field is left out.
"""

from __future__ import annotations

import json
import re
import time
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from covey.serving.neutral import RequestError, without_neutral
from covey.types import SamplingSettings

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
MAX_COMPLETIONS = 1024
"""Of one request."""
_MOST_CHOICES = 1024
"""Sequences that one completion may have to choose among: each is looked at for each token."""
_MOST_CHOICE_IDS = 1 << 18
"""Of all of them in one request."""
_MOST_LISTS, _MOST_VALUES = 100_000, 1_000_000
"""Lists, objects and names in a body, each of which costs far more than its bytes; values in lists and objects."""
_BYTES_PER_SECOND = 1e8
"""Other threads run for a while between two steps of reading a body, each of which holds the interpreter."""
_SMALLEST_TEMPERATURE = 0.001

Choice = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Choices = Annotated[list[Choice], Field(fail_fast=True, min_length=1, max_length=_MOST_CHOICES)]
Stream = Annotated[list[int], Field(fail_fast=True, max_length=16)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class StreamOptions(BaseModel):
    """The options of a stream."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class _Sampling(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str = ""
    n: int = Field(default=1, ge=1, le=MAX_COMPLETIONS)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=64)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=256)] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = Field(default="", max_length=1000)
    return_token_ids: bool = False
    # beyond OpenAI: which random stream each completion draws from, what it may be, which weights it must come from
    streams: Annotated[list[Stream], Field(fail_fast=True, max_length=MAX_COMPLETIONS)] | None = None
    choices: Annotated[list[Choices | None], Field(fail_fast=True, max_length=MAX_COMPLETIONS)] | None = None
    return_support: bool = False
    policy_version: int | None = None

    @field_validator("temperature")
    @classmethod
    def _no_overflow(cls, value: float) -> float:
        # one request whose logits overflow would end the decode step of all
        if 0 < value < _SMALLEST_TEMPERATURE:
            raise ValueError(f"must be 0 (greedy) or at least {_SMALLEST_TEMPERATURE}")
        return value

    @model_validator(mode="after")
    def _goes_together(self) -> _Sampling:
        ids = sum(len(choice) for choices in self.choices or () for choice in choices or ())
        if ids > _MOST_CHOICE_IDS:
            raise ValueError(f"choices has {ids} token ids; send up to {_MOST_CHOICE_IDS} in one request")
        if "stream_options" in self.model_fields_set and not self.stream:
            raise ValueError("stream_options is for stream=true only")
        if self.stream and self.return_support:
            raise ValueError("return_support is not streamed; leave stream out")
        if self.return_support and self.temperature == 0 and self.choices is None:
            raise ValueError("return_support is not for temperature=0, where one token is left; leave one of them out")
        if self.seed is not None and self.streams is not None:
            raise ValueError("seed and streams both say which random numbers are drawn; leave one of them out")
        return self

    def settings(self, max_tokens: int, eos_token_ids: tuple[int, ...], vocabulary: int) -> SamplingSettings:
        """The settings as the engine understands them."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        ends = () if self.ignore_eos else eos_token_ids
        if self.stop_token_ids is not None:  # they stop, whether the model's own end is ignored or not
            ends = tuple(self.stop_token_ids)
        return SamplingSettings(
            temperature=self.temperature,
            top_k=self.top_k if 0 < self.top_k < vocabulary else 0,
            top_p=self.top_p,
            min_p=self.min_p,
            max_tokens=max_tokens,
            eos_token_ids=ends,
            stop_strings=tuple(stop),
            keep_support=self.return_support and self.temperature > 0,
        )


class CompletionRequest(_Sampling):
    """The body of a request to `/v1/completions`."""

    prompt: str | list[Any]
    max_tokens: int = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=1)

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of the sampled tokens are asked for; 0 asks for these too."""
        return self.logprobs is not None

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or ids.

        Raises:
            RequestError: it is no prompt.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and all(type(token) is int for token in self.prompt):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt: an empty list; it must be a text, a list of token ids, or a list of these")
        for prompt in self.prompt:
            whole = isinstance(prompt, list) and all(type(token) is int for token in prompt)
            if not whole and not isinstance(prompt, str):
                raise RequestError("prompt: must be a text, a list of token ids, or a list of one of these")
        return self.prompt


class ChatRequest(_Sampling):
    """The body of a request to `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=16)

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of the sampled tokens are asked for."""
        return self.logprobs

    @model_validator(mode="after")
    def _one_length(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError(
                f"max_tokens={self.max_tokens} and max_completion_tokens={self.max_completion_tokens}: they mean the "
                "same; send one of them"
            )
        return self


def _keys_once(pairs: list[tuple[str, Any]]) -> None:
    """Of two values under one name, one would be ignored."""
    seen = set()
    for name, _ in pairs:
        if name in seen:
            raise RequestError(f"{name!r:.80} is given twice; send each field once")
        seen.add(name)


Asked = TypeVar("Asked", CompletionRequest, ChatRequest)


def read_request(kind: type[Asked], body: bytes) -> Asked:
    """Reads and checks a request's body.

    Raises:
        RequestError: it says which field, and what is wrong with it.
    """
    lists, values = body.count(b"[") + body.count(b"{"), body.count(b",")
    if body.count(b":") > _MOST_LISTS:
        lists += sum(1 for _ in re.finditer(rb'"\s*:', body))
    if lists > _MOST_LISTS or values > _MOST_VALUES:
        raise RequestError(
            f"the body has {lists} lists, objects and names, and {values} commas; send up to {_MOST_LISTS} and "
            f"{_MOST_VALUES} in one request"
        )
    try:
        given = from_json(body, allow_inf_nan=False)
        time.sleep(len(body) / _BYTES_PER_SECOND)
        json.loads(body, object_pairs_hook=_keys_once)  # no deeper than what was read
        time.sleep(len(body) / _BYTES_PER_SECOND)
    except RequestError:
        raise
    except ValueError as error:
        raise RequestError(f"the body is no JSON: {error!s:.300}") from error
    if not isinstance(given, dict):
        raise RequestError("the body is no JSON object")
    try:
        return kind.model_validate(without_neutral(kind.__name__, given, kind.model_fields))
    except ValidationError as error:
        lines = error.errors(include_url=False, include_input=False, include_context=False)[:5]
        raise RequestError("; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in lines)) from error
