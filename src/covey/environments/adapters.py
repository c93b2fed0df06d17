"""Environments with other interfaces: Gymnasium's and OpenEnv's.

    environment.world = "gymnasium:env=FrozenLake-v1,actions=left|down|right|up"
    environment.world = "openenv:factory=my_worlds.py:make_client"

Both speak in numbers or objects rather than in words, so two functions may say how: `describe(observation) -> str`, or
an `Observation` with admissible actions, and `act(text) -> action`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from covey.environments.base import Environment, Observation, Returned, SeededWorld, TaskInstance
from covey.errors import ConfigError
from covey.functions import load_function

Describe = Callable[[Any], Observation | str]
Act = Callable[[str], Any]


class _Adapted(Environment):
    """What the two have in common. Subclasses begin an episode in `reset` and do an action in `_do`."""

    _no_action: tuple[type[Exception], ...] = (ValueError, KeyError)  # what `act` raises for a text that is none

    def __init__(self, env: Any, actions: tuple[str, ...] | None, describe: Describe, act: Act) -> None:
        self._env, self._actions, self._describe, self._act = env, actions, describe, act

    def step(self, action: str) -> Returned:
        """Do it, if it is an action; else nothing happens and the same is seen again."""
        try:
            chosen = self._act(action)
        except self._no_action:
            return self._seen, 0.0, False, {"valid": False}
        return self._do(chosen)

    def close(self) -> None:
        self._env.close()

    def _do(self, action: Any) -> Returned:
        raise NotImplementedError

    def _observed(self, observation: Any) -> Observation:
        said = self._describe(observation)
        self._seen = said if isinstance(said, Observation) else Observation(said)
        if self._seen.actions is None:
            self._seen = replace(self._seen, actions=self._actions)
        return self._seen


class GymnasiumEnvironment(_Adapted):
    """Anything with Gymnasium's `reset(seed=, options=)` and five-valued `step`."""

    def __init__(
        self, env: Any, actions: Sequence[str] | None = None, describe: Describe | None = None, act: Act | None = None
    ) -> None:
        names = tuple(actions) if actions else None
        super().__init__(env, names, describe or str, act or (names.index if names else str))

    def reset(self, task: TaskInstance, seed: int) -> Observation:
        """Begin; the instance's own `seed` wins, its `options` are passed on."""
        observation, _ = self._env.reset(seed=task.get("seed", seed), options=task.get("options"))
        return self._observed(observation)

    def _do(self, action: Any) -> Returned:
        observation, reward, terminated, truncated, info = self._env.step(action)
        return self._observed(observation), float(reward), bool(terminated), bool(truncated), dict(info)


class OpenEnvEnvironment(_Adapted):
    """Anything with OpenEnv's `reset()` and `step(action)` that return `.observation`, `.reward` and `.done`."""

    _no_action = (ValueError, KeyError, TypeError)

    def __init__(self, client: Any, describe: Describe | None = None, act: Act | None = None) -> None:
        super().__init__(client, None, describe or _text_of, act or str)

    def reset(self, task: TaskInstance, seed: int) -> Observation:
        """Begin; the instance's `options` are passed on as keyword arguments."""
        return self._observed(self._env.reset(**task.get("options", {})).observation)

    def _do(self, action: Any) -> Returned:
        result = self._env.step(action)
        info = dict(getattr(result, "metadata", None) or {})
        return self._observed(result.observation), float(result.reward or 0.0), bool(result.done), info


@dataclass(eq=False, repr=False)
class Gymnasium(SeededWorld):
    """A Gymnasium environment by its id."""

    name: ClassVar[str] = "gymnasium"
    env: str
    actions: str | None = None
    describe: str | None = None
    act: str | None = None

    def __post_init__(self) -> None:
        if importlib.util.find_spec("gymnasium") is None:
            raise ConfigError("world gymnasium: the package is not installed; pip install 'covey[gymnasium]'")
        super().__post_init__()

    def make(self) -> Environment:
        import gymnasium

        names = self.actions.split("|") if self.actions else None
        return GymnasiumEnvironment(gymnasium.make(self.env), names, _loaded(self.describe), _loaded(self.act))


@dataclass(eq=False, repr=False)
class OpenEnv(SeededWorld):
    """An OpenEnv environment that a function of yours makes a client for."""

    name: ClassVar[str] = "openenv"
    factory: str
    describe: str | None = None
    act: str | None = None

    def make(self) -> Environment:
        return OpenEnvEnvironment(load_function(self.factory)(), _loaded(self.describe), _loaded(self.act))


def _loaded(name: str | None) -> Any:
    return load_function(name) if name else None


def _text_of(observation: Any) -> str:
    for name in ("text", "message", "content"):
        if isinstance(value := getattr(observation, name, None), str):
            return value
    return str(observation)
