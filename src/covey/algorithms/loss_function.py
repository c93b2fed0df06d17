"""What a loss is: a function of one value, which says for each token what is minimised and where it limited the ratio.

    @loss(aggregation="token_mean")
    def mine(x: LossInputs, cap: float = 5.0) -> Surrogate:
        high = x.ratio > cap
        ratio = x.xp.where(high, x.xp.full_like(x.ratio, cap), x.ratio)
        return Surrogate(-ratio * x.advantages, high=high)

The parameters after the first are the loss's own, and their defaults stand there. It is written once over the array API
(`x.xp`) and runs on NumPy, on torch under autograd and on JAX under `jit` and `grad`, for any part of a step's rows:
it may mix the tokens of a row, never those of several rows. What has to be known of the whole step is a `select`.
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
        old: those under the policy that ratio and clip start from, constants.
        advantages: of the tokens.
        mask: True where a token is trained on.
        entropy: of the policy in nats, None where nobody computed it; a constant unless the loss or the run says
            that it is differentiated.
        sampler: log-probabilities that the sampler recorded. They are `old`, unless there is a `correction`.
        correction: factors `[N, T]` or `[N, 1]` that lead from the sampler to `old`, None without. The losses are
            multiplied by them afterwards unless the loss `corrects` itself.
        selected: what the loss's `select` chose in the whole step, None for a loss without.
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
        """The functions of the arrays' library under the names of the array API."""
        return array_namespace(self.logp)

    @property
    def log_ratio(self) -> Array:
        """`logp - old`."""
        return self.logp - self.old

    @property
    def ratio(self) -> Array:
        """`exp(logp - old)`, held at e^20; 1 where masked."""
        return bounded_exp(self.log_ratio)


class Surrogate(NamedTuple):
    """What a loss returns, `[N, T]` each.

    Attributes:
        loss: of each token, to be minimised.
        low: where the loss limited the ratio from below; None = nowhere.
        high: where it limited it from above; None = nowhere.
        ratio: for the metrics, where it is not that of the token.
    """

    loss: Array
    low: Array = None
    high: Array = None
    ratio: Array = None


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss function with what has to be known about it; hashable, and called like the function.

    Attributes:
        function: `f(x, **parameters) -> Surrogate`.
        aggregation: name in `AGGREGATORS`: the average over the step that its tokens' losses get.
        kl_aggregation: the same for the KL term, which masks then leave alone; None = as the losses.
        select: `f(x, **parameters) -> [N, T]` booleans, on the *whole* step before it is split, under the policy that
            it is about to move; the loss finds its rows of them in `x.selected`. Costs a forward pass.
        entropy: True when the loss is differentiated through `x.entropy`.
        always: True when a token of advantage 0 has a loss too. Rows without advantage are else left out.
        corrects: True when the loss applies `x.correction` itself.
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
        """Its own parameters with their defaults, `inspect.Parameter.empty` for one that has to be given."""
        return _parameters(self.function)

    def surrogate(self, x: LossInputs, parameters: Mapping[str, Any]) -> Surrogate:
        """Call the loss and check what it returns; all four arrays are there.

        Raises:
            ConfigError: it returned something else; the message names file and function.
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
        """What `select` chooses in a whole step, `[N, T]` booleans; it gets the parameters that it names."""
        assert self.select is not None
        given = {**self.parameters, **parameters}
        with self._naming("its select "):
            return self.select(x, **{name: given[name] for name in _parameters(self.select)})

    def fault(self, problem: str, fix: str) -> ConfigError:
        """The error for a loss that does not do what a loss does."""
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


def loss(
    function: Callable[..., Any] | None = None,
    /,
    *,
    aggregation: str = "sequence_mean",
    kl_aggregation: str | None = None,
    select: Callable[..., Array] | None = None,
    entropy: bool = False,
    always: bool = False,
    corrects: bool = False,
) -> Callable[[Callable[..., Any]], Loss]:
    """`@loss` or `@loss(...)`: say what has to be known about a loss function, see `Loss`. Others need no decorator."""

    def declare(function: Callable[..., Any]) -> Loss:
        name = getattr(function, "__name__", repr(function))
        return Loss(function, aggregation, kl_aggregation, select, entropy, always, corrects, name)

    return declare if function is None else declare(function)  # type: ignore[return-value]


@lru_cache
def _parameters(function: Callable[..., Any]) -> Mapping[str, Any]:
    own = list(inspect.signature(function).parameters.values())[1:]
    return MappingProxyType({one.name: one.default for one in own if one.kind is not one.VAR_KEYWORD})


@lru_cache
def try_out(loss: Loss, parameters: tuple[tuple[str, Any], ...]) -> None:
    """Run a loss on a small step in NumPy, so that a mistake is found before a model is loaded.

    Raises:
        ConfigError: a parameter out of range, or the function raises, returns something else than a `Surrogate` of
            `[N, T]`, or numbers that are not finite.
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
