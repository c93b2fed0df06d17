"""How many completions, and how long ones, fit into the memory for keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import Mesh

from covey.errors import GenerationError
from covey.jax.packing import members, size_up
from covey.jax.sharding import DATA


@dataclass(frozen=True, slots=True)
class Room:
    """Slots of a cache, each for so many positions."""

    slots: int
    positions: int

    @classmethod
    def of(cls, rows: int, length: int, bytes_per_token: int, budget: int, mesh: Mesh | None) -> Room:
        """Room for `rows` completions of `length` tokens with their prompts, rounded up to one of few sizes; fewer rows
        if memory does not suffice.

        Raises:
            GenerationError: not even one fits.
        """
        positions = size_up(length)
        fitting = budget // (positions * bytes_per_token)
        spread = 1 if mesh is None else int(mesh.shape.get(DATA, 1))
        if fitting < spread:
            raise GenerationError(
                f"kv_cache_gb={budget / 2**30:.3g}: a completion of {positions} tokens with its prompt needs "
                f"{positions * bytes_per_token / 2**30:.3g} GiB; raise sampling.kv_cache_gb, or lower "
                "sampling.max_completion_length"
            )
        slots = members(rows)
        while slots > fitting:
            slots = members(slots // 2)
        return cls(-(-slots // spread) * spread, positions)
