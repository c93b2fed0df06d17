"""Draw responses and score them, inside compiled functions.

Rows are contiguous and padded on the right: prompt, response, padding. A causal model never sees what follows, so any
model that maps tokens to logits will do.

    tokens      [11 12 13 21 22  2  0  0]     prompt of 3 in a width of 5, response of 3 (2 ends it), T = 3
    responses   [21 22 2]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from covey.algorithms import restrict_to_support
from covey.jax.drawing import kept, log_probabilities
from covey.jax.grpo_config import GRPOConfig
from covey.jax.scoring import Scores, token_scores


class Samples(NamedTuple):
    """Responses of R rows.

    Attributes:
        responses: `[R, T]` ids, the padding token after the end.
        mask: `[R, T]` True on sampled tokens, the end-of-sequence token included.
        logprobs: `[R, T]` under the sampling distribution, 0 where masked.
        finished: `[R]` True where an end-of-sequence token was sampled.
        support: `[R, T, ceil(V / 8)]` bits of the tokens that could be drawn, or None.
        steps: scalar, forward passes of the model after that of the prompts.
    """

    responses: jax.Array
    mask: jax.Array
    logprobs: jax.Array
    finished: jax.Array
    support: jax.Array | None
    steps: jax.Array


def sample(
    model: Any, variables: Any, prompts: jax.Array, lengths: jax.Array, key: jax.Array, config: GRPOConfig
) -> Samples:
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
    """
    group, limit = config.num_samples_per_prompt, config.max_completion_length
    variables = jax.lax.stop_gradient(variables)
    rows = prompts.shape[0] * group
    logits, state = _start(model, variables, prompts, lengths, limit)
    logits, state = jax.tree.map(lambda x: jnp.repeat(x, group, axis=0), (logits, state))
    lengths = jnp.repeat(lengths, group)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))
    ends = jnp.asarray(config.eos_token_ids, prompts.dtype)
    bits = -(-logits.shape[-1] // 8) if config.keep_sampling_mask else 0

    def unfinished(carry: Any) -> jax.Array:
        return (carry[0] < limit) & ~jnp.all(carry[1])

    def draw(carry: Any) -> Any:
        t, done, logits, state, out = carry
        logp = log_probabilities(logits, config.temperature)
        support = kept(logp, config)
        limited = logp if support is None else jnp.where(support, logp, -jnp.inf)
        if support is not None and config.keep_sampling_mask:
            logp = restrict_to_support(logp, support)
        token = jax.vmap(lambda k, row: jax.random.categorical(jax.random.fold_in(k, t), row))(keys, limited)
        token = token.astype(prompts.dtype)
        chosen = jnp.take_along_axis(logp, token[:, None], axis=1)[:, 0]
        out = {
            "responses": out["responses"].at[:, t].set(jnp.where(done, config.pad_token_id, token)),
            "mask": out["mask"].at[:, t].set(~done),
            "logprobs": out["logprobs"].at[:, t].set(jnp.where(done, 0.0, chosen)),
            "support": out["support"],
        }
        if bits:
            whole = jnp.ones_like(limited, bool) if support is None else support
            out["support"] = out["support"].at[:, t].set(jnp.packbits(whole, axis=-1))
        done = done | jnp.any(token[:, None] == ends, axis=1)
        logits, state = jax.lax.cond(
            (t + 1 < limit) & ~jnp.all(done),
            lambda: _advance(model, variables, token, lengths + t, state, logits),
            lambda: (logits, state),
        )
        return t + 1, done, logits, state, out

    empty = {
        "responses": jnp.full((rows, limit), config.pad_token_id, prompts.dtype),
        "mask": jnp.zeros((rows, limit), bool),
        "logprobs": jnp.zeros((rows, limit), jnp.promote_types(logits.dtype, jnp.float32)),
        "support": jnp.zeros((rows, limit, bits), jnp.uint8),
    }
    begin = (jnp.zeros((), jnp.int32), jnp.zeros(rows, bool), logits, state, empty)
    steps, done, _, _, out = jax.lax.while_loop(unfinished, draw, begin)
    support = out["support"] if bits else None
    return Samples(out["responses"], out["mask"], out["logprobs"], done, support, steps - 1)


def _start(model: Any, variables: Any, prompts: jax.Array, lengths: jax.Array, limit: int) -> tuple[jax.Array, Any]:
    """Logits `[B, V]` after each prompt, and the state to go on from: a cache, or the rows themselves."""
    last = (lengths - 1)[:, None]
    if hasattr(model, "init_cache"):
        dtype = jnp.result_type(*jax.tree.leaves(variables))
        cache = model.init_cache(prompts.shape[0], prompts.shape[1] + limit, dtype)
        logits, cache = model.apply(variables, prompts, cache=cache, columns=last)
        return logits[:, 0], cache
    rows = jnp.pad(prompts, ((0, 0), (0, limit)))
    return _at(model.apply(variables, rows), last)[:, 0], rows


def _advance(
    model: Any, variables: Any, token: jax.Array, position: jax.Array, state: Any, like: jax.Array
) -> tuple[jax.Array, Any]:
    """Append a token to each row: logits `[R, V]` after it, and the new state."""
    if hasattr(model, "init_cache"):
        logits, state = model.apply(variables, token[:, None], positions=position[:, None], cache=state)
        return logits[:, 0].astype(like.dtype), state
    rows = state.at[jnp.arange(state.shape[0]), position].set(token)
    return _at(model.apply(variables, rows), position[:, None])[:, 0].astype(like.dtype), rows


def join(prompts: jax.Array, lengths: jax.Array, responses: jax.Array) -> jax.Array:
    """Rows `[R, P + T]`: each prompt of `lengths` tokens, its response right after it."""
    rows = jnp.pad(prompts, ((0, 0), (0, responses.shape[1])))
    columns = lengths[:, None] + jnp.arange(responses.shape[1])
    return rows.at[jnp.arange(rows.shape[0])[:, None], columns].set(responses)


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
        tokens: `[R, L]` from `join`.
        lengths: `[R]` tokens before the response.
        responses: `[R, T]`.
        config: temperature and KL estimator.
        support: bits from `Samples`; probabilities are then those among these tokens.
        reference: gives `(model, variables)` of the reference for a KL over the vocabulary.
    """
    columns = lengths[:, None] - 1 + jnp.arange(responses.shape[1])

    def distribution(model: Any, variables: Any) -> jax.Array:
        if hasattr(model, "init_cache"):
            logits = model.apply(variables, tokens, columns=columns)
        else:
            logits = _at(model.apply(variables, tokens), columns)
        logp = log_probabilities(logits, config.temperature)
        if support is None:
            return logp
        bits = jnp.unpackbits(support, axis=-1, count=logp.shape[-1]).astype(bool)
        # Past the end of a response nothing was recorded: everything is possible there.
        return restrict_to_support(logp, bits | ~jnp.any(bits, axis=-1, keepdims=True))

    logp = distribution(model, variables)
    other = None if reference is None else jax.lax.stop_gradient(distribution(*reference()))
    return token_scores(logp, responses, other, config.kl_estimator)


def _at(logits: jax.Array, columns: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logits, columns[:, :, None], axis=1)
