"""From chat messages to the text of a prompt. The template is the server's: a client chooses values, never programs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, meta
from jinja2.defaults import DEFAULT_NAMESPACE

from covey.serving.neutral import RequestError

_LONGEST_VALUE = 1000


def chat_text(tokenizer: Any, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any], limit: int) -> str:
    """A conversation in the model's chat format, up to where the assistant is to speak.

    Raises:
        RequestError: a message is none, is too long, or the template has no such variable.
    """
    plain = [_plain(place, message) for place, message in enumerate(messages)]
    characters = sum(len(message["content"]) for message in plain)
    if characters > limit:
        raise RequestError(f"messages: they have {characters} characters; this model's context holds at most {limit}")
    if not tokenizer.chat_template:
        raise RequestError("messages: this model has no chat template; use /v1/completions")
    _check_values(tokenizer, values)
    try:
        text = tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False, **values)
    except Exception as error:  # templates are programs that raise what they like
        raise RequestError(f"messages: the chat template refuses them: {error!s:.300}") from error
    return str(text)


def _plain(place: int, message: Mapping[str, Any]) -> dict[str, str]:
    given = {name: value for name, value in message.items() if value is not None}
    others = given.keys() - {"role", "content"}
    if others:
        raise RequestError(f"messages.{place}: {min(others)!r:.80} is not served; send role and content")
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str) or not 1 <= len(role) <= 64:
        raise RequestError(f"messages.{place}.role: {role!r:.80} must be a name such as user")
    if isinstance(content, list) and content:
        content = "".join(_text(place, part) for part in content)
    if not isinstance(content, str):
        raise RequestError(f"messages.{place}.content: must be a text, or a list of parts of type text")
    return {"role": role, "content": content}


def _text(place: int, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else part
        raise RequestError(f"messages.{place}.content: a part of type {kind!r:.80}; only text is read")
    if part.keys() - {"type", "text"}:
        raise RequestError(f"messages.{place}.content: a part of type text has a type and a text, nothing else")
    return str(part["text"])


def _check_values(tokenizer: Any, values: Mapping[str, Any]) -> None:
    """Variables that the template asks for by name, and that nothing but the template knows."""
    if not values:
        return
    taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
    template = re.sub(
        r"{%-?\s*(end)?generation\s*-?%}", "", str(tokenizer.get_chat_template())
    )  # transformers' own tag
    syntax = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    known = meta.find_undeclared_variables(syntax) - {*DEFAULT_NAMESPACE, "raise_exception", "strftime_now"}
    for name, value in values.items():
        if name in taken or name.endswith("_token"):
            raise RequestError(f"chat_template_kwargs.{name:.80}: it is the server's to choose; remove it")
        if not isinstance(value, str | bool | int | float) or len(str(value)) > _LONGEST_VALUE:
            raise RequestError(f"chat_template_kwargs.{name:.80}: must be true, false, a number or a short text")
        if name not in known:
            raise RequestError(f"chat_template_kwargs.{name:.80}: the model's chat template has no such variable")
