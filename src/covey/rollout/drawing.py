"""How tokens are drawn: which settings describe a distribution, random streams, choices among sequences, stop strings.

Random numbers are counter-based: number t of a completion is a function of its stream and t, and of nothing else.

    stream (seed, step, prompt, sample) --hash--> 64-bit key;    u_t = splitmix64(key + (t + 1) * gamma) / 2^64

That is the SplitMix64 generator (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") seeded with
the key and addressed by position. No state is kept, so neither the batch around a completion nor the order in which
completions are admitted can change what it draws. The numbers are statistical, not cryptographic.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.errors import ConfigError, GenerationError
from covey.types import IntArray, SamplingSettings


def check_settings(settings: SamplingSettings) -> None:
    """Refuse settings that describe no distribution. Raises `ConfigError`: naming the setting."""
    rules = (
        ("temperature", settings.temperature >= 0, "it divides the logits; use 0 for greedy, 1 for the model's own"),
        ("top_k", settings.top_k >= 0, "it counts tokens; use 0 to keep all"),
        ("top_p", 0 < settings.top_p <= 1, "it is a probability; use 1.0 to keep all"),
        ("min_p", 0 <= settings.min_p <= 1, "it is a fraction of the top probability; use 0.0 to keep all"),
        ("max_tokens", settings.max_tokens >= 1, "a completion has at least one token; use 1 or more"),
        ("stop_strings", all(settings.stop_strings), "every text contains the empty string; remove it"),
    )
    for name, holds, why in rules:
        if not holds:
            raise ConfigError(f"{name}={getattr(settings, name)!r}: {why}")


_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Of adapters, that vLLM makes room for."""


def drawing(settings: SamplingSettings) -> dict[str, Any]:
    """How tokens are drawn, by vLLM's names. Stop strings stay in the completion, as Covey's own engine leaves them."""
    return {
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        **settings.cut,
        "top_k": settings.top_k or -1,
        "stop": list(settings.stop_strings),
        "stop_token_ids": list(settings.eos_token_ids),
        "ignore_eos": not settings.eos_token_ids,
        "include_stop_str_in_output": True,
        "logprobs": 0,  # of the sampled tokens alone
    }


def room_for_rank(rank: int) -> int:
    """The `max_lora_rank` of vLLM for an adapter of this rank.

    Raises `ConfigError`: it is larger than any that vLLM takes.
    """
    room = next((size for size in _RANKS if size >= rank), None)
    if room is None:
        raise ConfigError(f"model.lora_r={rank}: vLLM takes up to {_RANKS[-1]}; set a smaller one")
    return room


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


Choices = tuple[tuple[int, ...], ...]


def check_choices(choices: Choices, settings: SamplingSettings, room: int) -> None:
    """Refuse sequences of which one could not be said whole. Raises `GenerationError`: naming what is in the way."""
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


_LONGEST_CHARACTER = 8
"""Tokens that an unfinished character may have: UTF-8's have at most four bytes, so text after these is settled."""


class StopMatcher:
    """Watches one completion. `push` each token; it answers True once the text contains a stop string.

    Special tokens count as text, so that a marker such as `<|im_end|>` can be a stop string. Tokens do not map to text
    one by one: a character may need several, and some tokenizers drop the space before the first token. So the text of
    a new token is the *difference* of two decodings that start at the same earlier token, and text that ends in U+FFFD
    (an unfinished character) waits for the tokens that finish it.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = tuple(stop_strings)
        self._overlap = max(map(len, self._stop_strings)) - 1
        self._ids: list[int] = []
        self._window = 0  # where both decodings start
        self._settled = 0  # tokens before this one have contributed their text
        self._tail = ""  # the last characters of the settled text: a stop string may begin there

    def push(self, token_id: int) -> bool:
        """Add the next token; True if the completion's text now contains a stop string."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._window : self._settled])
        after = self._decode(self._ids[self._window :])
        text = self._tail + after[len(before) :]
        if before and after == before:  # an id without a text: a window of these alone would lose the next one's space
            del self._ids[self._settled :]
        elif not after.endswith("\ufffd") or len(self._ids) - self._settled >= _LONGEST_CHARACTER:
            self._tail = text[len(text) - self._overlap :] if self._overlap < len(text) else text
            del self._ids[: self._window]
            self._window, self._settled = self._settled - self._window, len(self._ids)
        return any(stop in text for stop in self._stop_strings)

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
