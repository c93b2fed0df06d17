"""A world that does not repeat itself."""

from __future__ import annotations

import os
from typing import Any

from covey.environments import Environment, Observation, World


class Restless(World):
    """Shows the process that it is in, or tells it beside what is seen."""

    name = "restless"

    def __init__(self, info_only: bool = False) -> None:
        self.info_only = info_only

    def train_tasks(self, seed: int) -> list[dict[str, Any]]:
        return [{"uid": "0"}]

    def eval_tasks(self) -> list[dict[str, Any]]:
        return [{"uid": "1"}]

    def make(self) -> Environment:
        return _Restless(self.info_only)


class _Restless(Environment):
    def __init__(self, info_only: bool) -> None:
        self.info_only = info_only

    def reset(self, task: Any, seed: int) -> Observation:
        return Observation("here" if self.info_only else f"process {os.getpid()}")

    def step(self, action: str) -> Any:
        return "on", 0.0, False, {"pid": os.getpid()}
