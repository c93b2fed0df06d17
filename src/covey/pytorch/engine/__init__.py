"""The in-process generation engine: samples completions from a copy of the policy's weights."""

from covey.pytorch.engine.engine import Engine
from covey.rollout.turns import GenerationStats, Session

__all__ = ["Engine", "GenerationStats", "Session"]
