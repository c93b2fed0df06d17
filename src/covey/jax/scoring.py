"""Log-probabilities of sampled tokens, differentiable, a few rows of logits at a time, and the loss of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from covey.algorithms import Correction, Objective, mismatch_correction, policy_loss
from covey.algorithms.kl import VOCABULARY_KL
from covey.algorithms.objective import LossTerms
from covey.jax.attention import packed
from covey.jax.drawing import log_probabilities
from covey.jax.linear import wide_product
from covey.jax.model import ModelConfig
from covey.jax.stacked import hidden_states

_LOGITS = 1 << 23
"""Numbers of logits that are held at once."""


class Scores(NamedTuple):
    """`[B, T]` each: log-probabilities, entropies, and the KL from the reference where one was given."""

    logp: jax.Array
    entropy: jax.Array
    kl: jax.Array | None


def score_batch(
    config: ModelConfig,
    variables: Any,
    batch: Mapping[str, jax.Array],
    temperature: float,
    *,
    reference: Any = None,
    kl_estimator: str = "exact",
) -> Scores:
    """Log-probabilities and entropies of the targets of a `covey.jax.packing.MicroBatch`, differentiable.

    Logits exist for a part of the tokens at a time; the backward pass computes them again.

    Args:
        config: of the model.
        variables: of the policy, stacked.
        batch: the arrays of the micro-batch. With `support` `[B, T, ceil(V / 8)]`, bits, probabilities are those among
            these tokens.
        temperature: that the tokens were sampled at.
        reference: variables of the reference, for a KL over the vocabulary; constants for differentiation.
        kl_estimator: `exact` or `exact_weighted`.

    Returns:
        `[B · M, S]` each: a line for each row of the batch, 0 where there is no target.
    """
    attend = packed(batch["leave"], batch["positions"], config.sliding_window)

    def states(variables: Any) -> tuple[jax.Array, jax.Array]:
        """`[B, T, d]` that the output head reads to predict each target, and the head `[d, V]`."""
        x = hidden_states(config, variables, batch["tokens"], batch["positions"], attend)
        head = variables["params"]["embedding"].T if config.tie_embeddings else variables["params"]["head"]
        return jnp.take_along_axis(x, batch["score_at"][:, :, None], axis=1), head

    hidden, head = states(variables)
    columns = {"hidden": hidden, **{name: batch[name] for name in ("targets", "support") if name in batch}}
    if reference is not None:
        columns["reference"], other_head = states(jax.lax.stop_gradient(reference))

    def logits(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return wide_product(hidden.reshape(-1, hidden.shape[-1]), head).reshape(*hidden.shape[:-1], -1)

    def part(at: Mapping[str, jax.Array]) -> Scores:
        kept, other = at.get("support"), None
        logp = log_probabilities(logits(at["hidden"], head), temperature, kept)
        if reference is not None:
            other = jax.lax.stop_gradient(log_probabilities(logits(at["reference"], other_head), temperature, kept))
        return token_scores(logp, at["targets"], other, kl_estimator)

    size = max(1, _LOGITS // (head.shape[1] * batch["targets"].shape[0]))
    found = _in_parts(part, columns, batch["counts"], size)
    place, exists = batch["place"], batch["exists"]

    def on_grid(values: jax.Array) -> jax.Array:
        at = jnp.take_along_axis(values, place.reshape(place.shape[0], -1), axis=1).reshape(place.shape)
        return jnp.where(exists, at, 0).reshape(-1, place.shape[2])

    return jax.tree.map(on_grid, found)


def token_scores(logp: jax.Array, targets: jax.Array, reference: jax.Array | None, kl_estimator: str) -> Scores:
    """Of `[..., V]` log-probabilities; those of tokens outside of a support are minus infinity."""
    possible = jnp.isfinite(logp)
    finite = jnp.where(possible, logp, 0.0)
    entropy = -jnp.sum(jnp.where(possible, jnp.exp(finite) * finite, 0.0), axis=-1)
    kl = None if reference is None else VOCABULARY_KL[kl_estimator](logp, reference)
    chosen = jnp.take_along_axis(logp, targets[..., None].astype(jnp.int32), axis=-1)[..., 0]
    return Scores(chosen, entropy, kl)


def loss_terms(
    found: Scores,
    rows: Mapping[str, jax.Array],
    objective: Objective,
    correction: Correction | None,
    entropy_coef: jax.Array | None = None,
) -> LossTerms:
    """The loss of some rows of a step, differentiable in `found`, and its metrics; see `policy_loss`.

    Args:
        found: of the policy, `[N, T]` each.
        rows: `[N, T]` each, by name: `mask`, `advantages`, `weights`, and `old`, the sampler's log-probabilities. Where
            the objective needs them `reference`, `kl_weights`, `entropy_weights` and `selected`. With a correction
            `trainer_old`, the trainer's log-probabilities under the weights that sampled; without it these are the
            weights that `found` is of.
        objective: what to minimise.
        correction: for a sampler that differs, or None.
        entropy_coef: the weight of the entropy bonus, where it is another one in each step.
    """
    old, factor = rows["old"], None
    if correction is not None:
        old = rows.get("trainer_old", jax.lax.stop_gradient(found.logp))
        counted = rows["mask"] | (rows["kl_weights"] > 0) if "kl_weights" in rows else rows["mask"]
        factor = mismatch_correction(old, rows["old"], counted, *astuple(correction))
    return policy_loss(
        found.logp,
        old,
        rows["advantages"],
        rows["mask"],
        rows["weights"],
        objective,
        ref=rows.get("reference"),
        kl=found.kl,
        entropy=found.entropy if objective.differentiates_entropy else jax.lax.stop_gradient(found.entropy),
        correction=factor,
        kl_weights=rows.get("kl_weights"),
        sampler=rows["old"],
        selected=rows.get("selected"),
        entropy_coef=entropy_coef,
        entropy_weights=rows.get("entropy_weights"),
    )


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
