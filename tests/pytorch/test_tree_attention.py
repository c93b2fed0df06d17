"""Attention over packed trees against dense attention with a mask from `leave`, in float64."""

from __future__ import annotations

import numpy as np

from covey.rollout.packing import Branch

HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 4, 2, 3, 5


def forest(seed: int, *, trees: int, depth: int, past: int = 0, longest: int = 6) -> list[Branch]:
    """Branches in the order of a pack: those that leave one follow it, the last to leave first."""
    rng = np.random.default_rng(seed)
    branches: list[Branch] = []

    def grow(parent: int, at: int, deep: int) -> None:
        number, length = len(branches), int(rng.choice([1, 2, int(rng.integers(1, longest + 1))]))
        start = branches[-1].stop if branches else 0
        branches.append(Branch(start, length, parent, at))
        if deep > 1:
            count = int(rng.integers(0, 3))
            for leaves in sorted(rng.integers(1, length + 1, count).tolist(), reverse=True):
                grow(number, leaves, deep - 1)

    for _ in range(trees):
        grow(-1, int(rng.integers(0, past + 1)), depth)
    return branches
