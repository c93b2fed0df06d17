"""Worlds in which agents act for several turns."""

from typing import TYPE_CHECKING

from covey.functions import when_used

if TYPE_CHECKING:
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

__all__ = ["Environment", "EnvironmentPool", "GymnasiumEnvironment", "Observation", "Outcome", "TaskInstance", "World"]
__all__ += ["get_world", "match_action", "parse_action", "register_world", "world_names"]

__getattr__ = when_used(
    __name__,
    {
        "covey.environments.actions": "match_action parse_action",
        "covey.environments.adapters": "GymnasiumEnvironment",
        "covey.environments.base": "Environment Observation Outcome TaskInstance World "
        "get_world register_world world_names",
        "covey.environments.pool": "EnvironmentPool",
    },
)
