"""Tasks by name, so that a recipe or the command line can ask for one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from covey.errors import ConfigError
from covey.functions import find_factory, make_named
from covey.tasks.base import Task

_TASKS: dict[str, Callable[..., Task] | str] = {
    "arithmetic": "covey.tasks.arithmetic:Arithmetic",
    "code": "covey.tasks.code:Code",
    "gsm8k": "covey.tasks.gsm8k:GSM8K",
    "usmle": "covey.tasks.usmle:USMLE",
}
"""By name, what makes a task, or where that is found when it is asked for."""


def register_task(name: str, factory: Callable[..., Task]) -> None:
    """Make `factory(**options)` available as `get_task(name, **options)`, in place of an earlier one."""
    _TASKS[name] = factory


def task_names() -> tuple[str, ...]:
    """The names that `get_task` knows."""
    return tuple(sorted(_TASKS))


def task_options(name: str) -> tuple[str, ...]:
    """What the task of a name, with or without options in it, can be given.

    Raises:
        ConfigError: no such task.
    """
    factory = find_factory("task", name, _TASKS)[1]
    return tuple(inspect.signature(factory).parameters) if callable(factory) else ()


def get_task(name: str, **options: Any) -> Task:
    """Make a task by its name.

    Args:
        name: `"arithmetic"`, or with options in one text, `"arithmetic:kinds=gcd,digits=2"`; numbers, `true`,
            `false` and `none` are read as such; or of a file, `"riddles.py:Riddles"`, `"riddles.py:Riddles:digits=2"`:
            a `Task` class, a function that makes one, or one that is made already.
        **options: arguments of the task, e.g. `path` for `gsm8k`; they win over those in `name`.

    Raises:
        ConfigError: no such task, no such option, or a value that the task refuses.
    """
    return make_named("task", name, _TASKS, Task, **options)


def configured_task(name: str | None, dataset: str | None, eval_dataset: str | None) -> Task | None:
    """The task that `data.task` names, or None. `data.dataset` and `data.eval_dataset` are the files that it reads.

    Raises:
        ConfigError: as `get_task`, or the task reads no files.
    """
    if name is None:
        return None
    files = {"path": ("dataset", dataset), "eval_path": ("eval_dataset", eval_dataset)}
    known = task_options(name)
    for option, (field, value) in files.items():
        if value is not None and option not in known:
            raise ConfigError(
                f"data.{field}={value!r:.200}: it does not go with data.task={name!r}, which brings its own rows; "
                "remove one of them"
            )
    return get_task(name, **{option: value for option, (_, value) in files.items() if value is not None})
