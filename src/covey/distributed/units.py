"""Units of sampling: some groups that are sampled in one call, alone, so that their numbers depend on nothing else.

The log-probabilities of a completion change in their last digits with what is sampled beside it, and about one draw in
a thousand with them. So what is beside it is settled by the requests alone, before anybody knows who will sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from covey.distributed.pool import Piece
from covey.types import Completion, Request, SamplingSettings


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Requests that are sampled in one call."""

    first: int
    requests: tuple[Request, ...]

    @property
    def longest_prompt(self) -> int:
        """In tokens."""
        return max(len(request.token_ids) for request in self.requests)


@dataclass(slots=True, eq=False)
class Job(Piece):
    """A unit under way; its `result` is the completions."""

    requests: Sequence[Request]
    settings: SamplingSettings
    version: int
    key: str = ""
    result: list[Completion] | None = field(default=None, kw_only=True)


def make_units(requests: Sequence[Request], size: int) -> list[Unit]:
    """Cut requests into units: whole groups in order, until they have at least `size` completions."""
    starts = [0] if requests else []
    for place, (before, request) in enumerate(pairwise(requests), start=1):
        same = before.token_ids is request.token_ids or np.array_equal(before.token_ids, request.token_ids)
        if not same and place - starts[-1] >= size:
            starts.append(place)
    return [Unit(start, tuple(requests[start:end])) for start, end in pairwise([*starts, len(requests)])]


def unit_key(requests: Sequence[Request], settings: SamplingSettings, weights: str) -> str:
    """SHA-256 of all that the completions depend on: requests, settings, and `weights`, the hash of the weights."""
    digest = hashlib.sha256(f"{weights}\n{settings!r}\n".encode())
    for request in requests:
        ids = np.ascontiguousarray(request.token_ids, "<i8")
        digest.update(f"{len(ids)} {tuple(map(int, request.stream))} {request.choices!r}\n".encode())
        digest.update(ids.tobytes())
    return digest.hexdigest()
