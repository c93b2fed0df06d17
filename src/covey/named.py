"""Things by name with options in one text: `arithmetic:kinds=gcd,digits=2`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from covey.errors import ConfigError

Made = TypeVar("Made")
_NUMBERS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "bool": (bool,)}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false"}


def make_named(kind: str, name: str, factories: Mapping[str, Callable[..., Made]], **options: Any) -> Made:
    """Call the factory that `name` names.

    Args:
        kind: of thing, for messages.
        name: a key of `factories`, or with options, `"key:option=value,option=value"`; numbers, `true`, `false` and
            `none` are read as such.
        factories: name -> callable.
        **options: arguments; they win over those in `name`.

    Raises:
        ConfigError: no such thing, no such option, or a value that the factory refuses.
    """
    base, _, listed = name.partition(":")
    factory = factories.get(base)
    if factory is None:
        raise ConfigError(f"{kind}={base!r}: no such {kind}; {_nearest(base, sorted(factories))}")
    options = _read_options(kind, name, listed) | options
    known = list(inspect.signature(factory).parameters)
    for option in options:
        if option not in known:
            raise ConfigError(f"{kind}={base!r} has no option {option!r}; {_nearest(option, known)}")
    parameters = inspect.signature(factory).parameters
    for option, value in options.items():
        allowed = _NUMBERS.get(str(getattr(parameters[option].annotation, "__name__", parameters[option].annotation)))
        if allowed is not None and type(value) not in allowed:
            raise ConfigError(
                f"{kind}={name!r}: {option}={value!r:.80} is {type(value).__name__}, and must be {_WORDS[allowed[0]]}"
            )
    try:
        return factory(**options)
    except TypeError as error:
        raise ConfigError(f"{kind}={name!r}: {error}; its options are {', '.join(known)}") from error


def _read_options(kind: str, name: str, listed: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for item in filter(None, listed.split(",")):
        option, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"{kind}={name!r}: {item!r} is no option; write name:option=value,option=value")
        options[option.strip()] = _read_value(value.strip())
    return options


def _read_value(text: str) -> Any:
    words: dict[str, Any] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known)}"
