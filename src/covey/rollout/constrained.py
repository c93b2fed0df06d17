"""Constrained turns: one of some token sequences. What may come next, and what has no alternative left."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from covey.errors import GenerationError
from covey.types import IntArray, SamplingSettings

Choices = tuple[tuple[int, ...], ...]


def check_choices(choices: Choices, settings: SamplingSettings, room: int) -> None:
    """Refuse sequences of which one could not be said whole.

    Raises:
        GenerationError: naming what is in the way.
    """
    longest, ends = max(map(len, choices)), set(settings.eos_token_ids)
    if longest > min(settings.max_tokens, room):
        raise GenerationError(
            f"choices: the longest has {longest} tokens; max_tokens={settings.max_tokens} and the context leave "
            f"{min(settings.max_tokens, room)}"
        )
    if settings.stop_strings:
        raise GenerationError("choices: stop would end one before it is whole; leave stop out")
    for choice in choices:
        if not ends.isdisjoint(choice[:-1]):
            raise GenerationError(
                f"choices: {list(choice)!s:.80} has an end token ({min(ends.intersection(choice[:-1]))}) before its "
                "last place, where it would stop; split it, or send ignore_eos or other stop_token_ids"
            )
    for short, long in pairwise(sorted(set(choices))):  # a prefix sorts right before a sequence that goes on from it
        if long[: len(short)] == short:
            raise GenerationError(
                f"choices: {list(short)!s:.80} is the beginning of {list(long)!s:.80}, so that nothing says where it "
                "ends; end each with the end token"
            )


def cut_choices(choices: Choices | None, room: int) -> Choices | None:
    """What can be said of each within `room` tokens; the same tokens are drawn, with the same probabilities."""
    return None if choices is None else tuple(dict.fromkeys(choice[:room] for choice in choices))


def following(choices: Choices, said: Sequence[int]) -> IntArray:
    """Ids that may come next, ascending."""
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
