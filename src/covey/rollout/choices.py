"""Turns that may only be one of some token sequences: what may come next, and what has no alternative left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from covey.types import IntArray

Choices = tuple[tuple[int, ...], ...]


def following(choices: Choices | None, said: Sequence[int]) -> IntArray | None:
    """Ids that may come next, ascending; None = any."""
    if choices is None:
        return None
    begun, place = tuple(said), len(said)
    found = {choice[place] for choice in choices if len(choice) > place and choice[:place] == begun}
    return np.array(sorted(found), dtype=np.int64)


def only_way_on(choices: Choices | None, said: Sequence[int]) -> tuple[int, ...] | None:
    """What is left of the one sequence that the turn can still become; None = there are several, or any."""
    if choices is None:
        return None
    begun = tuple(said)
    left = {choice for choice in choices if choice[: len(begun)] == begun}
    return left.pop()[len(begun) :] if len(left) == 1 else None
