"""Where a run stands, and the user's callbacks that are told of it; both as in transformers, whose callbacks fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import transformers
from transformers import TrainerControl

from covey.errors import CheckpointError, ConfigError

_WHOLE, _NUMBER, _NONE = (int,), (float, int), type(None)
_COUNTERS: dict[str, tuple[type, ...]] = {
    "global_step": _WHOLE,
    "max_steps": _WHOLE,
    "epoch": _NUMBER,
    "num_tokens": _WHOLE,
    "seconds": _NUMBER,
    "data_position": _WHOLE,
    "policy_version": _WHOLE,
    "updates": _WHOLE,
    "evaluations_without_improvement": _WHOLE,
    "best_metric": (float, _NONE),
    "best_step": (int, _NONE),
    "best_metric_name": (str,),
    "entropy_coef": (float, _NONE),
    "last_entropy": (float, _NONE),
}
"""What a checkpoint keeps, with the types that it may have."""


@dataclass
class TrainerState(transformers.TrainerState):
    """Counters of a run: those of transformers, and Covey's own."""

    max_steps: int = -1
    epoch: float = 0.0
    num_tokens: int = 0
    seconds: float = 0.0
    data_position: int = 0
    policy_version: int = 1
    updates: int = 0
    evaluations_without_improvement: int = 0
    best_step: int | None = None
    best_metric_name: str = ""
    entropy_coef: float | None = None
    last_entropy: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; the history is in the run folder already."""
        return {name: getattr(self, name) for name in _COUNTERS}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Rebuild the state of a checkpoint, its history empty.

        Raises:
            CheckpointError: the checkpoint names a counter that this version does not know, lacks one, or has one that
                is no such number.
        """
        later = {"best_metric_name": "", "entropy_coef": None, "last_entropy": None}
        values = later | values  # not in checkpoints of older versions
        if values.keys() != _COUNTERS.keys():
            odd = sorted(values.keys() ^ _COUNTERS.keys())
            raise CheckpointError(
                f"trainer state with fields {odd} missing or unknown: the checkpoint was written by another version of "
                "covey; resume it with that version"
            )
        for name, allowed in _COUNTERS.items():
            if type(values[name]) not in allowed or (type(values[name]) is float and not math.isfinite(values[name])):
                raise CheckpointError(
                    f"trainer state with {name}={values[name]!r:.80}: the checkpoint was changed after it was written; "
                    "delete it to resume from the one before"
                )
        return cls(**values)

    def take(self, other: TrainerState) -> None:
        """Become equal to another state; those who hold this one see it."""
        vars(self).update(vars(other))


def check_callbacks(callbacks: Any) -> None:
    """Refuse what would never be called.

    Raises:
        ConfigError: it is no list, or one of them has no method of an event.
    """
    if not isinstance(callbacks, list | tuple):
        raise ConfigError(f"callbacks={callbacks!r:.200}: a {type(callbacks).__name__}; pass a list of callbacks")
    for callback in callbacks:
        if not any(name.startswith("on_") for name in dir(callback)):
            raise ConfigError(
                f"callbacks: {callback!r:.200} has no method such as on_step_end or on_log, so nothing would call it; "
                "pass a transformers TrainerCallback, or an object with such methods"
            )


class Callbacks:
    """Calls `callback.EVENT(args, state, control, **kwargs)` on every callback that has such a method.

    Transformers' own handler would ask each for all methods of `TrainerCallback`. An exception in a callback is the
    user's and ends the run: it is not swallowed.
    """

    def __init__(self, callbacks: Sequence[Any], args: Any, state: TrainerState) -> None:
        check_callbacks(callbacks)
        self._callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks]
        self._args, self._state = args, state
        self.control = TrainerControl()

    def add(self, callback: Any) -> None:
        """Call this one too, from now on."""
        check_callbacks([callback])
        self._callbacks.append(callback)

    def __call__(self, event: str, **kwargs: Any) -> None:
        """Call `event` (`on_step_end`, `on_log`, ...); a returned control replaces the current one."""
        for callback in self._callbacks:
            handler = getattr(callback, event, None)
            if handler is not None:
                self.control = handler(self._args, self._state, self.control, **kwargs) or self.control

    def take(self, request: str) -> bool:
        """Read and reset one request such as `should_save`."""
        asked = bool(getattr(self.control, request))
        setattr(self.control, request, False)
        return asked
