"""Counter-based random numbers: number t of a completion is a function of its stream and t, and of nothing
else.

    stream (seed, step, prompt, sample) --hash--> 64-bit key;    u_t = splitmix64(key + (t + 1) * gamma) /
    2^64

That is the SplitMix64 generator (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators")
seeded with the key and addressed by position. No state is kept, so neither the batch around a completion nor
the order in which completions are admitted can change what it draws. The numbers are statistical, not
cryptographic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def stream_key(stream: Sequence[int]) -> int:
    """Hash a stream tuple to 64 bits. Order and length matter; integers of any size and sign are allowed."""
    key = _mix(len(stream))
    for part in stream:
        value = int(part)
        words = [value & _MASK]
        while not -(1 << 63) <= value < 1 << 64:
            value >>= 64
            words.append(value & _MASK)
        for word in words:
            key = _mix(key ^ _mix((word + _GAMMA) & _MASK))
    return key


def uniforms(keys: NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.float64]:
    """`[B]` numbers in [0, 1), multiples of 2^-53, for `[B]` keys at `[B]` positions."""
    with np.errstate(over="ignore"):
        z = keys + (counters + np.uint64(1)) * np.uint64(_GAMMA)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    mantissa: NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64)
    return mantissa * 2.0**-53


def _mix(z: int) -> int:
    z = (z + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
