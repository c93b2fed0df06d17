"""What vLLM is asked for, whether it runs in this process or behind HTTP: how tokens are drawn, room for an adapter."""

from __future__ import annotations

from typing import Any

from covey.errors import ConfigError
from covey.types import SamplingSettings

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

    Raises:
        ConfigError: it is larger than any that vLLM takes.
    """
    room = next((size for size in _RANKS if size >= rank), None)
    if room is None:
        raise ConfigError(f"model.lora_r={rank}: vLLM takes up to {_RANKS[-1]}; set a smaller one")
    return room
