"""ALFWorld (arXiv 2010.03768): household tasks of six kinds in text, 50 actions at most.

    environment.world = "alfworld:data=path/to/alfworld"

`data` is what `alfworld-download` fetches (a folder with `train/`, `valid_seen/`, ..., where each trial has its
`game.tw-pddl` and `traj_data.json`), or a folder with compact files `train.jsonl.gz`, `valid_seen.jsonl.gz`, ..., one
game in a line: `id`, `task_type`, `goal`, `anns`, `pddl_problem`.
"""

from __future__ import annotations

import base64
import gzip
import importlib.util
import json
import os
import random
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from covey.environments.base import Environment, Observation, TaskInstance, World
from covey.errors import ConfigError, DataError

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)


class AlfWorld(World):
    """The text games of ALFWorld."""

    name: ClassVar[str] = "alfworld"

    def __init__(
        self,
        data: str | None = None,
        types: str | None = None,
        goals: str = "template",
        eval_split: str = "valid_seen",
        num_train: int | None = None,
        num_eval: int | None = None,
        max_turns: int = 50,
    ) -> None:
        self._types = tuple(types.split("|")) if types else TASK_TYPES
        unknown = sorted(set(self._types) - set(TASK_TYPES))
        if unknown:
            raise ConfigError(f"types={types!r}: {unknown[0]!r} is none of {', '.join(TASK_TYPES)}")
        if goals not in ("template", "human"):
            raise ConfigError(f"goals={goals!r}: must be template or human")
        if max_turns < 1 or any(number is not None and number < 1 for number in (num_train, num_eval)):
            raise ConfigError(f"max_turns={max_turns}, num_train={num_train}, num_eval={num_eval}: must be 1 or more")
        if any(importlib.util.find_spec(name) is None for name in ("alfworld", "textworld")):
            raise ConfigError("world alfworld: the package is not installed; pip install 'covey[alfworld]'")
        downloaded = Path(os.environ.get("ALFWORLD_DATA") or Path.home() / ".cache" / "alfworld") / "json_2.1.1"
        self._data = Path(data) if data else downloaded
        self._goals, self._eval_split, self._num_train, self._num_eval = goals, eval_split, num_train, num_eval
        self.max_turns, self.max_completion_length = max_turns, 24
        self.system_prompt = (
            "You act in a household, in a text game. Things have numbers, such as cabinet 2. Go to a place to see what "
            "is there, and open what is closed; you can carry one thing. Answer with one action and nothing else."
        )

    def train_tasks(self, seed: int) -> list[TaskInstance]:
        """The training games, or `num_train` of them drawn with the seed."""
        return self._games("train", self._num_train, f"train-{seed}")

    def eval_tasks(self) -> list[TaskInstance]:
        """The held-out games, or the same `num_eval` of them."""
        return self._games(self._eval_split, self._num_eval, "eval")

    def prepare(self) -> None:
        """Import the planner and read the rules of the game."""
        from covey.environments.alfworld_game import game_logic

        game_logic()

    def make(self) -> Environment:
        return AlfWorldEnvironment()

    def _games(self, split: str, count: int | None, seed: str) -> list[TaskInstance]:
        found = [
            {"uid": row["id"], "type": row["task_type"], "goal": self._goal(row), "problem": row["problem"]}
            for row in _read(self._data, split)
            if row["task_type"] in self._types
        ]
        if not found:
            raise DataError(f"{self._data}: the split {split} has no games of {', '.join(self._types)}")
        return found if count is None or count >= len(found) else random.Random(seed).sample(found, count)

    def _goal(self, row: Mapping[str, Any]) -> str:
        if self._goals == "template" or not row["anns"]:
            return str(row["goal"])
        return str(random.Random(row["id"]).choice(row["anns"])).strip().rstrip(".")


class AlfWorldEnvironment(Environment):
    """Plays one game after another; the planner's library is loaded once."""

    def __init__(self) -> None:
        import fast_downward

        self._library = fast_downward.load_lib()
        self._plan: list[str] = []

    def reset(self, task: TaskInstance, seed: int) -> Observation:
        """Begin a game; nothing in it is random."""
        from covey.environments.alfworld_game import Game

        problem = zlib.decompress(base64.b64decode(task["problem"])).decode()
        self._game, self._plan = Game.begin(self._library, problem, task["goal"]), []
        return self._seen(self._game.introduction())

    def step(self, action: str) -> tuple[Observation, float, bool, Mapping[str, Any]]:
        known = action in self._game.commands
        self._plan = self._plan[1:] if self._plan[:1] == [action] else []
        said = self._game.do(action)
        won = self._game.won
        return self._seen(said), float(won), won, {"success": won, "valid": known}

    def expert_action(self) -> str | None:
        """The planner's next action; it may think for some seconds."""
        self._plan = self._plan or self._game.plan()
        return self._plan[0] if self._plan else None

    def _seen(self, text: str) -> Observation:
        return Observation(text, tuple(self._game.commands))


def _read(folder: Path, split: str) -> Iterator[dict[str, Any]]:
    """Rows with `id`, `task_type`, `goal`, `anns`, and `problem`, the PDDL text compressed."""
    compact, trials = folder / f"{split}.jsonl.gz", folder / split
    if compact.exists():
        yield from _read_compact(compact)
    elif trials.is_dir():
        for path in sorted(trials.rglob("game.tw-pddl")):
            row = _read_trial(path, path.relative_to(trials).parent.as_posix())
            if row is not None:
                yield row
    else:
        raise DataError(
            f"{folder}: there is neither {split}.jsonl.gz nor a folder {split} in it; run alfworld-download, or say "
            "where the games are: alfworld:data=..."
        )


def _read_compact(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                kept = {name: row[name] for name in ("id", "task_type", "goal")}
                yield kept | {"anns": row.get("anns", []), "problem": _compressed(row["pddl_problem"])}
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not one ALFWorld game in each line: {type(error).__name__}: {error}") from error


def _read_trial(path: Path, name: str) -> dict[str, Any] | None:
    """A downloaded game; None for those that ALFWorld leaves out too."""
    if "movable" in name or "Sliced" in name:
        return None
    try:
        game = json.loads(path.read_text(encoding="utf-8"))
        trial = json.loads((path.parent / "traj_data.json").read_text(encoding="utf-8"))
        if not game.get("solvable", False):
            return None
        told = game["grammar"].partition("Your task is to: ")[2].partition('"')[0]
        return {
            "id": name,
            "task_type": trial["task_type"],
            "goal": told.strip().rstrip("."),
            "anns": [said["task_desc"] for said in trial["turk_annotations"]["anns"]],
            "problem": _compressed(game["pddl_problem"]),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: no ALFWorld game: {type(error).__name__}: {error}") from error


def _compressed(problem: str) -> str:
    return base64.b64encode(zlib.compress(problem.encode(), 1)).decode()
