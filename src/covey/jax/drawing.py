"""From logits to tokens, inside compiled functions: temperature, what may be drawn, the inverse CDF, and the loop.

A token is drawn by inverting its row's cumulative distribution at one given number u, as in `covey.pytorch`: equal
random streams draw equal tokens in both backends, but for a rounding now and then. The CDF is taken in two levels,
blocks of 256 probabilities and then inside the chosen one: a running sum over a whole vocabulary is slow and inexact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from covey.algorithms import restrict_to_support

_BLOCK = 256


class SamplingParams(NamedTuple):
    """How tokens are drawn: that part of `SamplingSettings` that programs are compiled for."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    keep_support: bool
    eos_token_ids: tuple[int, ...]

    @property
    def cuts(self) -> bool:
        """True when some tokens may be out of reach."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def records_support(self) -> bool:
        """True when what could be drawn is returned."""
        return self.keep_support and self.cuts

    def ends(self, tokens: jax.Array) -> jax.Array:
        """Whether each of `[...]` tokens is one of the `eos_token_ids`."""
        return jnp.any(tokens[..., None] == jnp.asarray(self.eos_token_ids, jnp.int32), axis=-1)


class Draw(NamedTuple):
    """For each of B rows: a token, its log-probability, and bits `[B, ceil(V / 8)]` of what could be drawn."""

    tokens: jax.Array
    logprobs: jax.Array
    support: jax.Array | None


def draw(logits: jax.Array, u: jax.Array, sampling: SamplingParams, allowed: jax.Array | None = None) -> Draw:
    """One token for each row of logits `[B, V]` at the numbers `u` `[B]` in [0, 1).

    Greedy (`temperature` 0) takes the likeliest token of the distribution at temperature 1. With `keep_support` the
    log-probability is that among the tokens that were kept. `allowed` are bits of the only tokens there are.
    """
    if allowed is not None:
        logits = jnp.where(_unpacked(allowed, logits.shape[1]), logits, -jnp.inf)
    greedy = sampling.temperature == 0
    logp = log_probabilities(logits, sampling.temperature or 1.0)
    support = kept(logp, sampling)
    limited = logp if support is None else jnp.where(support, logp, -jnp.inf)
    tokens = jnp.argmax(limited, axis=-1) if greedy else invert(jnp.exp(limited), u)
    told = limited if support is None or not sampling.keep_support else restrict_to_support(logp, support)
    at = tokens[:, None]
    chosen = jnp.take_along_axis(told, at, axis=1)[:, 0]
    # A token at the very edge of what min_p keeps may be kept in one copy of the comparison and not in the other.
    chosen = jnp.where(chosen == -jnp.inf, jnp.take_along_axis(logp, at, axis=1)[:, 0], chosen)
    bits = None
    if sampling.records_support:
        bits = jnp.packbits(jnp.ones(logp.shape, bool) if support is None else support, axis=-1)
    return Draw(tokens.astype(jnp.int32), chosen, bits)


class Decoded(NamedTuple):
    """Up to C tokens for each of R rows, of which `steps` columns were filled.

    Attributes:
        state: the new one, such as a cache.
        tokens: `[R, C]`, -1 where a row rested.
        logprobs: `[R, C]`.
        support: `[R, C, ceil(V / 8)]`, or None.
        steps: scalar.
    """

    state: Any
    tokens: jax.Array
    logprobs: jax.Array
    support: jax.Array | None
    steps: jax.Array


Advance = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""`(tokens [R], positions [R], state) -> (logits [R, V] of what follows, state)`."""


def decode(
    advance: Advance,
    state: Any,
    token: jax.Array,
    position: jax.Array,
    budget: jax.Array,
    u: jax.Array,
    sampling: SamplingParams,
    *,
    beyond: int,
    vocabulary: int,
    until: jax.Array | int = 0,
    allowed: jax.Array | None = None,
) -> Decoded:
    """Run `token` `[R]` at `position` `[R]`, draw the next, and so on, C times at most.

    Args:
        advance: runs the model.
        state: what it begins with.
        token: drawn last, not run yet.
        position: where it belongs.
        budget: `[R]` tokens that each row may still draw; 0 = none: it rests.
        u: `[R, C]` a random number for each token.
        sampling: how tokens are drawn; a row rests after one of the `eos_token_ids`.
        beyond: the position of rows that rest, where `advance` writes nothing.
        vocabulary: V.
        until: stop when no more than so many rows go on.
        allowed: bits of the only tokens there are, for C = 1.
    """
    rows, chunk = u.shape
    bits = -(-vocabulary // 8) if sampling.records_support else 0

    def goes_on(carry: Any) -> jax.Array:
        t, budget = carry[0], carry[4]
        return (t < chunk) & (jnp.sum(budget > 0) > until)

    def step(carry: Any) -> Any:
        t, state, token, position, budget, tokens, logprobs, support = carry
        active = budget > 0
        logits, state = advance(token, jnp.where(active, position, beyond), state)
        drawn = draw(logits, u[:, t], sampling, allowed)
        tokens = tokens.at[:, t].set(jnp.where(active, drawn.tokens, -1))
        logprobs = logprobs.at[:, t].set(drawn.logprobs)
        if bits:
            support = support.at[:, t].set(drawn.support)
        budget = jnp.where(active & ~sampling.ends(drawn.tokens), budget - 1, 0)
        return t + 1, state, drawn.tokens, position + active, budget, tokens, logprobs, support

    begin = (
        jnp.zeros((), jnp.int32),
        state,
        token,
        position,
        budget,
        jnp.full((rows, chunk), -1, jnp.int32),
        jnp.zeros((rows, chunk), u.dtype),
        jnp.zeros((rows, chunk, bits), jnp.uint8),
    )
    steps, state, _, _, _, tokens, logprobs, support = jax.lax.while_loop(goes_on, step, begin)
    return Decoded(state, tokens, logprobs, support if bits else None, steps)


def invert(mass: jax.Array, u: jax.Array) -> jax.Array:
    """`[B]` the inverse CDF of each row of non-negative `mass` `[B, V]` at `u` `[B]`; never a token of mass 0."""
    rows, width = mass.shape
    whole = -(-width // _BLOCK) * _BLOCK
    blocks = jnp.pad(mass, ((0, 0), (0, whole - width))).reshape(rows, -1, _BLOCK)
    running = jnp.cumsum(jnp.sum(blocks, axis=-1), axis=-1)
    target = u * running[:, -1]
    block = _first_above(running, target)
    before = jnp.where(block > 0, jnp.take_along_axis(running, jnp.maximum(block - 1, 0)[:, None], axis=1)[:, 0], 0.0)
    inside = jnp.cumsum(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], axis=-1)
    # Never below 0: `running` may be computed twice, rounded in two ways, and a token of mass 0 may come first.
    return block * _BLOCK + _first_above(inside, jnp.maximum(target - before, 0.0))


def _first_above(running: jax.Array, target: jax.Array) -> jax.Array:
    """`[B]` first position whose running sum exceeds the target; the last step up if rounding leaves none."""
    position = jnp.sum(running <= target[:, None], axis=-1)
    last = jnp.sum(running < running[:, -1:], axis=-1)
    return jnp.minimum(position, last)


def log_probabilities(logits: jax.Array, temperature: jax.Array | float, support: jax.Array | None = None) -> jax.Array:
    """Of `softmax(logits / temperature)`, `[..., V]`, in at least float32.

    Args:
        logits: `[..., V]`.
        temperature: above 0.
        support: `[..., ceil(V / 8)]` bits of the only tokens there are; where none is set, nothing was recorded and all
            are possible.
    """
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32)) / temperature
    if support is not None:
        keep = _unpacked(support, wide.shape[-1])
        wide = jnp.where(keep | ~jnp.any(keep, axis=-1, keepdims=True), wide, -jnp.inf)
    # Not `restrict_to_support`: the gradient of its maximum is 0 / 0 where compiled code has computed the logits twice,
    # rounded in two ways, and finds none that equals it. Here it has none.
    return jax.nn.log_softmax(wide, axis=-1)


def kept(logp: jax.Array, cuts: SamplingParams) -> jax.Array | None:
    """`[R, V]` True where top-k, then top-p, then min-p let a token be drawn; None where nothing is cut.

    Tokens are kept by their rank, not by comparing values with a threshold that is one of them: compiled code may
    compute a value twice, rounded in two ways.
    """
    size = logp.shape[-1]
    count = cuts.top_k if 0 < cuts.top_k < size else size
    support = None
    if cuts.top_p < 1 or count < size:
        ordered, ids = jax.lax.top_k(logp, size if cuts.top_p < 1 else count)
        keep = jnp.broadcast_to(jnp.arange(ordered.shape[-1]) < count, ordered.shape)
        if cuts.top_p < 1:
            probabilities = jax.nn.softmax(jnp.where(keep, ordered, -jnp.inf), axis=-1)
            before = jnp.cumsum(probabilities, axis=-1) - probabilities  # of all likelier tokens
            keep &= (before < cuts.top_p) | (jnp.arange(ordered.shape[-1]) == 0)
        support = jnp.zeros(logp.shape, bool).at[jnp.arange(logp.shape[0])[:, None], ids].set(keep)
    if cuts.min_p > 0:
        likely = logp >= jnp.max(logp, axis=-1, keepdims=True) + jnp.log(cuts.min_p)
        support = likely if support is None else support & likely
    return support


def _unpacked(bits: jax.Array, vocabulary: int) -> jax.Array:
    return jnp.unpackbits(bits, axis=-1, count=vocabulary).astype(bool)
