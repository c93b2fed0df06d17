"""Draw responses inside compiled functions: temperature, what may be drawn, the inverse CDF, and the loop.

Rows are contiguous and padded on the right: prompt, response, padding. A causal model never sees what follows, so any
model that maps tokens to logits will do.

    tokens      [11 12 13 21 22  2  0  0]     prompt of 3 in a width of 5, response of 3 (2 ends it), T = 3
    responses   [21 22 2]

A token is drawn by inverting its row's cumulative distribution at one given number u. The CDF is taken in two levels,
blocks of 256 probabilities and then inside the chosen one: a running sum over a whole vocabulary is slow and inexact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from covey.algorithms import restrict_to_support
from covey.jax.grpo_config import GRPOConfig
from covey.jax.scoring import log_probabilities, take_columns

_BLOCK = 256


class Draw(NamedTuple):
    """For each of R rows: a token, its log-probability, and bits `[R, ceil(V / 8)]` of what could be drawn."""

    tokens: jax.Array
    logprobs: jax.Array
    support: jax.Array | None


Advance = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""`(tokens [R], positions [R], state) -> (logits [R, V] of what follows, state)`."""


def sample(
    model: Any, variables: Any, prompts: jax.Array, lengths: jax.Array, key: jax.Array, config: GRPOConfig
) -> dict[str, jax.Array]:
    """`num_samples_per_prompt` responses to each prompt, those of a prompt next to each other.

    The model maps tokens to logits in `apply(variables, tokens)`; one with `init_cache`, as `Transformer`, runs on one
    token a step, others on whole rows. Prompts `[B, P]`, padded on the right, run once each; their keys and values are
    repeated for the group. The loop ends when all responses have. A row draws from its own key.

    Returns:
        `responses` `[R, T]`, the padding token after the end. `mask` `[R, T]`, True on sampled tokens, the
        end-of-sequence token included. `old_logprobs` `[R, T]` under the sampling distribution, 0 where masked.
        `finished` `[R]`, True where an end-of-sequence token was sampled. `tokens` `[R, P + T]` and `lengths` `[R]`:
        each prompt with its response, and the tokens before that. `steps`: forward passes after that of the prompts.
        With `keep_sampling_mask` `support` `[R, T, ceil(V / 8)]`, bits of the tokens that could be drawn.
    """
    group, limit = config.sampling.num_generations, config.sampling.max_completion_length
    variables = jax.lax.stop_gradient(variables)
    logits, state = _start(model, variables, prompts, lengths, limit)
    begun = (logits, state, prompts, lengths)
    logits, state, prompts, lengths = jax.tree.map(lambda x: jnp.repeat(x, group, axis=0), begun)
    rows = logits.shape[0]
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    # One number more than is needed: no loop over an array of no columns.
    u = jax.vmap(lambda own: jax.random.uniform(own, (limit + 1,), dtype))(keys)
    first = draw(logits, u[:, 0], config)
    state = (first.tokens, lengths, _left(first.tokens, jnp.full(rows, limit), config), state)
    later, steps = _decode(_advance(model, variables), state, u[:, 1:], config, beyond=prompts.shape[1] + limit)
    tokens, logprobs, support = jax.tree.map(
        lambda one, others: jnp.concatenate([one[:, None], others], axis=1)[:, :limit], first, later
    )
    mask = tokens >= 0
    responses = jnp.where(mask, tokens, config.pad_token_id).astype(prompts.dtype)
    columns = lengths[:, None] + jnp.arange(limit)
    record = {
        "tokens": jnp.pad(prompts, ((0, 0), (0, limit))).at[jnp.arange(rows)[:, None], columns].set(responses),
        "lengths": lengths,
        "responses": responses,
        "mask": mask,
        "old_logprobs": jnp.where(mask, logprobs, 0.0),
        "finished": jnp.any(_ends(tokens, config), axis=1),
        "steps": steps,
    }
    return record if support is None else record | {"support": support}


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
    return take_columns(model.apply(variables, rows), last)[:, 0], rows


def _advance(model: Any, variables: Any) -> Advance:
    """The function that appends a token to each row: to its cache, or to the row itself."""

    def with_cache(token: jax.Array, position: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        logits, cache = model.apply(variables, token[:, None], positions=position[:, None], cache=cache)
        return logits[:, 0], cache

    def whole_rows(token: jax.Array, position: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = rows.at[jnp.arange(rows.shape[0]), position].set(token.astype(rows.dtype), mode="drop")
        last = jnp.minimum(position, rows.shape[1] - 1)[:, None]
        return take_columns(model.apply(variables, rows), last)[:, 0], rows

    return with_cache if hasattr(model, "init_cache") else whole_rows


def _decode(advance: Advance, state: Any, u: jax.Array, config: GRPOConfig, *, beyond: int) -> tuple[Draw, jax.Array]:
    """Run each row's token, draw the next, and so on until no row may go on: `[R, C]` draws, and the steps."""
    # The state: `[R]` tokens that are not run yet, the positions where they belong, how many more each row may draw
    # (0 = it rests: then its tokens are -1, at `beyond`), and what `advance` begins with.
    shapes = jax.eval_shape(lambda token, at, _, state: draw(advance(token, at, state)[0], u[:, 0], config), *state)
    drawn = jax.tree.map(lambda x: jnp.zeros((x.shape[0], u.shape[1], *x.shape[1:]), x.dtype), shapes)
    drawn = drawn._replace(tokens=drawn.tokens - 1)

    def goes_on(carry: Any) -> jax.Array:
        t, (_, _, budget, _), _ = carry
        return (t < u.shape[1]) & jnp.any(budget > 0)

    def step(carry: Any) -> Any:
        t, (token, position, budget, state), drawn = carry
        active = budget > 0
        logits, state = advance(token, jnp.where(active, position, beyond), state)
        new = draw(logits, u[:, t], config)
        told = new._replace(tokens=jnp.where(active, new.tokens, -1))
        drawn = jax.tree.map(lambda all_of, one: all_of.at[:, t].set(one), drawn, told)
        return t + 1, (new.tokens, position + active, _left(new.tokens, budget, config), state), drawn

    steps, _, drawn = jax.lax.while_loop(goes_on, step, (jnp.zeros((), jnp.int32), state, drawn))
    return drawn, steps


def _left(drawn: jax.Array, budget: jax.Array, config: GRPOConfig) -> jax.Array:
    """`[R]` how many more tokens each row may draw after these."""
    return jnp.where((budget > 0) & ~_ends(drawn, config), budget - 1, 0).astype(jnp.int32)


def _ends(tokens: jax.Array, config: GRPOConfig) -> jax.Array:
    return jnp.any(tokens[..., None] == jnp.asarray(config.eos_token_ids, jnp.int32), axis=-1)


def draw(logits: jax.Array, u: jax.Array, config: GRPOConfig) -> Draw:
    """One token for each row of logits `[R, V]` at the numbers `u` `[R]` in [0, 1).

    With `keep_sampling_mask` the log-probability is that among the tokens that were kept.
    """
    logp = log_probabilities(logits, config.temperature)
    support = kept(logp, config.top_k, config.top_p, config.min_p)
    limited = logp if support is None else jnp.where(support, logp, -jnp.inf)
    tokens = invert(jnp.exp(limited), u)
    told, bits = limited, None
    if support is not None and config.keep_sampling_mask:
        told, bits = restrict_to_support(logp, support), jnp.packbits(support, axis=-1)
    at = tokens[:, None]
    chosen = jnp.take_along_axis(told, at, axis=1)[:, 0]
    # A token at the very edge of what min_p keeps may be kept in one copy of the comparison and not in the other.
    chosen = jnp.where(chosen == -jnp.inf, jnp.take_along_axis(logp, at, axis=1)[:, 0], chosen)
    return Draw(tokens.astype(jnp.int32), chosen, bits)


def invert(mass: jax.Array, u: jax.Array) -> jax.Array:
    """`[R]` the inverse CDF of each row of non-negative `mass` `[R, V]` at `u` `[R]`; never a token of mass 0."""
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
    """`[R]` first position whose running sum exceeds the target; the last step up if rounding leaves none."""
    position = jnp.sum(running <= target[:, None], axis=-1)
    last = jnp.sum(running < running[:, -1:], axis=-1)
    return jnp.minimum(position, last)


def kept(logp: jax.Array, top_k: int, top_p: float, min_p: float) -> jax.Array | None:
    """`[R, V]` True where top-k, then top-p, then min-p let a token be drawn; None where nothing is cut.

    Tokens are kept by their rank, not by comparing values with a threshold that is one of them: compiled code may
    compute a value twice, rounded in two ways.
    """
    size = logp.shape[-1]
    count = top_k if 0 < top_k < size else size
    support = None
    if top_p < 1 or count < size:
        ordered, ids = jax.lax.top_k(logp, size if top_p < 1 else count)
        keep = jnp.broadcast_to(jnp.arange(ordered.shape[-1]) < count, ordered.shape)
        if top_p < 1:
            probabilities = jax.nn.softmax(jnp.where(keep, ordered, -jnp.inf), axis=-1)
            before = jnp.cumsum(probabilities, axis=-1) - probabilities  # of all likelier tokens
            keep &= (before < top_p) | (jnp.arange(ordered.shape[-1]) == 0)
        support = jnp.zeros(logp.shape, bool).at[jnp.arange(logp.shape[0])[:, None], ids].set(keep)
    if min_p > 0:
        likely = logp >= jnp.max(logp, axis=-1, keepdims=True) + jnp.log(min_p)
        support = likely if support is None else support & likely
    return support
