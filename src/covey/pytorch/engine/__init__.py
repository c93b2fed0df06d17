"""The in-process generation engine: samples completions from a copy of the policy's weights."""

from covey.pytorch.engine.engine import Engine, GenerationStats

__all__ = ["Engine", "GenerationStats"]
