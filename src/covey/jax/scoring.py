"""Log-probabilities of the sampled tokens of a rectangle, differentiable, a few rows of logits at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from covey.algorithms import exact_kl, exact_weighted_kl, restrict_to_support
from covey.jax.attention import shared_prefix
from covey.jax.model import ModelConfig
from covey.jax.stacked import hidden_states

VOCABULARY_KL = {"exact": exact_kl, "exact_weighted": exact_weighted_kl}
_LOGITS = 1 << 23
"""Numbers of logits that are held at once."""


class Scores(NamedTuple):
    """`[R, T]` each: log-probabilities, entropies, and the KL from the reference where one was given."""

    logp: jax.Array
    entropy: jax.Array
    kl: jax.Array | None


def predicting_states(config: ModelConfig, variables: Any, rectangle: Mapping[str, jax.Array]) -> jax.Array:
    """`[R, L + 1, d]`: what the output head reads to predict each target of a `covey.jax.packing.Rectangle`."""
    prefixes, lengths, inputs = rectangle["prefixes"], rectangle["prefix_lengths"], rectangle["inputs"]
    blocks, width = prefixes.shape
    rows, own = inputs.shape[0] // blocks, inputs.shape[1]
    tokens = jnp.concatenate([prefixes, inputs.reshape(blocks, -1)], axis=1)
    after = lengths[:, None] + jnp.tile(jnp.arange(own), rows)
    before = jnp.broadcast_to(jnp.arange(width), (blocks, width))
    attend = shared_prefix(lengths, width, rows, config.sliding_window)
    x = hidden_states(config, variables, tokens, jnp.concatenate([before, after], axis=1), attend)
    last = jnp.repeat(x[jnp.arange(blocks), lengths - 1], rows, axis=0)[:, None]
    return jnp.concatenate([last, x[:, width:].reshape(blocks * rows, own, x.shape[2])], axis=1)


def output_head(config: ModelConfig, params: Mapping[str, Any]) -> jax.Array:
    """`[d, V]`."""
    return params["embedding"].T if config.tie_embeddings else params["head"]


def score(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    temperature: jax.Array | float,
    *,
    support: jax.Array | None = None,
    reference: tuple[jax.Array, jax.Array] | None = None,
    kl_estimator: str = "exact",
) -> Scores:
    """Log-probabilities of targets under `softmax(hidden · head / temperature)`, and entropies.

    Logits exist for a part of the tokens at a time; the backward pass computes them again.

    Args:
        hidden: `[R, T, d]`.
        head: `[d, V]`.
        targets: `[R, T]`.
        temperature: that the tokens were sampled at.
        support: `[R, T, ceil(V / 8)]` bits; probabilities are then those among these tokens.
        reference: hidden states and head of the reference, for a KL over the vocabulary.
        kl_estimator: `exact` or `exact_weighted`.
    """
    rows, width, size = hidden.shape
    vocabulary = head.shape[1]

    def part(at: Mapping[str, jax.Array]) -> Scores:
        keep = None
        if support is not None:
            bits = jnp.unpackbits(at["support"], axis=-1, count=vocabulary).astype(bool)
            keep = bits | ~jnp.any(bits, axis=-1, keepdims=True)  # nothing was recorded beyond the end
        logp = _log_softmax(at["hidden"] @ head, temperature, keep)
        other = None
        if reference is not None:
            other = jax.lax.stop_gradient(_log_softmax(at["reference"] @ reference[1], temperature, keep))
        return token_scores(logp, at["targets"], other, kl_estimator)

    parts = {"hidden": hidden.reshape(-1, size), "targets": targets.reshape(-1)}
    if support is not None:
        parts["support"] = support.reshape(rows * width, -1)
    if reference is not None:
        parts["reference"] = reference[0].reshape(-1, size)
    found = _in_parts(part, parts, max(1, _LOGITS // vocabulary))
    return jax.tree.map(lambda x: x.reshape(rows, width), found)


def token_scores(logp: jax.Array, targets: jax.Array, reference: jax.Array | None, kl_estimator: str) -> Scores:
    """Of `[..., V]` log-probabilities; those of tokens outside of a support are minus infinity."""
    possible = jnp.isfinite(logp)
    finite = jnp.where(possible, logp, 0.0)
    entropy = -jnp.sum(jnp.where(possible, jnp.exp(finite) * finite, 0.0), axis=-1)
    kl = None if reference is None else VOCABULARY_KL[kl_estimator](logp, reference)
    chosen = jnp.take_along_axis(logp, targets[..., None].astype(jnp.int32), axis=-1)[..., 0]
    return Scores(chosen, entropy, kl)


def _log_softmax(logits: jax.Array, temperature: jax.Array | float, keep: jax.Array | None) -> jax.Array:
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    logp = jax.nn.log_softmax(wide / temperature, axis=-1)
    return logp if keep is None else restrict_to_support(logp, keep)


def _in_parts(f: Callable[[Any], Scores], rows: Mapping[str, jax.Array], size: int) -> Scores:
    """`f` on `size` rows at a time, each recomputed in the backward pass."""
    count = next(iter(rows.values())).shape[0]
    if count <= size:
        return jax.checkpoint(f)(rows)
    size = -(-count // -(-count // size))  # equal parts
    padded = -(-count // size) * size

    def shaped(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, padded - count), *((0, 0),) * (x.ndim - 1))).reshape(-1, size, *x.shape[1:])

    found = jax.lax.map(jax.checkpoint(f), jax.tree.map(shaped, rows))
    return jax.tree.map(lambda x: x.reshape(-1)[:count], found)
