"""Tasks by name, so that a recipe or the command line can ask for one."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from covey.errors import ConfigError
from covey.tasks.arithmetic import Arithmetic
from covey.tasks.base import Task
from covey.tasks.code import Code
from covey.tasks.gsm8k import GSM8K
from covey.tasks.usmle import USMLE

_TASKS: dict[str, Callable[..., Task]] = {}


def register_task(name: str, factory: Callable[..., Task]) -> None:
    """Make `factory(**options)` available as `get_task(name, **options)`, in place of an earlier one."""
    _TASKS[name] = factory


def task_names() -> tuple[str, ...]:
    """The names that `get_task` knows."""
    return tuple(sorted(_TASKS))


def get_task(name: str, **options: Any) -> Task:
    """Make a task by its name.

    Args:
        name: `"arithmetic"`, or with options in one text, `"arithmetic:kinds=gcd,digits=2"`; numbers, `true`,
            `false` and `none` are read as such.
        **options: arguments of the task, e.g. `path` for `gsm8k`; they win over those in `name`.

    Raises:
        ConfigError: no such task, no such option, or a value that the task refuses.
    """
    base, _, listed = name.partition(":")
    factory = _TASKS.get(base)
    if factory is None:
        raise ConfigError(f"task={base!r}: no such task; {_nearest(base, task_names())}")
    options = _read_options(name, listed) | options
    known = list(inspect.signature(factory).parameters)
    for option in options:
        if option not in known:
            raise ConfigError(f"task={base!r} has no option {option!r}; {_nearest(option, known)}")
    try:
        return factory(**options)
    except TypeError as error:
        raise ConfigError(f"task={name!r}: {error}; its options are {', '.join(known)}") from error


def _read_options(name: str, listed: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for item in filter(None, listed.split(",")):
        option, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"task={name!r}: {item!r} is no option; write name:option=value,option=value")
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


def _nearest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known)}"


register_task("arithmetic", Arithmetic)
register_task("code", Code)
register_task("gsm8k", GSM8K)
register_task("usmle", USMLE)
