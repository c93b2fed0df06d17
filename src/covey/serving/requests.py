"""What clients may ask: OpenAI's fields, those that training needs besides, and chat messages.

A request is read strictly: types are not guessed at, unknown fields are refused, null means that a field is left out.
Of fields that this server does not serve, values that ask for nothing (OpenAI's defaults) are let through. A chat
template is the server's: a client chooses values, never programs.
"""

from __future__ import annotations

import inspect
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Annotated, Any, TypeVar

from jinja2 import Environment, meta
from jinja2.defaults import DEFAULT_NAMESPACE
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from covey.errors import CoveyError
from covey.serving.client import MAX_COMPLETIONS, MOST_SCORED
from covey.tasks.pictures import MOST_PIXELS, Picture, pictures_in, read_picture
from covey.types import SamplingSettings


class RequestError(CoveyError, ValueError):
    """A request asks for what this server does not do, or is not one."""


# fmt: off
_SAMPLING: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "length_penalty": (1,),
    "logit_bias": ({},), "min_tokens": (0,), "use_beam_search": (False,), "include_stop_str_in_output": (True,),
    "skip_special_tokens": (True,), "service_tier": ("auto", "default"),
    "store": (False,), "metadata": ({},),
}
_NEUTRAL: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "CompletionRequest": _SAMPLING | {"echo": (False,), "suffix": ("",), "add_special_tokens": (True,)},
    "ChatRequest": _SAMPLING | {
        "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True,), "functions": ([],),
        "top_logprobs": (0,), "function_call": ("none", "auto"), "modalities": (["text"],), "audio": (),
        "prediction": (), "reasoning_effort": (), "verbosity": ("medium",), "web_search_options": (),
        "documents": ([],), "chat_template": (), "add_generation_prompt": (True,),
        "continue_final_message": (False,), "add_special_tokens": (False,),
    },
    "ScoreRequest": {}, "GenerateRequest": {}, "TokenSampling": _SAMPLING,
}
# fmt: on


def without_neutral(kind: str, given: Mapping[str, Any], served: Set[str]) -> dict[str, Any]:
    """What is left of a request when everything that asks for nothing is taken out.

    Raises `RequestError`: it has a field that is not served.
    """
    left = {name: value for name, value in given.items() if value is not None}
    best_of = left.pop("best_of", None)  # equal to `n` it chooses nothing
    if best_of is not None and not _same(best_of, left.get("n", 1)):
        raise RequestError(f"best_of={best_of!r:.80}: this server returns all that it samples; leave it out, or send n")
    for name in [name for name in left if name not in served]:
        neutral = _NEUTRAL[kind].get(name)
        if neutral is None:
            raise RequestError(f"{name:.80}: this server knows no such field; remove it")
        value = left.pop(name)
        if not any(_same(value, one) for one in neutral):
            instead = "".join(f" or send {one!r}" for one in neutral)
            raise RequestError(f"{name}={value!r:.80}: this server does not serve it; leave it out{instead}")
    return left


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and not by Python's 0 == False."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
_MOST_CHOICES = 1024
"""Sequences that one completion may have to choose among: each is looked at for each token."""
_MOST_CHOICE_IDS = 1 << 18
"""Of all of them in one request."""
_MOST_BEST = 1 << 20
"""Token ids to be scored times `top_k`."""
_MOST_LISTS, _MOST_VALUES = 100_000, 1_000_000
"""Lists, objects and names in a body, each of which costs far more than its bytes; values in lists and objects."""
_BYTES_PER_SECOND = 1e8
"""Other threads run for a while between two steps of reading a body, each of which holds the interpreter."""
_SMALLEST_TEMPERATURE, _LONGEST_VALUE = 0.001, 1000
_BESIDE_SCHEMA: dict[Any, Any] = {"name": [str], "description": [str, type(None)], "strict": [bool, type(None)]}


def _no_overflow(value: float) -> float:
    # one request whose logits overflow would end the decode step of all
    if 0 < value < _SMALLEST_TEMPERATURE:
        raise ValueError(f"must be 0 (greedy) or at least {_SMALLEST_TEMPERATURE}")
    return value


Temperature = Annotated[float, Field(ge=0, le=100), AfterValidator(_no_overflow)]
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
    temperature: Temperature = 1.0
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=64)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=256)] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: dict[str, Any] = Field(default_factory=lambda: {"type": "text"})
    user: str = Field(default="", max_length=1000)
    return_token_ids: bool = False
    # beyond OpenAI: which random stream each completion draws from, what it may be, which weights it must come from
    streams: Annotated[list[Stream], Field(fail_fast=True, max_length=MAX_COMPLETIONS)] | None = None
    choices: Annotated[list[Choices | None], Field(fail_fast=True, max_length=MAX_COMPLETIONS)] | None = None
    return_support: bool = False
    policy_version: int | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> _Sampling:
        ids = sum(len(choice) for choices in self.choices or () for choice in choices or ())
        if ids > _MOST_CHOICE_IDS:
            raise ValueError(f"choices has {ids} token ids; send up to {_MOST_CHOICE_IDS} in one request")
        if "stream_options" in self.model_fields_set and not self.stream:
            raise ValueError("stream_options is for stream=true only")
        ended_otherwise = self.choices or self.stop or self.ignore_eos or self.stop_token_ids is not None
        if self.json_schema() is not None and ended_otherwise:
            raise ValueError(
                "response_format says where JSON ends: leave choices, stop, stop_token_ids, ignore_eos out"
            )
        if self.stream and self.return_support:
            raise ValueError("return_support is not streamed; leave stream out")
        if self.return_support and self.temperature == 0 and self.choices is None:
            raise ValueError("return_support is not for temperature=0, where one token is left; leave one of them out")
        if self.seed is not None and self.streams is not None:
            raise ValueError("seed and streams both say which random numbers are drawn; leave one of them out")
        return self

    def json_schema(self) -> dict[str, Any] | None:
        """What the completion is to be as JSON; None = any text."""
        match self.response_format:
            case {"type": "text", **more} if not more:
                return None
            case {"type": "json_object", **more} if not more:
                return {"type": "object"}
            case {"type": "json_schema", "json_schema": {"schema": dict(schema), **named}, **more} if not more:
                if all(type(value) in _BESIDE_SCHEMA.get(name, ()) for name, value in named.items()):
                    return schema
        forms = '{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {...}}}'
        raise ValueError(f"response_format: {forms} (+ name, description, strict), not {self.response_format!s:.80}")

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of the sampled tokens are asked for: True in a chat, a number beside a text."""
        asked = getattr(self, "logprobs", None)
        return asked is not None and asked is not False

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

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or ids. Raises `RequestError`: it is no prompt, or there are too many."""
        if isinstance(self.prompt, str) or (self.prompt and all(type(token) is int for token in self.prompt)):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt: an empty list; it must be a text, a list of token ids, or a list of these")
        for prompt in self.prompt:
            whole = isinstance(prompt, list) and all(type(token) is int for token in prompt)
            if not whole and not isinstance(prompt, str):
                raise RequestError("prompt: must be a text, a list of token ids, or a list of one of these")
        if (count := len(self.prompt) * self.n) > MAX_COMPLETIONS:
            raise RequestError(f"{count} completions in one request; ask for 1 to {MAX_COMPLETIONS}")
        return self.prompt


class ChatRequest(_Sampling):
    """The body of a request to `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=16)

    @model_validator(mode="after")
    def _one_length(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            both = f"max_tokens={self.max_tokens} and max_completion_tokens={self.max_completion_tokens}"
            raise ValueError(f"{both}: they mean the same; send one of them")
        return self


class ScoreRequest(BaseModel):
    """The body of a request to `/v1/score`."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str = ""
    token_ids: Annotated[list[Choice], Field(fail_fast=True, min_length=1, max_length=MAX_COMPLETIONS)]
    start: Annotated[list[int], Field(max_length=MAX_COMPLETIONS)]
    temperature: Temperature = 1.0
    top_k: int = Field(default=0, ge=0, le=1024)
    policy_version: int | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> ScoreRequest:
        if len(self.start) != len(self.token_ids):
            raise ValueError(f"start has {len(self.start)} entries for {len(self.token_ids)} sequences")
        for place, (ids, start) in enumerate(zip(self.token_ids, self.start, strict=True)):
            if not 1 <= start < len(ids):
                raise ValueError(f"start.{place}: {start} must be 1 to {len(ids) - 1}; something must come before it")
        size = sum(map(len, self.token_ids))
        if size > MOST_SCORED or size * self.top_k > _MOST_BEST:
            most = f"send up to {MOST_SCORED} ids in one request, and up to {_MOST_BEST} ids times top_k"
            raise ValueError(f"token_ids has {size} ids, and top_k is {self.top_k}; {most}")
        return self


def _keys_once(pairs: list[tuple[str, Any]]) -> None:
    """Of two values under one name, one would be ignored."""
    seen = set()
    for name, _ in pairs:
        if name in seen:
            raise RequestError(f"{name!r:.80} is given twice; send each field once")
        seen.add(name)


Asked = TypeVar("Asked", bound=BaseModel)


def read_request(kind: type[Asked], body: bytes) -> Asked:
    """Reads and checks a request's body. Raises `RequestError`: it says which field, and what is wrong with it."""
    lists, values = body.count(b"[") + body.count(b"{"), body.count(b",")
    if body.count(b":") > _MOST_LISTS:
        lists += sum(1 for _ in re.finditer(rb'"\s*:', body))
    if lists > _MOST_LISTS or values > _MOST_VALUES:
        most = f"send up to {_MOST_LISTS} and {_MOST_VALUES} in one request"
        raise RequestError(f"the body has {lists} lists, objects and names, and {values} commas; {most}")
    try:
        given = from_json(body, allow_inf_nan=False)
        time.sleep(len(body) / _BYTES_PER_SECOND)
        json.loads(body, object_pairs_hook=_keys_once)  # no deeper than what was read
        time.sleep(len(body) / _BYTES_PER_SECOND)
    except RequestError:
        raise
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error!s:.300}") from error
    if not isinstance(given, dict):
        raise RequestError("the body is not a JSON object")
    return checked(kind, given, kind.model_fields.keys())


def checked(kind: type[Asked], given: Mapping[str, Any], served: Set[str], **more: Any) -> Asked:
    """A request from the fields that a client gave, and `more`. Raises `RequestError`, as `read_request` does."""
    try:
        return kind.model_validate(without_neutral(kind.__name__, given, served) | more)
    except ValidationError as error:
        lines = error.errors(include_url=False, include_input=False, include_context=False)[:5]
        raise RequestError("; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in lines)) from error


def chat_prompt(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any], limit: int, *, sees: bool = False
) -> tuple[str, list[Picture]]:
    """A conversation in the model's chat format, up to where the assistant is to speak, and its pictures in order.

    Raises `RequestError`: a message is none, is too long, or the template has no such variable; `DataError`: a picture
    cannot be read.
    """
    pixels = 0

    def read(place: int, part: Any) -> Any:
        nonlocal pixels
        if not sees or not isinstance(part, dict) or part.get("type") != "image_url":
            return _text(place, part)
        picture = read_picture(_url(place, part), f"messages.{place}.content: a picture")
        pixels += picture.size[0] * picture.size[1]
        if pixels > MOST_PIXELS:
            raise RequestError(f"messages: pictures of more than {MOST_PIXELS:,} pixels together; make them smaller")
        return {"type": "image", "image": picture}

    plain = [_plain(place, message, partial(read, place)) for place, message in enumerate(messages)]
    texts = [text for message in plain for text in _texts(message["content"])]
    characters = sum(map(len, texts))
    if characters > limit:
        raise RequestError(f"messages: they have {characters} characters; this model's context holds at most {limit}")
    if not tokenizer.chat_template:
        raise RequestError("messages: this model has no chat template; use /v1/completions")
    _check_values(tokenizer, values)
    try:
        text = tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False, **values)
    except Exception as error:  # templates are programs that raise what they like
        raise RequestError(f"messages: the chat template refuses them: {error!s:.300}") from error
    return str(text), pictures_in(plain)


def _texts(content: str | list[dict[str, Any]]) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


def _plain(place: int, message: Mapping[str, Any], read: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    given = {name: value for name, value in message.items() if value is not None}
    others = given.keys() - {"role", "content"}
    if others:
        raise RequestError(f"messages.{place}: {min(others)!r:.80} is not served; send role and content")
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str) or not 1 <= len(role) <= 64:
        raise RequestError(f"messages.{place}.role: {role!r:.80} must be a name such as user")
    if isinstance(content, list) and content:
        parts = [read(part) for part in content]
        return {"role": role, "content": parts if pictures_in(parts) else "".join(_texts(parts))}
    if not isinstance(content, str):
        raise RequestError(f"messages.{place}.content: must be a text, or a list of parts of type text")
    return {"role": role, "content": content}


def _url(place: int, part: Mapping[str, Any]) -> str:
    named = part.get("image_url")
    url = named.get("url") if isinstance(named, dict) and named.get("detail", "auto") == "auto" else None
    if part.keys() != {"type", "image_url"} or not isinstance(url, str):
        raise RequestError(
            f"messages.{place}.content: a part of type image_url has image_url, an object with a url (detail: auto)"
        )
    if not url.startswith("data:image/"):
        told = "is not fetched; send the picture itself, as data:image/png;base64,..."
        raise RequestError(f"messages.{place}.content: the address {url!r:.80} {told}")
    return url


def _text(place: int, part: Any) -> dict[str, Any]:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else part
        raise RequestError(f"messages.{place}.content: a part of type {kind!r:.80}; only text is read")
    if part.keys() - {"type", "text"}:
        raise RequestError(f"messages.{place}.content: a part of type text has a type and a text, nothing else")
    return part


def _check_values(tokenizer: Any, values: Mapping[str, Any]) -> None:
    """Variables that the template asks for by name, and that nothing but the template knows."""
    if not values:
        return
    taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
    # without transformers' own tag
    template = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", str(tokenizer.get_chat_template()))
    syntax = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    known = meta.find_undeclared_variables(syntax) - {*DEFAULT_NAMESPACE, "raise_exception", "strftime_now"}
    for name, value in values.items():
        if name in taken or name.endswith("_token"):
            raise RequestError(f"chat_template_kwargs.{name:.80}: it is the server's to choose; remove it")
        if not isinstance(value, str | bool | int | float) or len(str(value)) > _LONGEST_VALUE:
            raise RequestError(f"chat_template_kwargs.{name:.80}: must be true, false, a number or a short text")
        if name not in known:
            raise RequestError(f"chat_template_kwargs.{name:.80}: the model's chat template has no such variable")
