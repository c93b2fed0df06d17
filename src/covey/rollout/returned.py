"""Read what a reward function returned: one finite number or None for each completion, or an error."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.errors import RewardError, raised_at

_MAX_SHOWN = 500
MAX_REWARD = 1e30
"""The largest magnitude of a reward: the variance of a group, and an advantage in single precision, are then finite."""


def as_list(returned: Any, count: int) -> Any:
    """Read at most `count + 1` entries; awaitables, and what is no sequence, pass unchanged.

    It runs where the function ran, under its time limit: reading a generator runs the function's code.
    """
    if isinstance(returned, list | tuple) or inspect.isawaitable(returned):
        return returned
    if isinstance(returned, str | bytes | Mapping | set | frozenset) or getattr(returned, "ndim", 1) == 0:
        return returned
    if not hasattr(returned, "__iter__"):
        return returned
    values: list[Any] = []
    try:
        for value in islice(returned, count + 1):
            values.append(value)
    except (Exception, SystemExit) as error:
        if inspect.isgenerator(returned):  # it failed at this very sample
            raise RewardError(describe_error(error), sample=len(values)) from error
        raise
    # An array reports its true length; an endless generator is cut.
    return list(returned) if len(values) > count and hasattr(returned, "__len__") else values


def read_rewards(name: str, returned: Any, rows: Sequence[str]) -> NDArray[np.float64]:
    """`[N]` rewards, NaN for None.

    Args:
        name: of the reward function, for messages.
        returned: what it returned, through `as_list`. Entries may be anything that is one number: Python's,
            NumPy's and torch's, True and False.
        rows: for each of the N completions the name of its dataset row, for messages.

    Raises:
        RewardError: not a list, not N entries, or an entry that is no finite number up to `MAX_REWARD` in magnitude.
    """
    count = len(rows)
    if not isinstance(returned, list | tuple):
        shown = "nothing (None)" if returned is None else f"a {type(returned).__name__}"
        raise RewardError(
            f"reward function {name!r} returned {shown}; it must return a list with one number or None for "
            f"each of the {count} completions",
            function=name,
        )
    if len(returned) != count:
        shown = f"{len(returned)}" if len(returned) < count else f"{len(returned)} (or more)"
        raise RewardError(
            f"reward function {name!r} returned {shown} rewards for {count} completions; it must return "
            "exactly one for each completion, in order, None for those that it cannot score",
            function=name,
            sample=min(len(returned), count),
        )
    rewards = np.full(count, np.nan)
    for index, value in enumerate(returned):
        if value is None:
            continue
        number, problem = _read_number(value)
        if problem:
            raise RewardError(
                f"reward function {name!r} returned {_shown(value)} for sample {index} (row {rows[index]}): "
                f"{problem}, but a reward is one finite number; return a float, or None if the completion "
                "cannot be scored",
                function=name,
                sample=index,
            )
        rewards[index] = number
    return rewards


def _read_number(value: Any) -> tuple[float, str]:
    """The number, or what is wrong with it."""
    if isinstance(value, str | bytes):  # float("1") would take it
        return math.nan, "text"
    shape = getattr(value, "shape", ())
    if shape != ():
        return math.nan, f"an array of shape {tuple(shape)}"
    try:
        # item(): torch warns when float() is called on a tensor that needs a gradient.
        number = float(value.item() if hasattr(value, "item") else value)
    except OverflowError:
        return math.nan, f"larger than {MAX_REWARD:g}"
    except (Exception, SystemExit):
        return math.nan, f"a {type(value).__name__}"
    if math.isfinite(number) and abs(number) > MAX_REWARD:
        return math.nan, f"larger than {MAX_REWARD:g}"
    return number, "" if math.isfinite(number) else "not finite"


def describe_error(error: BaseException) -> str:
    """`ValueError: its message at rewards.py:17, in correct`, shortened; also for one that cannot print itself."""
    try:
        message = shorten(str(error))
    except Exception:
        message = "(its message cannot be shown)"
    return f"{type(error).__name__}: {message}{raised_at(error)}"


def shorten(text: str) -> str:
    """The beginning of a text that may be very long."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def _shown(value: Any) -> str:
    try:
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:60]}... ({len(text)} characters)"
    except Exception:
        return f"<{type(value).__name__}>"
