"""Tools of an agent as in TRL, and environments whose public methods are tools.

They are the user's own and run in this process. Environments are made once and reset for every episode.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from covey.errors import ConfigError, DataError, EpisodeError, raised_at
from covey.rollout.calls import is_async
from covey.rollout.tools import EMPTY, Scene, Tool, takes_index, tool_name
from covey.training.tools import tool_schema
from covey.types import Message, Prompt

_OWN = ("reset", "get_reward")  # methods that the model cannot call


class Toolset:
    """The tools of a run: functions, and the methods of environments, of which a pool is kept."""

    def __init__(self, functions: Sequence[Tool], factory: Any = None) -> None:
        self._functions = list(functions)
        self._by_name = isinstance(factory, Mapping)
        alone = {} if factory is None else {None: factory}
        self._factories: dict[Any, Callable[[], Any]] = dict(factory) if self._by_name else alone
        self.pools: dict[Any, list[Any]] = {name: [_made(make)] for name, make in self._factories.items()}
        shown = [tool_schema(tool) for tool in self._functions]
        self._schemas = {name: [*shown, *map(tool_schema, methods(pool[0]))] for name, pool in self.pools.items()}
        self._schemas.setdefault(None, shown)
        own = [method for pool in self.pools.values() for method in methods(pool[0])]
        self.tools: list[Tool] = self._functions + own
        self.accepts_index = {tool_name(tool): takes_index(tool) for tool in self.tools}
        self.environments: list[Any] = []
        self.has_environments = bool(self._factories)

    def rewards(self) -> list[Callable[..., Any]]:
        """A reward function for each class of environments that has `get_reward`."""
        kinds = dict.fromkeys(type(pool[0]) for pool in self.pools.values())
        return [_own_reward(kind) for kind in kinds if callable(getattr(kind, "get_reward", None))]

    def scenes(self, prompts: Sequence[Prompt]) -> list[Scene]:
        """Begin an episode of each prompt; an error if an environment raises, or a row has no prompt for one."""
        used: dict[Any, int] = {}
        self.environments = []
        return [self._scene(prompt, used) for prompt in prompts]

    def _scene(self, prompt: Prompt, used: dict[Any, int]) -> Scene:
        if isinstance(prompt.content, str):
            raise DataError(
                f"row {prompt.uid}: the prompt is plain text, and tools are called in conversations; make it "
                '[{"role": "user", "content": "..."}]'
            )
        if not self.has_environments:
            return Scene(prompt, {tool_name(tool): tool for tool in self._functions}, self._schemas[None])
        name = self._name(prompt)
        pool, number = self.pools[name], used.get(name, 0)
        if number == len(pool):
            pool.append(_made(self._factories[name]))
        used[name], environment = number + 1, pool[number]
        self.environments.append(environment)
        tools = {tool_name(tool): tool for tool in (*self._functions, *methods(environment))}
        content = self._reset(environment, prompt)
        columns = {**prompt.columns, "environments": environment}
        return Scene(replace(prompt, content=content, columns=columns), tools, self._schemas[name])

    def _name(self, prompt: Prompt) -> Any:
        if not self._by_name:
            return None
        name = prompt.columns.get("environment")
        if name not in self._factories:
            raise DataError(
                f"row {prompt.uid}: environment={name!r:.100} is none of those that there are, not among the "
                f"environments of environment_factory; use one of {', '.join(map(str, self._factories))}"
            )
        return name

    def _reset(self, environment: Any, prompt: Prompt) -> list[Message]:
        messages = [dict(message) for message in prompt.content if isinstance(message, dict)]
        left_out = {"environments", "environment"} if self._by_name else {"environments"}
        row = {name: value for name, value in prompt.columns.items() if name not in left_out}
        parameters = inspect.signature(environment.reset).parameters.values()
        if messages != [EMPTY] or any(p.name == "prompt" or p.kind is p.VAR_KEYWORD for p in parameters):
            row = {"prompt": [dict(message) for message in messages], **row}
        try:
            said = environment.reset(**row)
        except Exception as error:
            raise EpisodeError(
                f"row {prompt.uid}: {type(environment).__name__}.reset raised {type(error).__name__}: "
                f"{error!s:.300}{raised_at(error)}; no episode can begin"
            ) from error
        if said is not None and not isinstance(said, str):
            raise EpisodeError(
                f"row {prompt.uid}: {type(environment).__name__}.reset returned a {type(said).__name__}; return a "
                "string, which is put after the last message, or None"
            )
        messages[-1]["content"] += said or ""
        return messages


def _made(factory: Callable[[], Any]) -> Any:
    if not callable(factory):
        raise ConfigError(
            f"environment_factory: {factory!r:.200} cannot be called; give a class, a function, or a dict of such"
        )
    environment = factory()
    if not callable(getattr(environment, "reset", None)):
        raise ConfigError(f"environment_factory: {type(environment).__name__} has no method reset; give it one")
    return environment


def methods(environment: Any) -> list[Tool]:
    """What the model can call, in alphabetical order. Properties are not looked at."""
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    return [getattr(environment, name) for name in names if name not in _OWN and not name.startswith("_")]


def _own_reward(kind: Any) -> Callable[..., Any]:
    """What environments of this very class say that their episode earned; None for others."""

    async def one(environment: Any) -> Any:
        return await environment.get_reward() if type(environment) is kind else None

    async def later(environments: Sequence[Any], **_: Any) -> list[Any]:
        return await asyncio.gather(*map(one, environments))

    def now(environments: Sequence[Any], **_: Any) -> list[Any]:
        return [each.get_reward() if type(each) is kind else None for each in environments]

    function: Callable[..., Any] = later if is_async(kind.get_reward) else now
    function.__name__ = kind.__name__
    return function
