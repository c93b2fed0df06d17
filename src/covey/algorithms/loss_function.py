"""Loss functions: each returns the loss of every token, and where it limited the ratio.

    @loss(aggregation="token_mean")
    def mine(x: LossInputs, cap: float = 5.0) -> Surrogate:
        high = x.ratio > cap
        ratio = x.xp.where(high, x.xp.full_like(x.ratio, cap), x.ratio)
        return Surrogate(-ratio * x.advantages, high=high)

The parameters after the first, with their defaults, are the loss's own. The function uses the array API (`x.xp`), so it
runs on NumPy, on torch under autograd, and on JAX under `jit` and `grad`. It gets some rows of a step and may mix the
tokens of a row, but not of several rows. A `select` function sees the whole step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace

from covey.algorithms.aggregation import AGGREGATORS
from covey.algorithms.arrays import Array, bounded_exp, locked, lookup
from covey.errors import ConfigError, naming


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """The tokens of some rows of a step, `[N, T]` each, 0 where masked.

    Attributes:
        logp: log-probabilities under the current policy; the loss is differentiated through them.
        old: log-probabilities that the ratio compares with, constants.
        advantages: of the tokens.
        mask: True where a token is trained on.
        entropy: of the policy, in nats; None if it was not computed. It is a constant unless the loss or the run
            differentiates it.
        sampler: log-probabilities that the sampler recorded. They equal `old` unless there is a `correction`.
        correction: factors `[N, T]` or `[N, 1]` from the sampler to `old`, or None. The losses are multiplied by them
            afterwards, unless the loss `corrects` itself.
        selected: what the loss's `select` chose in the whole step; None for a loss without `select`.
    """

    logp: Array
    old: Array
    advantages: Array
    mask: Array
    entropy: Array = None
    sampler: Array = None
    correction: Array = None
    selected: Array = None

    @property
    def xp(self) -> Any:
        """The namespace of the arrays' library, as the array API defines it."""
        return array_namespace(self.logp)

    @property
    def log_ratio(self) -> Array:
        """`logp - old`."""
        return self.logp - self.old

    @property
    def ratio(self) -> Array:
        """`exp(logp - old)`, at most e^20; 1 where masked."""
        return bounded_exp(self.log_ratio)


class Surrogate(NamedTuple):
    """The result of a loss, `[N, T]` each.

    Attributes:
        loss: of each token, to be minimised.
        low: True where the loss limited the ratio from below; None = nowhere.
        high: True where the loss limited the ratio from above; None = nowhere.
        ratio: for the metrics; None = the ratio of the token.
    """

    loss: Array
    low: Array = None
    high: Array = None
    ratio: Array = None


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss function with its properties; it is hashable, and called like the function.

    Attributes:
        function: `f(x, **parameters) -> Surrogate`.
        aggregation: name in `AGGREGATORS` of the average over the step's token losses; used through `token_weights`.
        kl_aggregation: the same for the KL term, over all sampled tokens, masked or not; None = the KL has the masks
            and weights of the losses.
        select: `f(x, **parameters) -> [N, T]` booleans, called on the *whole* step with the current policy. The loss
            finds the booleans of its rows in `x.selected`. This costs a forward pass.
        entropy: True if the loss is differentiated through `x.entropy`.
        always: True if tokens of advantage 0 have a loss too. Otherwise rows without advantage are left out.
        corrects: True if the loss applies `x.correction` itself.
        name: for messages: `grpo`, or `my_loss.py:gmpo`.
    """

    function: Callable[..., Surrogate]
    aggregation: str = "sequence_mean"
    kl_aggregation: str | None = None
    select: Callable[..., Array] | None = None
    entropy: bool = False
    always: bool = False
    corrects: bool = False
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        lookup(AGGREGATORS, self.aggregation, "aggregation")
        lookup(AGGREGATORS, self.kl_aggregation or self.aggregation, "kl_aggregation")

    def __call__(self, x: LossInputs, *args: Any, **parameters: Any) -> Surrogate:
        return self.function(x, *args, **parameters)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The loss's own parameters with their defaults; `inspect.Parameter.empty` for a required one."""
        return _parameters(self.function)

    def surrogate(self, x: LossInputs, parameters: Mapping[str, Any]) -> Surrogate:
        """Call the loss and check its result; all four arrays are set.

        Raises `ConfigError`: the result is not a `Surrogate` of `[N, T]` arrays; the message names file and function.
        """
        with self._naming(""):
            found: Any = self.function(x, **parameters)
        if not isinstance(found, tuple) or not 1 <= len(found) <= 4:
            raise self.fault(f"returned {type(found).__name__}", "return Surrogate(loss, low, high), [N, T] each")
        loss, low, high, ratio = Surrogate(*found)
        never = x.xp.zeros_like(x.mask)
        low, high = (never if limited is None else limited for limited in (low, high))
        ratio = x.ratio if ratio is None else ratio
        for what, array in (("loss", loss), ("low", low), ("high", high), ("ratio", ratio)):
            shape = getattr(array, "shape", None)
            if shape != x.logp.shape:
                given = type(array).__name__ if shape is None else f"shape {tuple(shape)}"
                raise self.fault(f"returned {what} of {given}", f"return [N, T], here {tuple(x.logp.shape)}")
        if not all(x.xp.isdtype(limited.dtype, "bool") for limited in (low, high)):
            raise self.fault("returned low or high that are not booleans", "say for each token whether it was limited")
        return Surrogate(loss, low, high, ratio)

    def choose(self, x: LossInputs, parameters: Mapping[str, Any]) -> Array:
        """The choice of `select` in a whole step, `[N, T]` booleans; it gets the parameters that it names."""
        assert self.select is not None
        given = {**self.parameters, **parameters}
        with self._naming("its select "):
            return self.select(x, **{name: given[name] for name in _parameters(self.select)})

    def fault(self, problem: str, fix: str) -> ConfigError:
        """The error for a loss with a wrong result."""
        return ConfigError(f"{self._words} {problem}; {fix}")

    @property
    def _words(self) -> str:
        code = inspect.unwrap(self.function)
        place = f" ({code.__code__.co_filename}:{code.__code__.co_firstlineno})" if hasattr(code, "__code__") else ""
        return f"loss {self.name!r}{place}"

    def _naming(self, part: str) -> AbstractContextManager[None]:
        return naming(
            f"{self._words} {part}".rstrip(),
            "correct it: it gets arrays of NumPy, torch or JAX that it may not change, so use the functions of x.xp",
        )


def loss(function: Callable[..., Any] | None = None, /, **properties: Any) -> Callable[[Callable[..., Any]], Loss]:
    """`@loss` or `@loss(...)` sets properties of a loss function, see `Loss`. It is optional."""

    def declare(function: Callable[..., Any]) -> Loss:
        return Loss(function, name=getattr(function, "__name__", repr(function)), **properties)

    return declare if function is None else declare(function)  # type: ignore[return-value]


@lru_cache
def _parameters(function: Callable[..., Any]) -> Mapping[str, Any]:
    own = list(inspect.signature(function).parameters.values())[1:]
    return MappingProxyType({one.name: one.default for one in own if one.kind is not one.VAR_KEYWORD})


@lru_cache
def try_out(loss: Loss, parameters: tuple[tuple[str, Any], ...]) -> None:
    """Run a loss on a small step in NumPy, so that a mistake is found before a model is loaded.

    Raises `ConfigError`: a parameter is out of range; or the function raises, or does not return a `Surrogate` of
    finite `[N, T]` numbers.
    """
    logp = -np.resize([0.1, 0.7, 1.9, 0.4, 3.0, 1.2, 0.9], (4, 5))
    mask = np.arange(5) < np.array([[5], [3], [4], [0]])
    old = (logp - np.resize([0.3, -0.2, 0.0, 0.05], (4, 5))) * mask
    advantages = np.array([[1.5], [-0.5], [0.0], [1.0]]) * mask
    given = dict(parameters)
    x = locked(LossInputs(logp * mask, old, advantages, mask, entropy=-logp * mask, sampler=old))
    with np.errstate(all="ignore"):
        if loss.select is not None:
            selected = loss.choose(x, given)
            if getattr(selected, "shape", None) != mask.shape:
                raise loss.fault("selects something else than tokens", "return booleans [N, T] from select")
            x = replace(x, selected=selected)
        found = loss.surrogate(x, given)
    values = np.asarray(found.loss)[mask]
    if not np.isfinite(values).all():
        raise loss.fault(
            f"returned {values[~np.isfinite(values)][0]} for ordinary tokens", "correct it: losses are finite numbers"
        )
    if not loss.always and np.any(values[advantages[mask] == 0] != 0):
        raise loss.fault(
            "gives tokens of advantage 0 a loss", "declare it with @loss(always=True), or their rows are left out"
        )
