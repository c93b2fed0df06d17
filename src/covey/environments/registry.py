"""Worlds by name, so that a recipe or the command line can ask for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from covey.environments.adapters import Gymnasium, OpenEnv
from covey.environments.alfworld import AlfWorld
from covey.environments.base import World
from covey.environments.textworld import TextWorld
from covey.functions import make_named

_WORLDS: dict[str, Callable[..., World] | str] = {}


def register_world(name: str, factory: Callable[..., World] | str) -> None:
    """Make `factory(**options)` available as `get_world(name, **options)`, in place of an earlier one.

    A factory that is imported only when it is asked for is named, `MODULE:NAME`.
    """
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


register_world("alfworld", AlfWorld)
register_world("gymnasium", Gymnasium)
register_world("house", "covey.recipes.house.house:House")  # the recipe's file, which is installed
register_world("openenv", OpenEnv)
register_world("textworld", TextWorld)
