"""Draw responses and score them, inside compiled functions.

Rows are contiguous and padded on the right: prompt, response, padding. A causal model never sees what follows, so any
model that maps tokens to logits will do.

    tokens      [11 12 13 21 22  2  0  0]     prompt of 3 in a width of 5, response of 3 (2 ends it), T = 3
    responses   [21 22 2]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from covey.jax.drawing import Advance, SamplingParams, decode, draw, log_probabilities
from covey.jax.grpo_config import GRPOConfig
from covey.jax.scoring import Scores, token_scores


def sample(
    model: Any, variables: Any, prompts: jax.Array, lengths: jax.Array, key: jax.Array, config: GRPOConfig
) -> dict[str, jax.Array]:
    """`num_samples_per_prompt` responses to each prompt, those of a prompt next to each other.

    The prompts run once each, their keys and values are repeated for the group where the model has a cache. The loop
    ends when all responses have. A row draws from its own key, so it does not depend on the rows beside it.

    Args:
        model: a Flax module: `apply(variables, tokens) -> logits`; with `init_cache`, as in `Transformer`, each
            step runs on one token, without it on the whole rows.
        variables: what it is applied with; constants for differentiation.
        prompts: `[B, P]` ids, padded on the right.
        lengths: `[B]` tokens of each prompt.
        key: random key.
        config: how to draw.

    Returns:
        `responses` `[R, T]`, the padding token after the end. `mask` `[R, T]`, True on sampled tokens, the
        end-of-sequence token included. `old_logprobs` `[R, T]` under the sampling distribution, 0 where masked.
        `finished` `[R]`, True where an end-of-sequence token was sampled. `tokens` `[R, P + T]` and `lengths` `[R]`:
        each prompt with its response, and the tokens before that. `steps`: forward passes after that of the prompts.
        With `keep_sampling_mask` `support` `[R, T, ceil(V / 8)]`, bits of the tokens that could be drawn.
    """
    group, limit = config.sampling.num_generations, config.sampling.max_completion_length
    variables = jax.lax.stop_gradient(variables)
    sampling = SamplingParams(
        config.temperature, config.top_k, config.top_p, config.min_p, config.keep_sampling_mask, config.eos_token_ids
    )
    logits, state = _start(model, variables, prompts, lengths, limit)
    logits, state, prompts, lengths = jax.tree.map(
        lambda x: jnp.repeat(x, group, axis=0), (logits, state, prompts, lengths)
    )
    rows, vocabulary = logits.shape
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    u = jax.vmap(lambda own: jax.random.uniform(own, (limit + 1,), dtype))(keys)
    first = draw(logits, u[:, 0], sampling)
    found = decode(
        _advance(model, variables),
        state,
        first.tokens,
        lengths,
        jnp.where(sampling.ends(first.tokens), 0, limit - 1).astype(jnp.int32),
        u[:, 1:],  # one number more than is needed: no loop over an array of no columns
        sampling,
        beyond=prompts.shape[1] + limit,
        vocabulary=vocabulary,
    )

    def whole(first: jax.Array, later: jax.Array) -> jax.Array:
        return jnp.concatenate([first[:, None], later], axis=1)[:, :limit]

    tokens = whole(first.tokens, found.tokens)
    mask = tokens >= 0
    responses = jnp.where(mask, tokens, config.pad_token_id).astype(prompts.dtype)
    columns = lengths[:, None] + jnp.arange(limit)
    joined = jnp.pad(prompts, ((0, 0), (0, limit))).at[jnp.arange(rows)[:, None], columns].set(responses)
    record = {
        "tokens": joined,
        "lengths": lengths,
        "responses": responses,
        "mask": mask,
        "old_logprobs": jnp.where(mask, whole(first.logprobs, found.logprobs), 0.0),
        "finished": jnp.any(sampling.ends(tokens), axis=1),
        "steps": found.steps,
    }
    if first.support is not None and found.support is not None:
        record["support"] = whole(first.support, found.support)
    return record


def _start(model: Any, variables: Any, prompts: jax.Array, lengths: jax.Array, limit: int) -> tuple[jax.Array, Any]:
    """Logits `[B, V]` after each prompt, and the state to go on from: a cache, or the rows themselves."""
    last = (lengths - 1)[:, None]
    if hasattr(model, "init_cache"):
        # float32 factors beside bfloat16 weights do not make wider keys and values
        dtype = jnp.result_type(*jax.tree.leaves(variables["params"]))
        cache = model.init_cache(prompts.shape[0], prompts.shape[1] + limit, dtype)
        logits, cache = model.apply(variables, prompts, cache=cache, columns=last)
        return logits[:, 0], cache
    rows = jnp.pad(prompts, ((0, 0), (0, limit)))
    return _at(model.apply(variables, rows), last)[:, 0], rows


def _advance(model: Any, variables: Any) -> Advance:
    """The function that appends a token to each row: to its cache, or to the row itself."""

    def with_cache(token: jax.Array, position: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        logits, cache = model.apply(variables, token[:, None], positions=position[:, None], cache=cache)
        return logits[:, 0], cache

    def whole_rows(token: jax.Array, position: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = rows.at[jnp.arange(rows.shape[0]), position].set(token.astype(rows.dtype), mode="drop")
        last = jnp.minimum(position, rows.shape[1] - 1)[:, None]
        return _at(model.apply(variables, rows), last)[:, 0], rows

    return with_cache if hasattr(model, "init_cache") else whole_rows


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
    """Log-probabilities and entropies of responses, differentiable in `variables`.

    Args:
        model: see `sample`.
        variables: what it is applied with.
        tokens: `[R, L]` from `sample`.
        lengths: `[R]` tokens before the response.
        responses: `[R, T]`.
        config: temperature and KL estimator.
        support: bits from `sample`; probabilities are then those among these tokens.
        reference: gives `(model, variables)` of the reference for a KL over the vocabulary.
    """
    columns = lengths[:, None] - 1 + jnp.arange(responses.shape[1])

    def distribution(model: Any, variables: Any) -> jax.Array:
        if hasattr(model, "init_cache"):
            logits = model.apply(variables, tokens, columns=columns)
        else:
            logits = _at(model.apply(variables, tokens), columns)
        return log_probabilities(logits, config.temperature, support)

    logp = distribution(model, variables)
    other = None if reference is None else jax.lax.stop_gradient(distribution(*reference()))
    return token_scores(logp, responses, other, config.kl_estimator)


def _at(logits: jax.Array, columns: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logits, columns[:, :, None], axis=1)
