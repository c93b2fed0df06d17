"""Keys and values along the path from a tree's root to the piece that is being computed, with their gradients.

A tree that is larger than the budget is walked: a piece that others follow (a trunk) leaves its keys and values here,
and those that follow attend to them. Backward runs in reverse: each piece adds the gradients of what it attended to,
and the trunk takes what its followers left for it. Pieces beside each other use the same places one after another, so
memory is that of the longest path.

    forward of a trunk of m tokens after n           reads [:n], writes keys and values [n:n+m]
    forward of what follows it                       reads [:n+m]
    backward of what follows it                      adds to the gradients [:n+m]
    backward of the trunk                            takes the gradients [n:n+m] and clears them; adds to [:n]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class _Layer:
    keys: Tensor  # [capacity, Hkv, D]
    values: Tensor  # [capacity, Hkv, Dv]
    gradients: tuple[Tensor, Tensor] | None = None  # float32 or wider: many are added


class TreePath:
    """Buffers of one layer after another, made when a trunk first writes.

    Args:
        capacity: tokens of the longest path.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._layers: dict[int, _Layer] = {}

    def read(self, layer: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[stop, Hkv, D]` of the first tokens, views."""
        held = self._layers[layer]
        return held.keys[:stop], held.values[:stop]

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Keep the keys and values `[m, Hkv, D]` of the tokens from `start` on.

        Raises:
            ValueError: they do not fit.
        """
        stop = start + len(keys)
        if stop > self.capacity:
            raise ValueError(f"{stop} tokens on a path of capacity {self.capacity}: make it as long as the longest one")
        if layer not in self._layers:
            self._layers[layer] = _Layer(
                keys.new_empty(self.capacity, *keys.shape[1:]), values.new_empty(self.capacity, *values.shape[1:])
            )
        held = self._layers[layer]
        held.keys[start:stop], held.values[start:stop] = keys, values

    def gradients(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The gradients `[stop - start, Hkv, D]` of the keys and values of these tokens so far, to be added to."""
        held = self._layers[layer]
        if held.gradients is None:
            wide = torch.promote_types(held.keys.dtype, torch.float32)
            held.gradients = torch.zeros_like(held.keys, dtype=wide), torch.zeros_like(held.values, dtype=wide)
        keys, values = held.gradients
        return keys[start:stop], values[start:stop]


class Paths:
    """The paths of one walk: the policy's, and its reference's where both are run.

    Args:
        capacity: tokens of the longest path.
    """

    def __init__(self, capacity: int) -> None:
        self.own, self.reference = TreePath(capacity), TreePath(capacity)
