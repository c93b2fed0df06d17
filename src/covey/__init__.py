"""Covey trains language models with Group Relative Policy Optimization.

    from covey import GRPOConfig, GRPOTrainer

Importing this package imports neither torch nor JAX: the names below are loaded when they are first used.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.config.whole import GRPOConfig, GRPOTrainingArgs
    from covey.training.trainer import GRPOTrainer

__version__ = "0.1.0"

__all__ = ["GRPOConfig", "GRPOTrainer", "GRPOTrainingArgs", "__version__"]

# PEFT imports these wherever they are installed, and each import tells stderr of kernels for other processors.
for _name in ("bitsandbytes", "torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    if name.endswith(("Trainer", "Config", "Arguments", "Parser", "Callback")) and name not in __all__:
        from covey.functions import unknown_name

        advice = f"covey has no {name}; if it is TRL's, see covey.trl: from covey.trl import {name}"
        raise unknown_name(__name__, name, advice)
    if name not in __all__:
        raise AttributeError(f"module 'covey' has no attribute {name!r}")
    home = import_module("covey.training.trainer" if name == "GRPOTrainer" else "covey.config")
    return globals().setdefault(name, getattr(home, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
