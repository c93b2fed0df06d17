"""A small house in which something is hidden: the bundled world. Nothing needs to be installed for it.

    You are in the hall. There is a note on the wall. Doors: kitchen, garden, study.
    Find the key.
    > read note
    The note says: the key is in the study.
    > go study
    You are in the study. You see a key. A door leads back to the hall.
    > take key

Only the room that one is in can be seen, and the note can be read once, so a player must read it or search, and
remember what it said. There is not enough time to search everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar

from covey.environments.base import Environment, Observation, TaskInstance, World
from covey.errors import ConfigError

_ROOMS = ("kitchen", "garden", "study", "cellar", "attic", "bedroom", "garage", "library", "bathroom", "pantry")
_THINGS = ("key", "lamp", "ring", "book", "coin", "map", "cup", "bell", "rope", "clock", "knife", "candle")
_EVAL_SEED = 20260101


class House(World):
    """Find a thing in one of several rooms, with a note that says where it is.

    Args:
        rooms: besides the hall.
        max_turns: actions in an episode; reading, going and taking needs three.
        num_train: training instances.
        num_eval: held-out instances.
    """

    name: ClassVar[str] = "house"

    def __init__(self, rooms: int = 3, max_turns: int = 3, num_train: int = 400, num_eval: int = 100) -> None:
        if not 2 <= rooms <= len(_ROOMS) or max_turns < 3 or num_train < 1 or num_eval < 1:
            raise ConfigError(
                f"rooms={rooms}, max_turns={max_turns}, num_train={num_train}, num_eval={num_eval}: between 2 and "
                f"{len(_ROOMS)} rooms, at least 3 turns, and at least 1 instance of each kind"
            )
        self.rooms, self.max_turns = rooms, max_turns
        self.num_train, self.num_eval = num_train, num_eval
        self.max_completion_length = 12
        self.system_prompt = "You play a text game. Answer with one of the actions and nothing else."

    def train_tasks(self, seed: int) -> list[TaskInstance]:
        """Instances drawn with the seed, none of them held out."""
        held_out = {_key(task) for task in self.eval_tasks()}
        return self._draw(random.Random(f"train-{seed}"), self.num_train, held_out)

    def eval_tasks(self) -> list[TaskInstance]:
        return self._draw(random.Random(_EVAL_SEED), self.num_eval, set())

    def make(self) -> Environment:
        return HouseEnvironment()

    def _draw(self, draw: random.Random, count: int, without: set[tuple[str, ...]]) -> list[TaskInstance]:
        found: dict[tuple[str, ...], TaskInstance] = {}
        for _ in range(50 * count):
            if len(found) == count:
                break
            rooms = draw.sample(_ROOMS, self.rooms)
            task = {"rooms": rooms, "thing": draw.choice(_THINGS), "place": draw.choice(rooms), "type": "find"}
            if _key(task) not in without:
                found.setdefault(_key(task), {**task, "uid": "-".join(_key(task))})
        return list(found.values())


class HouseEnvironment(Environment):
    """Plays instances of `House`, one at a time."""

    def reset(self, task: TaskInstance, seed: int) -> Observation:
        self._rooms, self._thing, self._place = list(task["rooms"]), task["thing"], task["place"]
        self._here: str | None = None
        self._knows = False
        return self._look(f"Find the {self._thing}.")

    def step(self, action: str) -> tuple[Observation, float, bool, Mapping[str, Any]]:
        if action not in self._actions():
            return self._look("That is not possible."), 0.0, False, {"valid": False}
        if action == "read note":
            self._knows = True
            return self._look(f"The note says: the {self._thing} is in the {self._place}."), 0.0, False, {}
        if action.startswith("take"):
            found = Observation(f"You have the {self._thing}.", ())
            return found, 1.0, True, {"success": True}
        target = action.removeprefix("go ")
        self._here = None if target == "hall" else target
        return self._look(), 0.0, False, {}

    def expert_action(self) -> str:
        if self._here == self._place:
            return f"take {self._thing}"
        if self._here is not None:
            return "go hall"
        return f"go {self._place}" if self._knows else "read note"

    def _actions(self) -> tuple[str, ...]:
        if self._here is None:
            return (*(() if self._knows else ("read note",)), *(f"go {room}" for room in self._rooms))
        return (f"take {self._thing}", "go hall") if self._here == self._place else ("go hall",)

    def _look(self, first: str = "") -> Observation:
        if self._here is None:
            note = "" if self._knows else "There is a note on the wall. "
            text = f"You are in the hall. {note}Doors: {', '.join(self._rooms)}."
        else:
            sight = f"You see a {self._thing}." if self._here == self._place else "It is empty."
            text = f"You are in the {self._here}. {sight} A door leads back to the hall."
        return Observation(f"{first} {text}".strip(), self._actions())


def _key(task: Mapping[str, Any]) -> tuple[str, ...]:
    return (*map(str, task["rooms"]), task["thing"], task["place"])
