"""Worlds: how an environment is played, and which there are by name.

    world = get_world("house:rooms=3")        # where task instances come from, and how they are played
    environment = world.make()                # one place to play in; runs in a process of its own
    observation = environment.reset(world.eval_tasks()[0], seed=0)
    observation, reward, done, info = environment.step("go kitchen")

Environments are untrusted: what they return is checked (`checked_step`), and what they raise ends one episode, never
the run.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar

from covey.errors import ConfigError, EpisodeError
from covey.functions import make_named

TaskInstance = dict[str, Any]
"""One thing to do, as plain values that JSON can hold, with a `uid` and, where there are several kinds, a `type`."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the agent sees at one moment.

    Attributes:
        text: in words.
        actions: what may be done now, where the world says so; None = anything may be tried.
    """

    text: str
    actions: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an action of the agent led to.

    Attributes:
        observation: what is seen now.
        reward: for this step.
        done: the episode is over.
        success: the task was solved; False as long as it goes on.
        valid: the world took the action as one.
        info: whatever else it said, plain values.
    """

    observation: Observation
    reward: float = 0.0
    done: bool = False
    success: bool = False
    valid: bool = True
    info: Mapping[str, Any] = field(default_factory=dict)


Returned = (
    tuple[Observation | str, float, bool, Mapping[str, Any]]
    | tuple[Observation | str, float, bool, bool, Mapping[str, Any]]
)


class Environment(ABC):
    """One place to play in. An instance is used for one episode after another."""

    @abstractmethod
    def reset(self, task: TaskInstance, seed: int) -> Observation | str:
        """Begin an episode; equal task and seed give equal worlds."""

    @abstractmethod
    def step(self, action: str) -> Returned:
        """Do something: observation, reward, done, info. As in Gymnasium, done may be two: terminated, truncated.

        `info["success"]` says whether the task is solved (without it: whether it is done, and not truncated, with a
        reward above 0), `info["valid"]` whether the action was one (without it: whether it is admissible, if known).
        """

    def close(self) -> None:  # noqa: B027 (most have nothing to give back)
        """Gives back whatever the environment holds: processes, files, memory.

        Called when the environment's process ends in order, at the end of a run, and given two seconds. A process that
        hangs is killed. Processes that the environment has started are killed with it in any case, unless they have
        left its process group.
        """

    def expert_action(self) -> str | None:
        """What a perfect player would do now, where the world knows; None otherwise."""
        return None


class World(ABC):
    """Where task instances come from, and who plays them.

    Held-out instances share nothing with training instances, whatever the seed.

    Attributes:
        name: what `get_world` knows it by.
        system_prompt: the rules of the game, put before each episode; None = none.
        max_turns: actions after which an episode ends without success; a default that users override.
        max_completion_length: tokens that an action needs; likewise.
    """

    name: ClassVar[str]
    system_prompt: str | None = None
    max_turns: int = 20
    max_completion_length: int = 32

    @abstractmethod
    def train_tasks(self, seed: int) -> list[TaskInstance]:
        """Training instances; the same seed gives the same ones.

        Raises:
            DataError: they cannot be read.
        """

    @abstractmethod
    def eval_tasks(self) -> list[TaskInstance]:
        """Held-out instances, always the same ones.

        Raises:
            DataError: they cannot be read.
        """

    @abstractmethod
    def make(self) -> Environment:
        """An environment that plays any of the instances. Called in a process of its own: the world is pickled."""

    def prepare(self) -> None:  # noqa: B027 (most have nothing to prepare)
        """Import and read what every environment needs. Called once, in the process that is copied for each of them."""


def checked_reset(returned: Any) -> Observation:
    """What `reset` returned, or an `EpisodeError` that says what is wrong with it."""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        returned = returned[0]  # Gymnasium's (observation, info)
    return _observation(returned, "reset")


def checked_step(returned: Any, action: str, seen: Observation) -> Outcome:
    """What `step` returned, or an `EpisodeError` that says what is wrong with it."""
    if not isinstance(returned, tuple) or len(returned) not in (4, 5):
        raise EpisodeError(
            f"step returned {returned!r:.80}; it must return observation, reward, done and info, or Gymnasium's "
            "observation, reward, terminated, truncated and info"
        )
    observation, reward, *ends, info = returned
    done, solved = any(map(bool, ends)), bool(ends[0])
    if isinstance(reward, bool) or not isinstance(reward, Real) or not abs(float(reward)) <= 1e30:  # NaN is not
        raise EpisodeError(f"step returned the reward {reward!r:.40}; it must be a finite number, of 1e30 at most")
    if not isinstance(info, Mapping):
        raise EpisodeError(f"step returned {info!r:.40} as info; it must be a mapping")
    said = [*ends, info.get("success"), info.get("valid")]
    if any(isinstance(value, str) for value in said):
        raise EpisodeError(f"step returned {said!r:.80} as ends, success and valid; text is neither true nor false")
    known = seen.actions is None or action in seen.actions
    return Outcome(
        observation=_observation(observation, "step"),
        reward=float(reward),
        done=done,
        success=bool(info.get("success", solved and float(reward) > 0)),
        valid=bool(info.get("valid", known)),
        info={str(name): value for name, value in info.items() if name not in ("success", "valid")},
    )


def _observation(value: Any, method: str) -> Observation:
    if isinstance(value, str):
        value = Observation(value)
    if not isinstance(value, Observation) or not isinstance(value.text, str):
        raise EpisodeError(f"{method} returned {value!r:.80} as observation; it must be text or an Observation")
    actions = value.actions
    if actions is not None and (
        not isinstance(actions, Sequence) or isinstance(actions, str) or not all(isinstance(a, str) for a in actions)
    ):
        raise EpisodeError(f"{method} returned the actions {actions!r:.80}; they must be texts")
    for text in (value.text, *(actions or ())):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise EpisodeError(f"{method} returned {text!r:.80}: half a surrogate pair is no text") from error
    return Observation(value.text, None if actions is None else tuple(actions))


_EVAL_SEEDS = 1_000_000  # held-out instances have seeds from here on, training instances below


class SeededWorld(World):
    """Instances are seeds; those from a million on are held out."""

    def __init__(self, max_turns: int, num_train: int, num_eval: int, system_prompt: str | None) -> None:
        if max_turns < 1 or not 1 <= num_train < _EVAL_SEEDS or num_eval < 1:
            raise ConfigError(
                f"max_turns={max_turns}, num_train={num_train}, num_eval={num_eval}: each must be 1 or more, and "
                f"num_train below {_EVAL_SEEDS}"
            )
        self.max_turns, self.system_prompt = max_turns, system_prompt
        self._num_train, self._num_eval = num_train, num_eval

    def train_tasks(self, seed: int) -> list[TaskInstance]:
        seeds = random.Random(seed).sample(range(_EVAL_SEEDS), self._num_train)
        return [{"seed": number, "uid": f"seed-{number}"} for number in seeds]

    def eval_tasks(self) -> list[TaskInstance]:
        return [{"seed": _EVAL_SEEDS + i, "uid": f"seed-{_EVAL_SEEDS + i}"} for i in range(self._num_eval)]


_WORLDS: dict[str, Callable[..., World] | str] = {
    "alfworld": "covey.environments.alfworld:AlfWorld",
    "gymnasium": "covey.environments.adapters:Gymnasium",
    "house": "covey.recipes.house.house:House",  # the recipe's file, which is installed
    "openenv": "covey.environments.adapters:OpenEnv",
    "textworld": "covey.environments.textworld:TextWorld",
}  # imported when they are asked for


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
