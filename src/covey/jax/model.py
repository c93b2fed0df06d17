"""A decoder of the Llama shape (Llama, Mistral, Qwen2, Qwen3) as a Flax Linen module.

    model = Transformer(config)
    variables = model.init(key, tokens)             {"params": ..., "lora": ...}
    logits = model.apply(variables, tokens)         [N, L] -> [N, L, V]

Sequences are padded on the right: attention is causal, so no token sees the padding after it, and no mask is needed.

Keys are kept as `[N, K, D, S]` and values as `[N, K, S, D]` (K key-value heads of width D, S slots): so both products
of attention are plain matrix products, without a transposed copy.

LoRA factors are a variable collection of their own, `lora`. `apply` with `params` alone is the model without adapters:
the reference policy needs no second copy of the weights.

Limits: rotary scaling `linear` and `llama3` only; one sliding window for all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from covey.errors import ConfigError

KeysValues = tuple[jax.Array, jax.Array]
"""Keys `[N, K, D, S]` and values `[N, K, S, D]` of a layer; slot s holds position s."""
Cache = tuple[KeysValues, ...]
"""The keys and values of each layer."""
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Who sees whom: `(q [N, L, H, D], k [N, L, K, D], v) -> mixed [N, L, H, D]`, positions turned in; H / K query heads
share a key-value head.
"""

_NEVER = -1e30  # finite, so that a row that sees nothing is no NaN

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Stretched rotary frequencies: `linear`, or `llama3` (low frequencies divided by `factor`, high ones kept)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a `Transformer`. Hashable, so that it can be static in compiled functions.

    Attributes:
        vocab_size: V.
        hidden_size: width.
        intermediate_size: width of the feed-forward layer.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key-value heads; divides `num_heads`.
        head_dim: width of a head, even; None = `hidden_size / num_heads`.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how they are stretched; None = not.
        norm_eps: added to the mean square in RMSNorm.
        qkv_bias: biases on the query, key and value projections (Qwen2).
        out_bias: a bias on the attention's output projection.
        qk_norm: RMSNorm on each query and key head (Qwen3).
        tie_embeddings: the output head is the embedding.
        sliding_window: number of positions that a token sees, including itself; None = all before it.
        padding_token: token whose input embedding is not trained, as in PyTorch; None = all are trained.
        lora_rank: rank of the LoRA factors on every linear layer; 0 = none.
        lora_alpha: their output is scaled by `lora_alpha / lora_rank`.
        lora_modules: the linear layers that have them.
        remat: keep only the inputs of attention and feed-forward layers for the backward pass, and recompute the rest.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = True
    sliding_window: int | None = None
    padding_token: int | None = None
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_modules: tuple[str, ...] = LINEAR_LAYERS
    remat: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError: the parts do not fit."""
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_kv_heads={self.num_kv_heads}: choose a divisor of num_heads={self.num_heads}")
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ConfigError(
                f"num_heads={self.num_heads}: is not a divisor of hidden_size={self.hidden_size}; set head_dim"
            )
        if self.width_of_head % 2:
            raise ConfigError(f"head_dim={self.width_of_head}: rotary embedding turns pairs; choose an even number")
        if self.lora_rank < 0:
            raise ConfigError(f"lora_rank={self.lora_rank}: a rank is 0 (no LoRA) or more; choose one")
        for name in set(self.lora_modules) - set(LINEAR_LAYERS):
            raise ConfigError(f"lora_modules={name!r}: no such linear layer; choose from {', '.join(LINEAR_LAYERS)}")

    @property
    def width_of_head(self) -> int:
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x²) + eps) * scale` over the last axis, computed in at least float32."""

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return scale * normed.astype(x.dtype)


class Linear(nn.Module):
    """`x W + b`, and `alpha / rank · (x A) B` where the variables hold a `lora` collection.

    A is random and B zero at first, so that adapters begin as no change.
    """

    features: int
    use_bias: bool = False
    lora_rank: int = 0
    lora_alpha: float = 16.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., in] -> [..., features]`."""
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.features))
        out = x @ kernel
        if self.lora_rank and (self.is_initializing() or self.has_variable("lora", "a")):
            a_shape, b_shape = (x.shape[-1], self.lora_rank), (self.lora_rank, self.features)
            init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
            a = self.variable("lora", "a", lambda: init(self.make_rng("params"), a_shape))
            b = self.variable("lora", "b", jnp.zeros, b_shape)
            scale = self.lora_alpha / self.lora_rank
            out = out + (scale * ((x @ a.value) @ b.value)).astype(out.dtype)  # in the factors' type
        if self.use_bias:
            out = out + self.param("bias", nn.initializers.zeros, (self.features,))
        return out


class Attention(nn.Module):
    """Attention with grouped key-value heads and rotary positions; `attend` says who sees whom."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], attend: Attend) -> jax.Array:
        """`[N, L, hidden]`, turned by the cosines and sines of its positions; shape kept."""
        c = self.config
        width = c.width_of_head

        def heads(name: str, count: int) -> jax.Array:
            return _linear(c, count * width, c.qkv_bias, name)(x).reshape(*x.shape[:-1], count, width)

        q, k, v = heads("q_proj", c.num_heads), heads("k_proj", c.num_kv_heads), heads("v_proj", c.num_kv_heads)
        if c.qk_norm:
            q, k = RMSNorm(c.norm_eps, name="q_norm")(q), RMSNorm(c.norm_eps, name="k_norm")(k)
        mixed = attend(_rotate(q, *rotation), _rotate(k, *rotation), v).reshape(*x.shape[:-1], -1)
        return _linear(c, c.hidden_size, c.out_bias, "o_proj")(mixed)


class MLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        gate = _linear(c, c.intermediate_size, False, "gate_proj")(x)
        up = _linear(c, c.intermediate_size, False, "up_proj")(x)
        return _linear(c, c.hidden_size, False, "down_proj")(nn.silu(gate) * up)


class Transformer(nn.Module):
    """The decoder: Flax's `init(key, tokens)`, and `apply(variables, tokens)`, which returns logits `[B, L, V]`."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        cache: Cache | None = None,
        columns: jax.Array | None = None,
    ) -> Any:
        """Logits of the next token.

        Args:
            tokens: `[N, L]` integers.
            positions: `[N, L]`; 0 to L - 1 if None.
            cache: from `init_cache` or an earlier call; then `tokens` are written at `positions` and see what is
                before them.
            columns: `[N, T]` the columns of `tokens` whose logits are wanted; None = all. The output head is the
                largest layer of a small model: it runs on no others.

        Returns `[N, L, V]` or `[N, T, V]` logits, in at least float32; with a cache `(logits, cache)`.
        """
        c = self.config
        embedding = self.param("embedding", nn.initializers.normal(0.02), (c.vocab_size, c.hidden_size))
        x = embedding[tokens]
        if c.padding_token is not None:
            x = jnp.where((tokens == c.padding_token)[..., None], jax.lax.stop_gradient(x), x)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        rotation = _rotation(c, positions, x.dtype)
        written: list[KeysValues] = []
        attention, mlp = (nn.remat(Attention, static_argnums=(3,)), nn.remat(MLP)) if c.remat else (Attention, MLP)
        for index in range(c.num_layers):
            before = RMSNorm(c.norm_eps, name=f"layer_{index}_attention_norm")(x)
            mix = _causal(positions, c.sliding_window)
            if cache is not None:
                mix = _cached(cache[index], positions, c.sliding_window, written.append)
            x = x + attention(c, name=f"layer_{index}_attention")(before, rotation, mix)
            x = x + mlp(c, name=f"layer_{index}_mlp")(RMSNorm(c.norm_eps, name=f"layer_{index}_mlp_norm")(x))
        x = RMSNorm(c.norm_eps, name="final_norm")(x)
        if columns is not None:
            x = jnp.take_along_axis(x, columns[:, :, None], axis=1)
        shape = (c.hidden_size, c.vocab_size)
        head = embedding.T if c.tie_embeddings else self.param("head", nn.initializers.lecun_normal(), shape)
        logits = wide_product(x.reshape(-1, c.hidden_size), head).reshape(*x.shape[:-1], c.vocab_size)
        return logits if cache is None else (logits, tuple(written))

    def init_cache(self, rows: int, length: int, dtype: Any = jnp.float32) -> Cache:
        """An empty cache for `rows` sequences of up to `length` tokens."""
        heads, size = self.config.num_kv_heads, self.config.width_of_head

        def empty() -> KeysValues:
            return jnp.zeros((rows, heads, size, length), dtype), jnp.zeros((rows, heads, length, size), dtype)

        return tuple(empty() for _ in range(self.config.num_layers))


def _linear(config: ModelConfig, features: int, bias: bool, name: str) -> Linear:
    rank = config.lora_rank if name in config.lora_modules else 0
    return Linear(features, bias, rank, config.lora_alpha, name=name)


def _rotation(config: ModelConfig, positions: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[N, L, 1, head_dim / 2]`, behind a barrier: else they are computed for each head again."""
    width = config.width_of_head
    wide = jnp.promote_types(dtype, jnp.float32)
    inverse = config.rope_theta ** (-jnp.arange(0, width, 2, dtype=wide) / width)
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        inverse = inverse / scaling.factor
    elif scaling is not None:
        # llama3: wavelengths longer than original / low are stretched, shorter than original / high kept, between
        # them a blend.
        turns = scaling.original_length * inverse / (2 * math.pi)
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = jnp.clip(keep, 0, 1)
        inverse = keep * inverse + (1 - keep) * inverse / scaling.factor
    angles = positions[:, :, None, None].astype(wide) * inverse
    found = (jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype))
    barrier: tuple[jax.Array, jax.Array] = jax.lax.optimization_barrier(found)
    return barrier


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate heads `[N, L, heads, head_dim]`: component i turns with component i + head_dim / 2."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _causal(positions: jax.Array, window: int | None) -> Attend:
    """Each token of `[N, L]` sees those at its own and earlier positions."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return _mix(q, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), _seen(positions, positions, window))

    return attend


def _cached(cache: KeysValues, positions: jax.Array, window: int | None, keep: Callable[[KeysValues], Any]) -> Attend:
    """The same with a cache: written at `positions`, but for rows past its end, and given to `keep`."""

    def write(cache: KeysValues, positions: jax.Array, new: KeysValues) -> KeysValues:
        """One row: devices that share a batch would exchange the whole cache for a scatter over all rows."""
        keys = cache[0].at[:, :, positions].set(new[0].transpose(1, 2, 0), mode="drop")
        return keys, cache[1].at[:, positions].set(new[1].swapaxes(0, 1), mode="drop")

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        keys, values = jax.vmap(write)(cache, positions, (k.astype(cache[0].dtype), v.astype(cache[1].dtype)))
        keep((keys, values))
        seen = _seen(positions, jnp.arange(keys.shape[3])[None], window)
        return _mix(q, keys.astype(q.dtype), values.astype(q.dtype), seen)

    return attend


def _seen(positions: jax.Array, slots: jax.Array, window: int | None) -> jax.Array:
    """`[N, L, S]` whether the token at a position sees a slot."""
    seen = slots[:, None] <= positions[:, :, None]
    return seen if window is None else seen & (positions[:, :, None] - slots[:, None] < window)


def _mix(q: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array) -> jax.Array:
    """Attention of queries `[N, L, H, D]` on the slots that they see, `[N, L, S]`; sums are float32 at least."""
    many, length, size, heads = q.shape[0], q.shape[1], q.shape[3], keys.shape[1]
    grouped = q.reshape(many, length, heads, -1, size).transpose(0, 2, 3, 1, 4)  # [N, K, G, L, D]
    rows = grouped.shape[2] * length
    scores = wide_product(grouped.reshape(many, heads, rows, size), keys) / math.sqrt(size)
    scores = jnp.where(seen[:, None, None], scores.reshape(*grouped.shape[:4], -1), _NEVER)
    mass = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    mixed = wide_product(mass.astype(q.dtype).reshape(many, heads, rows, -1), values).reshape(grouped.shape)
    mixed = (mixed / jnp.sum(mass, axis=-1, keepdims=True)).astype(q.dtype)  # fewer numbers than weights to divide
    return mixed.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def wide_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x @ y`, `[..., n, k] @ [..., k, m]` of equal leading axes and types, with its sums kept in at least float32.

    For what is exponentiated afterwards, scores and logits: a sum of bfloat16 factors that is rounded to bfloat16 again
    has lost 8 of 16 bits. The gradients are rounded to the type of the factors before they are multiplied, as those of
    every other product are.
    """
    if x.dtype == jnp.promote_types(x.dtype, jnp.float32):
        return x @ y
    return _narrow_product(x, y)


@jax.custom_vjp
def _narrow_product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, preferred_element_type=jnp.float32)


def _narrow_forward(x: jax.Array, y: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _narrow_product(x, y), (x, y)


def _narrow_backward(kept: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, y = kept
    grad = grad.astype(x.dtype)
    return grad @ y.swapaxes(-1, -2), x.swapaxes(-1, -2) @ grad


_narrow_product.defvjp(_narrow_forward, _narrow_backward)
