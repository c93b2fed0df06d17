"""Tasks by name, so that a recipe or the command line can ask for one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from covey.named import make_named
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


def task_options(name: str) -> tuple[str, ...]:
    """What the task of a name, with or without options in it, can be given; empty for one that is not known."""
    factory = _TASKS.get(name.partition(":")[0])
    return () if factory is None else tuple(inspect.signature(factory).parameters)


def get_task(name: str, **options: Any) -> Task:
    """Make a task by its name.

    Args:
        name: `"arithmetic"`, or with options in one text, `"arithmetic:kinds=gcd,digits=2"`; numbers, `true`,
            `false` and `none` are read as such.
        **options: arguments of the task, e.g. `path` for `gsm8k`; they win over those in `name`.

    Raises:
        ConfigError: no such task, no such option, or a value that the task refuses.
    """
    return make_named("task", name, _TASKS, **options)


register_task("arithmetic", Arithmetic)
register_task("code", Code)
register_task("gsm8k", GSM8K)
register_task("usmle", USMLE)
