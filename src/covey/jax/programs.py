"""What the engine runs on the device, each compiled once for a shape.

    prefill   run a chunk of some prompts; keep the logits after the last token of each
    begin     copy prompts into slots of the cache, draw the first token of each completion
    extend    run a chunk of what was said to conversations that are in slots already, draw what follows
    decode    token after token for all slots, until few enough of them go on
    shrink    fewer slots, when most have finished

A slot is a row of the cache. `R` slots hold `S` positions each; a slot that takes no part has the position S, beyond
the end, where nothing is written.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from covey.jax.drawing import Decoded, Draw, SamplingParams, decode, draw
from covey.jax.model import Cache, Transformer
from covey.jax.sharding import batch_sharding, keep_placed
from covey.jax.stacked import unstack


class Programs:
    """The compiled functions for one model."""

    def __init__(self, model: Transformer, mesh: Mesh | None) -> None:
        self._model: Any = model
        self._mesh = mesh
        self.prepared: set[Any] = set()
        self.prefill = jax.jit(self._prefill, donate_argnames=("cache", "logits"))
        self.begin = jax.jit(self._begin, static_argnames=("sampling",), donate_argnames=("cache",))
        self.extend = jax.jit(self._extend, static_argnames=("sampling",), donate_argnames=("cache",))
        self.decode = jax.jit(self._decode, static_argnames=("sampling",), donate_argnames=("cache",))
        self.shrink = jax.jit(self._shrink)
        self.merge = jax.jit(self._merge, static_argnames=("dtype",))

    @property
    def compilations(self) -> int:
        """The number of programs compiled so far."""
        programs: tuple[Any, ...] = (self.prefill, self.begin, self.extend, self.decode, self.shrink, self.merge)
        return sum(program._cache_size() for program in programs)

    def _placed(self, cache: Cache) -> Cache:
        if self._mesh is None:
            return cache
        rows = batch_sharding(self._mesh)
        return jax.lax.with_sharding_constraint(cache, jax.tree.map(lambda _: rows, cache))

    def _prefill(
        self, params: Any, cache: Cache, logits: jax.Array, tokens: jax.Array, start: jax.Array, lengths: jax.Array
    ) -> tuple[Cache, jax.Array]:
        """`[n, W]` tokens at `start`, a number, of prompts of `lengths` `[n]`, into a cache of their own.

        `logits` `[n, V]` are replaced where a prompt ends in this chunk.
        """
        width, size = tokens.shape[1], cache[0][0].shape[3]
        positions = start + jnp.arange(width)
        positions = jnp.where(positions < lengths[:, None], positions, size)
        last = lengths - 1 - start
        found, cache = self._model.apply(
            {"params": params}, tokens, positions=positions, cache=cache, columns=jnp.clip(last, 0, width - 1)[:, None]
        )
        ends = (last >= 0) & (last < width)
        return cache, jnp.where(ends[:, None], found[:, 0], logits)

    def _begin(
        self,
        cache: Cache,
        prompts: Cache,
        logits: jax.Array,
        source: jax.Array,
        slots: jax.Array,
        u: jax.Array,
        allowed: jax.Array | None,
        *,
        sampling: SamplingParams,
    ) -> tuple[Cache, Draw]:
        """Prompt `source[i]` into slot `slots[i]`; slots beyond the last take nothing."""

        def put(into: tuple[jax.Array, jax.Array], new: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            keys, values = new[0][source], new[1][source]
            width = min(keys.shape[3], into[0].shape[3])
            return (
                into[0].at[slots, :, :, :width].set(keys[..., :width], mode="drop"),
                into[1].at[slots, :, :width].set(values[:, :, :width], mode="drop"),
            )

        filled = tuple(put(into, new) for into, new in zip(cache, prompts, strict=True))
        return self._placed(filled), draw(logits[source], u, sampling, allowed)

    def _extend(
        self,
        params: Any,
        cache: Cache,
        tokens: jax.Array,
        slots: jax.Array,
        start: jax.Array,
        lengths: jax.Array,
        u: jax.Array,
        allowed: jax.Array | None,
        *,
        sampling: SamplingParams,
    ) -> tuple[Cache, Draw]:
        """`[n, W]` tokens, of which `lengths` are real, go on from position `start` of their slots.

        Slots beyond the last take nothing.
        """
        positions = start[:, None] + jnp.arange(tokens.shape[1])
        size = cache[0][0].shape[3]
        positions = jnp.where(jnp.arange(tokens.shape[1]) < lengths[:, None], positions, size)
        rows = jax.tree.map(lambda x: x.at[slots].get(mode="clip"), cache)
        columns = jnp.maximum(lengths - 1, 0)[:, None]
        logits, rows = self._model.apply({"params": params}, tokens, positions=positions, cache=rows, columns=columns)
        cache = jax.tree.map(lambda x, new: x.at[slots].set(new, mode="drop"), cache, rows)
        return self._placed(cache), draw(logits[:, 0], u, sampling, allowed)

    def _decode(
        self,
        params: Any,
        cache: Cache,
        token: jax.Array,
        position: jax.Array,
        budget: jax.Array,
        until: jax.Array,
        u: jax.Array,
        allowed: jax.Array | None,
        *,
        sampling: SamplingParams,
    ) -> Decoded:
        """`decode` for R slots of the cache; `params` are those of the model with adapters merged."""

        def advance(token: jax.Array, position: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
            logits, cache = self._model.apply(
                {"params": params}, token[:, None], positions=position[:, None], cache=cache
            )
            return logits[:, 0], cache

        found = decode(
            advance,
            cache,
            token,
            position,
            budget,
            u,
            sampling,
            beyond=cache[0][0].shape[3],
            vocabulary=self._model.config.vocab_size,
            until=until,
            allowed=allowed,
        )
        return found._replace(state=self._placed(found.state))

    def _merge(self, params: Any, lora: Any, *, dtype: Any) -> Any:
        """`merge`, laid out as the weights are."""
        merged = unstack(merge(params, lora, dtype, scale=scale_of(self._model)), self._model.config.num_layers)
        return keep_placed(merged, self._mesh, self._model)

    def _shrink(self, cache: Cache, slots: jax.Array) -> Cache:
        """The slots listed, in that order."""
        return self._placed(jax.tree.map(lambda x: x[slots], cache))


def merge(params: Any, lora: Any, dtype: Any, *, scale: float) -> Any:
    """Parameters with the adapters added to their layers' kernels, in the type asked for."""

    def merged(params: Any, lora: Any) -> Any:
        if not isinstance(params, dict):
            return params.astype(dtype)
        found = {name: merged(value, lora.get(name, {})) for name, value in params.items() if name != "kernel"}
        if "kernel" in params:
            kernel = params["kernel"]
            if "a" in lora:
                kernel = kernel.astype(jnp.promote_types(kernel.dtype, jnp.float32)) + scale * (lora["a"] @ lora["b"])
            found["kernel"] = kernel.astype(dtype)
        return found

    return merged(params, lora)


def scale_of(model: Transformer) -> float:
    """What the product of LoRA factors is multiplied by."""
    return model.config.lora_alpha / max(model.config.lora_rank, 1)
