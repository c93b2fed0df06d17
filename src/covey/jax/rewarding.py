"""From sampled ids to rewards: a Python function outside of the compiled code, or a JAX function inside it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from covey.algorithms import create_sampling_mask
from covey.errors import ConfigError, RewardError
from covey.jax.grpo_config import GRPOConfig
from covey.rollout.calls import as_list, describe_error, read_rewards

Decode = Callable[[list[int]], str]
"""Token ids to text, for example `tokenizer.decode`."""

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "_covey_jax_reward"


def jax_reward(function: F) -> F:
    """Mark a reward function written in JAX, which is then compiled into the step.

    It is called as `f(responses, mask, **columns)`: `responses` `[R, T]` are ids, `mask` `[R, T]` is True on sampled
    tokens. It gets the columns that it names, with one row for each response, also `prompts` `[R, P]` and
    `prompt_lengths` `[R]`. It returns `[R]` floats, NaN where a response cannot be scored.
    """
    setattr(function, _MARK, True)
    return function


def is_jax_reward(function: Any) -> bool:
    return bool(getattr(function, _MARK, False))


def call_jax_reward(function: Any, responses: Any, mask: Any, columns: Mapping[str, Any]) -> Any:
    """Its rewards `[R]`. Raises RewardError: it returned another shape."""
    rewards = function(responses, mask, **_accepted(function, columns))
    if getattr(rewards, "shape", None) != (responses.shape[0],):
        shape, name = getattr(rewards, "shape", type(rewards).__name__), _name(function)
        told = f"reward function {name!r} returned {shape} for {responses.shape[0]} responses; it must return an array"
        raise RewardError(f"{told} of shape ({responses.shape[0]},), one reward for each", function=name)
    return rewards


class HostRewards:
    """Calls a Python reward function on responses as text, or as lists of ids where there is no `decode`.

    Signatures: `f(responses)`; TRL's `f(prompts, completions, **columns)`, each argument where it is named; or a
    verifier's `batch_verify([(prompt, response), ...])`. Entries of the returned list are numbers or None.
    """

    def __init__(self, function: Any, config: GRPOConfig, decode: Decode | None) -> None:
        if not callable(function) and not hasattr(function, "batch_verify"):
            raise ConfigError(f"reward_fn={function!r}: cannot be called; pass a function or a verifier")
        if config.validity_min_length is not None and decode is None:
            raise ConfigError("validity_min_length: validity is judged on text; pass decode=tokenizer.decode")
        self.function, self.name = function, _name(function)
        if decode is None and _wants_text(function):
            raise ConfigError(
                f"reward_fn={self.name!r}: it takes texts, and without decode= it would get token ids; pass "
                "decode=tokenizer.decode, or name completion_ids in it"
            )
        self.config, self.decode = config, decode

    def __call__(
        self,
        prompts: NDArray[Any],
        lengths: NDArray[Any],
        responses: NDArray[Any],
        mask: NDArray[Any],
        columns: Mapping[str, Sequence[Any]],
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Rewards `[R]`, NaN for None, and what `validity_mask` keeps `[R]`. Arguments have one row a response.

        Raises RewardError: the function raised, or returned anything but one finite number or None for each response.
        """
        asked = [self._content(row[:length]) for row, length in zip(prompts, lengths, strict=True)]
        said = [self._content(self._without_end(row[kept])) for row, kept in zip(responses, mask, strict=True)]
        try:
            returned = as_list(self._call(asked, said, responses, mask, columns), len(said))
        except RewardError as error:
            raise RewardError(f"reward function {self.name!r}: {error}", function=self.name) from error
        except (Exception, SystemExit) as error:
            hint = " (responses are lists of token ids here: pass decode= for texts)" if self.decode is None else ""
            raise RewardError(
                f"reward function {self.name!r} raised {describe_error(error)} for {len(said)} responses; correct it, "
                f"or return None for a response that it cannot score{hint}",
                function=self.name,
            ) from error
        groups = [str(index // self.config.num_samples_per_prompt) for index in range(len(said))]
        rewards = read_rewards(self.name, returned, groups)
        valid = np.ones(len(said), np.bool_)
        if self.config.validity_min_length is not None:
            valid = create_sampling_mask(said, min_length=self.config.validity_min_length)
        return rewards, valid

    def _call(
        self, asked: list[Any], said: list[Any], responses: NDArray[Any], mask: NDArray[Any], columns: Mapping[str, Any]
    ) -> Any:
        if hasattr(self.function, "batch_verify"):
            return self.function.batch_verify(list(zip(asked, said, strict=True)))
        ids = [row[kept].tolist() for row, kept in zip(responses, mask, strict=True)]
        named = _accepted(self.function, {**columns, "prompts": asked, "completions": said, "completion_ids": ids})
        if "completions" in named:
            return self.function(**named)
        return self.function(said, **_accepted(self.function, columns))

    def _content(self, ids: NDArray[Any]) -> Any:
        listed = [(int if self.decode else _Id)(token) for token in ids]
        return listed if self.decode is None else self.decode(listed)

    def _without_end(self, ids: NDArray[Any]) -> NDArray[Any]:
        ended = self.decode is not None and len(ids) > 0 and int(ids[-1]) in self.config.eos_token_ids
        return ids[:-1] if ended else ids


class _Id(int):
    """A token id that no text equals in silence, as in `"7" in response`."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            raise TypeError(f"the text {other!r:.40} is compared with a token id")
        return int(self) == other


def _wants_text(function: Any) -> bool:
    """Whether a reward function says, by its names or the hint of its first argument, that it takes texts."""
    code = getattr(function, "__code__", None) or getattr(vars(type(function)).get("__call__"), "__code__", None)
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()
    hint = str(next(iter(getattr(function, "__annotations__", {}).values()), ""))
    told = "completions" in named or hasattr(function, "batch_verify") or "str" in hint
    return told and "completion_ids" not in named


def _accepted(function: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Those columns that a function names, all of them with `**`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built in, without a signature
        return {}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(columns)
    names = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    return {name: value for name, value in columns.items() if name in names}


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
