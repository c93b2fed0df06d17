"""The in-process generation engine: samples completions from a copy of the policy's weights."""

from covey.pytorch.engine.engine import Engine
from covey.pytorch.engine.rows import GenerationStats
from covey.pytorch.engine.session import Session

__all__ = ["Engine", "GenerationStats", "Session"]
