"""Worlds whose instances are numbers: each seed is a game of its own."""

from __future__ import annotations

import random

from covey.environments.base import TaskInstance, World
from covey.errors import ConfigError

_EVAL_SEEDS = 1_000_000
"""Held-out instances have seeds from here on, training instances below."""


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
