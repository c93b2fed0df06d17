"""Fields of OpenAI's and vLLM's requests that this server does not serve: never ignored.

A value that asks for nothing (OpenAI's default, or null) is let through; every other one is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from covey.errors import CoveyError


class RequestError(CoveyError, ValueError):
    """A request asks for what this server does not do, or is not one."""


_SAMPLING = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (True,),
    "skip_special_tokens": (True,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
}
_NEUTRAL: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "CompletionRequest": _SAMPLING | {"echo": (False,), "suffix": ("",), "add_special_tokens": (True,)},
    "ChatRequest": _SAMPLING
    | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True,),
        "functions": ([],),
        "top_logprobs": (0,),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": ("medium",),
        "web_search_options": (),
        "documents": ([],),
        "chat_template": (),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
    },
}


def without_neutral(kind: str, given: Mapping[str, Any], served: Iterable[str]) -> dict[str, Any]:
    """What is left of a request when everything that asks for nothing is taken out.

    Raises:
        RequestError: it has a field that is not served.
    """
    left = {name: value for name, value in given.items() if value is not None}
    _check_best_of(left)
    served = set(served)
    for name in [name for name in left if name not in served]:
        neutral = _NEUTRAL[kind].get(name)
        if neutral is None:
            raise RequestError(f"{name:.80}: this server knows no such field; remove it")
        value = left.pop(name)
        if not any(_same(value, one) for one in neutral):
            instead = " or ".join(repr(one) for one in neutral)
            raise RequestError(
                f"{name}={value!r:.80}: this server does not serve it; leave it out{instead and f' or send {instead}'}"
            )
    return left


def _check_best_of(left: dict[str, Any]) -> None:
    """`best_of` equal to `n` chooses nothing."""
    best_of = left.pop("best_of", None)
    if best_of is not None and not _same(best_of, left.get("n", 1)):
        raise RequestError(f"best_of={best_of!r:.80}: this server returns all that it samples; leave it out, or send n")


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and not by Python's 0 == False."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
