"""The names of the package, for type checkers and for its `__getattr__`."""

from covey.environments.actions import match_action, parse_action
from covey.environments.adapters import GymnasiumEnvironment
from covey.environments.base import (
    Environment,
    Observation,
    Outcome,
    TaskInstance,
    World,
    get_world,
    register_world,
    world_names,
)
from covey.environments.pool import EnvironmentPool

__all__ = [
    "Environment", "EnvironmentPool", "GymnasiumEnvironment", "Observation", "Outcome", "TaskInstance", "World",
    "get_world", "match_action", "parse_action", "register_world", "world_names",
]  # fmt: skip
