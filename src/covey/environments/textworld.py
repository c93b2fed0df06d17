"""TextWorld: text adventures that are made on the fly, as difficult as one asks for.

    environment.world = "textworld:rooms=2,objects=4,quest_length=3"

Each seed is a game of its own: a map, things in it, and a quest that takes `quest_length` actions. Making one takes
seconds, so games are kept in a folder and made once.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from covey.environments.base import Environment, Observation, SeededWorld, TaskInstance
from covey.errors import ConfigError

_END = re.compile(r"\n\s*\*\*\* .* \*\*\*.*", re.DOTALL)
_PROMPT = re.compile(r"\n>\s[^\n]*$")
_BLANK = re.compile(r"\n\s*\n\s*")


class TextWorld(SeededWorld):
    """Text adventures that TextWorld makes, one for each seed."""

    name: ClassVar[str] = "textworld"

    def __init__(
        self,
        rooms: int = 2,
        objects: int = 4,
        quest_length: int = 2,
        instructions: str = "all",
        reward: str = "win",
        max_turns: int | None = None,
        num_train: int = 200,
        num_eval: int = 50,
        cache: str | None = None,
    ) -> None:
        if rooms < 1 or objects < 1 or quest_length < 1:
            raise ConfigError(f"rooms={rooms}, objects={objects}, quest_length={quest_length}: each must be 1 or more")
        if instructions not in ("all", "last") or reward not in ("win", "progress"):
            raise ConfigError(f"instructions={instructions!r}, reward={reward!r}: must be all or last, win or progress")
        if importlib.util.find_spec("textworld") is None:
            raise ConfigError("world textworld: the package is not installed; pip install 'covey[textworld]'")
        rules = "You play a text adventure. Answer with one action and nothing else."
        turns = 3 * quest_length + 5 if max_turns is None else max_turns
        super().__init__(max_turns=turns, num_train=num_train, num_eval=num_eval, system_prompt=rules)
        self.max_completion_length = 24
        self._game = {"nb_rooms": rooms, "nb_objects": objects, "quest_length": quest_length}
        self._instructions, self._reward = instructions, reward
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self._folder = Path(cache or Path(caches) / "covey" / "textworld")

    def prepare(self) -> None:
        import textworld.generator  # noqa: F401

    def make(self) -> Environment:
        return TextWorldEnvironment(self._folder, self._game, self._instructions, self._reward)


class TextWorldEnvironment(Environment):
    """Plays the game of a seed."""

    def __init__(self, folder: Path, game: Mapping[str, int], instructions: str, reward: str) -> None:
        self._folder, self._game, self._instructions = folder, dict(game), instructions
        self._by_progress = reward == "progress"
        self._env: Any = None

    def reset(self, task: TaskInstance, seed: int) -> Observation:
        """Make the game, if nobody has, and begin it."""
        import textworld

        self.close()
        names = ("admissible_commands", "won", "objective", "description", "policy_commands")
        wanted = textworld.EnvInfos(**dict.fromkeys(names, True))
        path = self._made(int(task["seed"]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the interpreter says of every made game that it has no walkthrough
            self._env = textworld.start(str(path), wanted)
            self._env.seed(seed % 2**31)
            self._state = self._env.reset()
        self._length = max(len(self._state.policy_commands), 1)
        return self._seen(f"{self._state.objective.strip()}\n{_tidy(self._state.description)}")

    def step(self, action: str) -> tuple[Observation, float, bool, Mapping[str, Any]]:
        known = action in self._state.admissible_commands
        left = len(self._state.policy_commands)
        self._state, _, done = self._env.step(action)
        won = bool(self._state.won)
        gained = (left - (0 if won else len(self._state.policy_commands))) / self._length
        reward = gained if self._by_progress else float(won)
        return self._seen(_tidy(self._state.feedback)), reward, bool(done), {"success": won, "valid": known}

    def expert_action(self) -> str | None:
        plan = self._state.policy_commands
        return str(plan[0]) if plan else None

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _seen(self, text: str) -> Observation:
        return Observation(text, tuple(self._state.admissible_commands))

    def _made(self, seed: int) -> Path:
        """The file of a game. Of several processes that want it one makes it and the others wait."""
        import textworld

        settings = "-".join(f"{name}{value}" for name, value in self._game.items())
        path = self._folder / f"{textworld.__version__}-{settings}-{self._instructions}-{seed}.z8"
        if path.exists():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with (self._folder / f".{path.stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                self._make(path, seed)
        Path(lock.name).unlink(missing_ok=True)
        return path

    def _make(self, path: Path, seed: int) -> None:
        import textworld

        options = textworld.GameOptions()
        for name, value in self._game.items():
            setattr(options, name, value)
        options.seeds = seed
        options.grammar.only_last_action = self._instructions == "last"
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            options.path = str(Path(folder) / path.name)
            textworld.make(options)
            for suffix in (".json", ".z8"):  # the game itself last: it says that all is there
                shutil.move(Path(options.path).with_suffix(suffix), path.with_suffix(suffix))


def _tidy(text: str) -> str:
    """Without the interpreter's prompt, its closing questions, and blank lines."""
    return _BLANK.sub("\n", _END.sub("", _PROMPT.sub("", text.rstrip()))).strip()
