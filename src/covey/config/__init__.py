"""All settings of a run: a file for each section or two, put together in `whole.py`, read and explained by `text.py`.

    from covey.config import GRPOConfig

The names below are loaded when they are first used, so that a room may import its own section without the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.config.whole import GRPOConfig, GRPOTrainingArgs

__all__ = ["GRPOConfig", "GRPOTrainingArgs"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'covey.config' has no attribute {name!r}")
    return getattr(import_module("covey.config.whole"), name)
