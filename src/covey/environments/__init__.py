"""Worlds in which agents act for several turns."""

from typing import TYPE_CHECKING

from covey.functions import when_used

if TYPE_CHECKING:
    from covey.environments.actions import match_action, parse_action
    from covey.environments.base import Environment, Observation, Outcome, TaskInstance, World
    from covey.environments.house import House, HouseEnvironment
    from covey.environments.pool import EnvironmentPool
    from covey.environments.registry import get_world, register_world, world_names

__all__ = [
    "Environment",
    "EnvironmentPool",
    "House",
    "HouseEnvironment",
    "Observation",
    "Outcome",
    "TaskInstance",
    "World",
    "get_world",
    "match_action",
    "parse_action",
    "register_world",
    "world_names",
]

__getattr__ = when_used(
    __name__,
    {
        "covey.environments.actions": "match_action parse_action",
        "covey.environments.base": "Environment Observation Outcome TaskInstance World",
        "covey.environments.house": "House HouseEnvironment",
        "covey.environments.pool": "EnvironmentPool",
        "covey.environments.registry": "get_world register_world world_names",
    },
)
