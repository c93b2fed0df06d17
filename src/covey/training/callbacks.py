"""User callbacks, called as transformers' `TrainerCallback`s are, so that existing ones work unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from covey.errors import ConfigError


@dataclass(slots=True)
class TrainerControl:
    """What a callback can ask of the loop, under transformers' names.

    Attributes:
        should_training_stop: end the run after this step, with a checkpoint.
        should_save: write a checkpoint after this step.
        should_evaluate: evaluate after this step.
    """

    should_training_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_epoch_stop: bool = False
    should_log: bool = False


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

    An exception in a callback is the user's and ends the run: it is not swallowed.
    """

    def __init__(self, callbacks: Sequence[Any], args: Any, state: Any) -> None:
        check_callbacks(callbacks)
        self._callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks]
        self._args = args
        self.state = state
        self.control = TrainerControl()

    def __call__(self, event: str, **kwargs: Any) -> None:
        """Call `event` (`on_step_end`, `on_log`, ...); a returned control replaces the current one."""
        for callback in self._callbacks:
            handler = getattr(callback, event, None)
            if handler is not None:
                answer = handler(self._args, self.state, self.control, **kwargs)
                if answer is not None:
                    self.control = answer

    def take(self, request: str) -> bool:
        """Read and reset one request such as `should_save`."""
        asked = bool(getattr(self.control, request))
        setattr(self.control, request, False)
        return asked
