"""Log-probabilities of the sampled tokens of a micro-batch, differentiable, a few rows of logits at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from covey.algorithms import exact_kl, exact_weighted_kl, restrict_to_support
from covey.jax.attention import packed
from covey.jax.model import ModelConfig
from covey.jax.stacked import hidden_states

VOCABULARY_KL = {"exact": exact_kl, "exact_weighted": exact_weighted_kl}
_LOGITS = 1 << 23
"""Numbers of logits that are held at once."""


class Scores(NamedTuple):
    """`[B, T]` each: log-probabilities, entropies, and the KL from the reference where one was given."""

    logp: jax.Array
    entropy: jax.Array
    kl: jax.Array | None


def predicting_states(config: ModelConfig, variables: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """`[B, T, d]`: what the output head reads to predict each target of a `covey.jax.packing.MicroBatch`."""
    attend = packed(batch["block"], batch["member"], batch["positions"], config.sliding_window)
    x = hidden_states(config, variables, batch["tokens"], batch["positions"], attend)
    return jnp.take_along_axis(x, batch["score_at"][:, :, None], axis=1)


def on_grid(values: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Values `[B, T]` of the targets -> `[B · M, S]`, a line for each completion, 0 where there is none."""
    place, exists = batch["place"], batch["exists"]
    found = jnp.take_along_axis(values, place.reshape(place.shape[0], -1), axis=1).reshape(place.shape)
    return jnp.where(exists, found, 0).reshape(-1, place.shape[2])


def output_head(config: ModelConfig, params: Mapping[str, Any]) -> jax.Array:
    """`[d, V]`."""
    return params["embedding"].T if config.tie_embeddings else params["head"]


def score(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    counts: jax.Array,
    temperature: jax.Array | float,
    *,
    support: jax.Array | None = None,
    reference: tuple[jax.Array, jax.Array] | None = None,
    kl_estimator: str = "exact",
) -> Scores:
    """Log-probabilities of targets under `softmax(hidden · head / temperature)`, and entropies.

    Logits exist for a part of the tokens at a time; the backward pass computes them again.

    Args:
        hidden: `[B, T, d]`.
        head: `[d, V]`.
        targets: `[B, T]`.
        counts: `[B]` how many of the T are real, the first ones.
        temperature: that the tokens were sampled at.
        support: `[B, T, ceil(V / 8)]` bits; probabilities are then those among these tokens.
        reference: hidden states and head of the reference, for a KL over the vocabulary.
        kl_estimator: `exact` or `exact_weighted`.
    """
    vocabulary = head.shape[1]

    def part(at: Mapping[str, jax.Array]) -> Scores:
        keep = None
        if support is not None:
            keep = jnp.unpackbits(at["support"], axis=-1, count=vocabulary).astype(bool)
        logp = _log_softmax(at["hidden"] @ head, temperature, keep)
        other = None
        if reference is not None:
            other = jax.lax.stop_gradient(_log_softmax(at["reference"] @ reference[1], temperature, keep))
        return token_scores(logp, at["targets"], other, kl_estimator)

    parts = {"hidden": hidden, "targets": targets}
    if support is not None:
        parts["support"] = support
    if reference is not None:
        parts["reference"] = reference[0]
    return _in_parts(part, parts, counts, max(1, _LOGITS // (vocabulary * targets.shape[0])))


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


def _in_parts(f: Callable[[Any], Scores], columns: Mapping[str, jax.Array], counts: jax.Array, size: int) -> Scores:
    """`f` on `size` columns of `[B, T, ...]` at a time, each recomputed in the backward pass.

    Columns from the largest of `counts` on are left out: they are padding.
    """
    width = columns["targets"].shape[1]
    size = -(-width // -(-width // size))  # equal parts
    padded = -(-width // size) * size

    def shaped(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, padded - width), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)

    parts = jax.tree.map(shaped, dict(columns))
    nothing = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(f, jax.tree.map(lambda x: x[0], parts))
    )

    @jax.checkpoint  # around the choice: inside it, each part would keep a copy of the head
    def some(at: tuple[jax.Array, Any]) -> Scores:
        found: Scores = jax.lax.cond(at[0], f, lambda _: nothing, at[1])
        return found

    needed = jnp.arange(0, padded, size) < jnp.max(counts)
    found = jax.lax.map(some, (needed, parts))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(x.shape[1], -1)[:, :width], found)
