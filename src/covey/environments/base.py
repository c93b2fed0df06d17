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
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, ClassVar

from covey.errors import ConfigError, DataError, EpisodeError
from covey.functions import later, make_named

(_pictures,) = later("covey.tasks", "pictures")

TaskInstance = dict[str, Any]
"""One task: plain JSON values with a `uid` and, if there are several kinds of task, a `type`. It may have a
`system_prompt` in place of the world's, and `messages` that come before the first observation."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the agent sees before a turn."""

    text: str
    """The observation in words."""
    actions: tuple[str, ...] | None = None
    """The admissible actions; None = any text is allowed."""
    pictures: Sequence[Any] = ()
    """At most 16, shown before the text: PIL images, arrays `[height, width, 3]` of bytes, or the bytes of files."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an action."""

    observation: Observation
    """The next observation."""
    reward: float = 0.0
    """Of this step."""
    done: bool = False
    """The episode is over."""
    success: bool = False
    """The task is solved; False during the episode."""
    valid: bool = True
    """The action was valid."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Other plain values from the environment."""


Returned = (
    tuple[Observation | str, float, bool, Mapping[str, Any]]
    | tuple[Observation | str, float, bool, bool, Mapping[str, Any]]
)


class Environment(ABC):
    """One environment, which plays one episode after another."""

    @abstractmethod
    def reset(self, task: TaskInstance, seed: int) -> Observation | str:
        """Begin an episode and return its first observation. Equal tasks and seeds must give equal episodes."""

    @abstractmethod
    def step(self, action: str) -> Returned:
        """Take an action and return observation, reward, done, info. As in Gymnasium, done may be split into terminated
        and truncated.

        `info["success"]`: the task is solved; default: done, not truncated, and the reward is above 0.
        `info["valid"]`: the action was valid; default: it is admissible, if the admissible actions are known.
        """

    def close(self) -> None:  # noqa: B027 (most have nothing to give back)
        """Release what the environment holds: processes, files, memory.

        It is called at the end of a run and may take two seconds; then the environment's process is killed. Processes
        that the environment started are killed too, unless they left its process group.
        """

    def expert_action(self) -> str | None:
        """The action of a perfect player, if the world knows it, else None."""
        return None


class World(ABC):
    """A source of tasks, and of the environments that play them.

    No held-out task may occur in training, whatever the seed.
    """

    name: ClassVar[str]
    """The world's name for `get_world`."""
    system_prompt: str | None = None
    """The rules, shown before each episode; None = none."""
    tools: Sequence[Mapping[str, Any]] = ()
    """For `action_format = "call"`: name, description and parameters (JSON schema) of each function that the model may
    call. An action is then the JSON of a call, `{"name": ..., "arguments": {...}}`."""
    max_turns: int = 20
    """Most turns of an episode; a default for `environment.max_turns`."""
    max_completion_length: int = 32
    """Tokens that a turn needs; a default for `sampling.max_completion_length`."""

    @abstractmethod
    def train_tasks(self, seed: int) -> list[TaskInstance]:
        """The training tasks; the same seed gives the same tasks. Raises `DataError`: they cannot be read."""

    @abstractmethod
    def eval_tasks(self) -> list[TaskInstance]:
        """The held-out tasks, always the same. Raises `DataError`: they cannot be read."""

    @abstractmethod
    def make(self) -> Environment:
        """Make an environment for any of the tasks. It is called in another process, so the world must be picklable."""

    def prepare(self) -> None:  # noqa: B027 (most have nothing to prepare)
        """Import and read what all environments need. It is called once, in the process that is forked for each."""


def checked_reset(returned: Any) -> Observation:
    """What `reset` returned, or an `EpisodeError` that says what is wrong with it."""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        returned = returned[0]  # Gymnasium's (observation, info)
    return checked_observation(returned, "reset")


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
        observation=checked_observation(observation, "step"),
        reward=float(reward),
        done=done,
        success=bool(info.get("success", solved and float(reward) > 0)),
        valid=bool(info.get("valid", known)),
        info={str(name): value for name, value in info.items() if name not in ("success", "valid")},
    )


def checked_observation(value: Any, method: str) -> Observation:
    """What `method` returned as observation, its pictures as `covey.tasks.pictures.Picture`, or an `EpisodeError`."""
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
            raise EpisodeError(f"{method} returned {text!r:.80}: half a surrogate pair is not text") from error
    try:
        pictures = _pictures.read_shown(value.pictures, method)
    except DataError as error:
        raise EpisodeError(str(error)) from error
    return Observation(value.text, None if actions is None else tuple(actions), pictures)


_EVAL_SEEDS = 1_000_000  # held-out instances have seeds from here on, training instances below


@dataclass(eq=False, repr=False, kw_only=True)
class SeededWorld(World):
    """Instances are seeds; those from a million on are held out."""

    max_turns: int = 20
    num_train: int = 1000
    num_eval: int = 50
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            if (own := getattr(type(self), each.name, each.default)) is not each.default:
                fix = f"write its type and @dataclass above the class: {each.name}: {each.type} = {own!r}"
                raise ConfigError(f"{type(self).__name__}.{each.name}={own!r}: is no default of a dataclass; {fix}")
        if self.max_turns < 1 or not 1 <= self.num_train < _EVAL_SEEDS or self.num_eval < 1:
            raise ConfigError(
                f"max_turns={self.max_turns}, num_train={self.num_train}, num_eval={self.num_eval}: each must be 1 or "
                f"more, and num_train below {_EVAL_SEEDS}"
            )

    def train_tasks(self, seed: int) -> list[TaskInstance]:
        seeds = random.Random(seed).sample(range(_EVAL_SEEDS), self.num_train)
        return [{"seed": number, "uid": f"seed-{number}"} for number in seeds]

    def eval_tasks(self) -> list[TaskInstance]:
        return [{"seed": _EVAL_SEEDS + i, "uid": f"seed-{_EVAL_SEEDS + i}"} for i in range(self.num_eval)]


_WORLDS: dict[str, Callable[..., World] | str] = {
    "alfworld": "covey.environments.alfworld:AlfWorld",
    "gymnasium": "covey.environments.adapters:Gymnasium",
    "house": "covey.recipes.house.house:House",  # the recipe's file, which is installed
    "openenv": "covey.environments.adapters:OpenEnv",
    "textworld": "covey.environments.textworld:TextWorld",
    "verifiers": "covey.environments.verifiers:Verifiers",
}  # imported when they are asked for


def register_world(name: str, factory: Callable[..., World] | str) -> None:
    """Make `factory(**options)` available as `get_world(name, **options)`; it replaces an earlier one of this name.

    `factory` may be text, `MODULE:NAME`, which is imported at its first use.
    """
    _WORLDS[name] = factory


def world_names() -> tuple[str, ...]:
    """The names that `get_world` knows."""
    return tuple(sorted(_WORLDS))


def get_world(name: str, **options: Any) -> World:
    """Make a world by its name.

    Raises `ConfigError`: there is no such world or option, or the world refuses a value.

    Args:
        name: a name with or without options (`"house"`, `"house:rooms=4,max_turns=5"`), or a `World` class, factory or
            object in a file (`"maze.py:Maze"`, `"maze.py:Maze:size=9"`).
        **options: arguments of the world; they replace those in `name`.
    """
    return make_named("environment", name, _WORLDS, World, **options)
