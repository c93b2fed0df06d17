"""Things by name with options in one text: `arithmetic:kinds=gcd,digits=2`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from covey.errors import ConfigError, CoveyError, raised_at
from covey.functions import load_object, names_file

Made = TypeVar("Made")
_NUMBERS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "bool": (bool,)}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false"}


def find_factory(kind: str, name: str, factories: Mapping[str, Callable[..., Made]]) -> tuple[str, Any, str]:
    """What `name` begins with, the factory of that name or the object of a `FILE.py:NAME`, and the options after it.

    Raises:
        ConfigError: there is no such thing.
    """
    base, _, listed = name.partition(":")
    if names_file(base):
        attribute, _, listed = listed.partition(":")
        base = f"{base}:{attribute}"
        return base, load_object(base, kind), listed
    if base not in factories:
        raise ConfigError(f"{kind}={base!r}: no such {kind}; {_nearest(base, sorted(factories))}")
    return base, factories[base], listed


def make_named(
    kind: str, name: str, factories: Mapping[str, Callable[..., Made]], needs: type[Any], **options: Any
) -> Made:
    """Call the factory that `name` names.

    Args:
        kind: of thing, for messages.
        name: a key of `factories`, or `FILE.py:NAME` with a class, a function or an object that is one already; or with
            options, `"key:option=value,option=value"`; numbers, `true`, `false` and `none` are read as such.
        factories: name -> callable.
        needs: the base class, whose public names the thing must have.
        **options: arguments; they win over those in `name`.

    Raises:
        ConfigError: no such thing, no such option, or a value that the factory refuses; or what the user's file has
            under that name is no such thing.
    """
    base, factory, listed = find_factory(kind, name, factories)
    options = _read_options(kind, name, listed) | options
    wanted = [public for public in vars(needs) if not public.startswith("_")]
    if not isinstance(factory, type) and any(hasattr(factory, public) for public in wanted):
        if options:
            raise ConfigError(f"{kind}={name!r}: {base} is made already and takes no options; remove them")
        already: Made = _checked(kind, base, factory, wanted, needs)
        return already
    if not callable(factory):
        raise ConfigError(
            f"{kind}={name!r}: {base} is a {type(factory).__name__}, no {kind} and nothing that makes one"
        )
    if inspect.isabstract(factory):
        raise ConfigError(f"{kind}={name!r}: {base} lacks {', '.join(sorted(factory.__abstractmethods__))}; define it")
    parameters = inspect.signature(factory).parameters
    for option, value in options.items():
        if option not in parameters:
            raise ConfigError(f"{kind}={base!r} has no option {option!r}; {_nearest(option, parameters)}")
        allowed = _NUMBERS.get(str(getattr(parameters[option].annotation, "__name__", parameters[option].annotation)))
        if allowed is not None and type(value) not in allowed:
            raise ConfigError(
                f"{kind}={name!r}: {option}={value!r:.80} is {type(value).__name__}, and must be {_WORDS[allowed[0]]}"
            )
    try:
        made: Made = factory(**options)
    except TypeError as error:
        raise ConfigError(f"{kind}={name!r}: {error}; its options are {', '.join(parameters)}") from error
    except Exception as error:
        if isinstance(error, CoveyError) or not names_file(name):
            raise
        raise ConfigError(
            f"{kind}={name!r}: making it failed with {type(error).__name__}: {error}{raised_at(error)}; correct it"
        ) from error
    if names_file(name):
        _checked(kind, base, made, wanted, needs)
    return made


def _checked(kind: str, base: str, made: Any, wanted: Sequence[str], needs: type[Any]) -> Any:
    missing = [public for public in wanted if not hasattr(made, public)]
    if missing:
        raise ConfigError(
            f"{kind}={base!r}: a {type(made).__name__} lacks {', '.join(missing)}; derive it from "
            f"{needs.__module__}.{needs.__name__}"
        )
    return made


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
    return f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known) or '(none)'}"
