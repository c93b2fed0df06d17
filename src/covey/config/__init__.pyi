"""The names of the package, for type checkers and for its `__getattr__`."""

from covey.config.whole import GRPOConfig, GRPOTrainingArgs

__all__ = ["GRPOConfig", "GRPOTrainingArgs"]
