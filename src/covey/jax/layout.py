"""How many completions, and how long ones, fit into the memory for keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import Mesh

from covey.errors import GenerationError
from covey.jax.packing import size_up
from covey.jax.sharding import DATA

_CHUNK, _CHUNKS = 64, 8
"""A prompt is run in chunks of so many tokens, or in so many chunks where that is longer."""
_FEWEST = 8
"""Slots below which shrinking does not pay."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Slots of a cache, each for so many positions, and what prompts need of them."""

    slots: int
    positions: int
    prompt: int

    @property
    def chunk(self) -> int:
        """Tokens of a prompt that are run at once."""
        return min(self.prompt, max(_CHUNK, self.prompt // _CHUNKS))

    def rungs(self, spread: int = 1) -> list[int]:
        """Numbers of slots that may be left when others have finished, the largest first."""
        found, slots = [], self.slots
        while slots % 2 == 0 and slots // 2 >= _FEWEST and slots // 2 % spread == 0:
            slots //= 2
            found.append(slots)
        return found

    @classmethod
    def of(
        cls, rows: int, prompt: int, length: int, bytes_per_token: int, budget: int, mesh: Mesh | None
    ) -> CacheLayout:
        """Slots for `rows` completions of `length` tokens, of which `prompt` are given, rounded up to few sizes; fewer
        rows if memory does not suffice.

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
        slots = size_up(rows, first=1)
        while slots > fitting:
            slots = size_up(slots // 2, first=1)
        return cls(-(-slots // spread) * spread, positions, min(size_up(prompt), positions))
