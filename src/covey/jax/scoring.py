"""Log-probabilities of sampled tokens, differentiable, and the loss of them; inside compiled functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from covey.algorithms import Correction, Objective, mismatch_correction, policy_loss
from covey.algorithms.kl import VOCABULARY_KL
from covey.algorithms.objective import LossTerms
from covey.jax.grpo_config import GRPOConfig


class Scores(NamedTuple):
    """`[R, T]` each: log-probabilities, entropies, and the KL from the reference where one was given."""

    logp: jax.Array
    entropy: jax.Array
    kl: jax.Array | None


def score(
    model: Any,
    variables: Any,
    tokens: jax.Array,
    lengths: jax.Array,
    responses: jax.Array,
    config: GRPOConfig,
    support: jax.Array | None = None,
    reference: Callable[[], Any] | None = None,
) -> Scores:
    """Log-probabilities and entropies of `responses` `[R, T]`, differentiable in `variables`.

    `tokens` `[R, L]` hold each prompt with its response, `lengths` `[R]` the tokens before it. `support`
    `[R, T, ceil(V / 8)]` are bits of what could be drawn: probabilities are then those among these tokens. `reference`
    gives `(model, variables)` of the reference for a KL over the vocabulary.
    """
    columns = lengths[:, None] - 1 + jnp.arange(responses.shape[1])

    def distribution(model: Any, variables: Any) -> jax.Array:
        if hasattr(model, "init_cache"):
            logits = model.apply(variables, tokens, columns=columns)
        else:
            logits = take_columns(model.apply(variables, tokens), columns)
        return log_probabilities(logits, config.temperature, support)

    logp = distribution(model, variables)
    possible = jnp.isfinite(logp)  # those of tokens outside of a support are minus infinity
    finite = jnp.where(possible, logp, 0.0)
    entropy = -jnp.sum(jnp.where(possible, jnp.exp(finite) * finite, 0.0), axis=-1)
    kl = None
    if reference is not None:
        kl = VOCABULARY_KL[config.kl_estimator](logp, jax.lax.stop_gradient(distribution(*reference())))
    chosen = jnp.take_along_axis(logp, responses[..., None].astype(jnp.int32), axis=-1)[..., 0]
    return Scores(chosen, entropy, kl)


def log_probabilities(logits: jax.Array, temperature: float, support: jax.Array | None = None) -> jax.Array:
    """Of `softmax(logits / temperature)`, `[..., V]`, in at least float32.

    `support` `[..., ceil(V / 8)]` are bits of the only tokens there are; where none is set, all are possible.
    """
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32)) / temperature
    if support is not None:
        keep = jnp.unpackbits(support, axis=-1, count=wide.shape[-1]).astype(bool)
        wide = jnp.where(keep | ~jnp.any(keep, axis=-1, keepdims=True), wide, -jnp.inf)
    # Not `restrict_to_support`: the gradient of its maximum is 0 / 0 where compiled code has computed the logits twice,
    # rounded in two ways, and finds none that equals it. Here it has none.
    return jax.nn.log_softmax(wide, axis=-1)


def take_columns(logits: jax.Array, columns: jax.Array) -> jax.Array:
    """`[R, T, V]` logits of columns `[R, T]` of `[R, L, V]`."""
    return jnp.take_along_axis(logits, columns[:, :, None], axis=1)


def loss_terms(
    found: Scores, rows: Mapping[str, jax.Array], objective: Objective, correction: Correction | None
) -> LossTerms:
    """The loss of a step, differentiable in `found`, and its metrics; see `policy_loss`.

    `rows` are `[R, T]` each: `mask`, `advantages`, `weights`, and `old`, the sampler's log-probabilities; where needed
    `reference`, `kl_weights`, `entropy_weights`, `selected`, and `trainer_old`, the trainer's of the same weights.
    """
    old, factor = rows["old"], None
    if correction is not None:
        old = rows["trainer_old"]
        counted = rows["mask"] | (rows["kl_weights"] > 0) if "kl_weights" in rows else rows["mask"]
        factor = mismatch_correction(old, rows["old"], counted, *astuple(correction))
    entropy = found.entropy if objective.differentiates_entropy else jax.lax.stop_gradient(found.entropy)
    always = (rows["advantages"], rows["mask"], rows["weights"], objective)
    others: dict[str, Any] = {name: rows.get(name) for name in ("kl_weights", "selected", "entropy_weights")}
    others |= {"ref": rows.get("reference"), "sampler": rows["old"], "correction": factor}
    return policy_loss(found.logp, old, *always, kl=found.kl, entropy=entropy, **others)
