"""Worlds by name, so that a recipe or the command line can ask for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from covey.environments.base import World
from covey.functions import make_named

_WORLDS: dict[str, Callable[..., World] | str] = {
    "alfworld": "covey.environments.alfworld:AlfWorld",
    "gymnasium": "covey.environments.adapters:Gymnasium",
    "house": "covey.environments.house:House",
    "openenv": "covey.environments.adapters:OpenEnv",
    "textworld": "covey.environments.textworld:TextWorld",
}
"""By name, what makes a world, or where that is found when it is asked for."""


def register_world(name: str, factory: Callable[..., World]) -> None:
    """Make `factory(**options)` available as `get_world(name, **options)`, in place of an earlier one."""
    _WORLDS[name] = factory


def world_names() -> tuple[str, ...]:
    """The names that `get_world` knows."""
    return tuple(sorted(_WORLDS))


def get_world(name: str, **options: Any) -> World:
    """Make a world by its name.

    Args:
        name: `"house"`, or with options in one text, `"house:rooms=4,max_turns=5"`; or of a file, `"maze.py:Maze"`,
            `"maze.py:Maze:size=9"`: a `World` class, a function that makes one, or one that is made already.
        **options: arguments of the world; they win over those in `name`.

    Raises:
        ConfigError: no such world, no such option, or a value that the world refuses.
    """
    return make_named("environment", name, _WORLDS, World, **options)
