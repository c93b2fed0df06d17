"""The decoder as a loop over its layers, for training: one layer is compiled, whatever their number.

Parameters of all layers stand in one array, with an axis for the layer in front:

    {"embedding": ..., "final_norm": ..., "head": ..., "layers": {
        "attention_norm": ..., "attention": {"q_proj": {"kernel": [layers, in, out]}, ...}, "mlp_norm": ..., "mlp": ...
    }}

The backward pass keeps the input of each layer and computes the rest again. That takes no longer than reading and
writing all that a layer leaves behind, and a tenth of the memory.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from covey.jax.attention import Attend
from covey.jax.model import MLP, Attention, ModelConfig, RMSNorm, rotation_of
from covey.jax.sharding import LAYERS

_PARTS = ("attention_norm", "attention", "mlp_norm", "mlp")


def stack(tree: Any, count: int) -> Any:
    """Parameters or LoRA factors of `Transformer` with `count` layers -> the same, stacked. What is stacked stays, and
    what is on the host stays there.
    """
    if LAYERS in tree:
        return tree
    found = {name: value for name, value in tree.items() if not name.startswith("layer_")}
    layers = {}
    for part in _PARTS:
        each = [tree[f"layer_{index}_{part}"] for index in range(count) if f"layer_{index}_{part}" in tree]
        if each:
            layers[part] = jax.tree.map(_stacked, *each)
    return found | {LAYERS: layers}


def _stacked(*leaves: Any) -> Any:
    return np.stack(leaves) if all(isinstance(leaf, np.ndarray) for leaf in leaves) else jnp.stack(leaves)


def unstack(tree: Any, count: int) -> Any:
    """Turn what `stack` returned into parameters or factors of `Transformer` again."""
    if LAYERS not in tree:
        return tree
    found = {name: value for name, value in tree.items() if name != LAYERS}
    for part, values in tree[LAYERS].items():
        for index in range(count):
            found[f"layer_{index}_{part}"] = jax.tree.map(lambda leaf, at=index: leaf[at], values)
    return found


def hidden_states(config: ModelConfig, variables: Any, tokens: jax.Array, positions: jax.Array, attend: Attend) -> Any:
    """`[N, L, hidden]`: what the output head reads.

    Args:
        config: the model's shape.
        variables: stacked `params`, and `lora` or none.
        tokens: `[N, L]`.
        positions: `[N, L]`.
        attend: who sees whom, from `covey.jax.attention`.
    """
    params, lora = variables["params"], variables.get("lora", {LAYERS: {}})
    x = params["embedding"][tokens]
    rotation = rotation_of(config, positions, x.dtype)
    norm, attention, mlp = RMSNorm(config.norm_eps), Attention(config), MLP(config)

    @jax.checkpoint
    def layer(x: jax.Array, of: Any) -> tuple[jax.Array, None]:
        own, factors = of

        def given(part: str) -> dict[str, Any]:
            return {"params": own[part]} | ({"lora": factors[part]} if part in factors else {})

        before: Any = norm.apply(given("attention_norm"), x)
        mixed: Any = attention.apply(given("attention"), before, rotation, attend)
        x = x + mixed
        before = norm.apply(given("mlp_norm"), x)
        out: Any = mlp.apply(given("mlp"), before)
        return x + out, None

    x, _ = jax.lax.scan(layer, x, (params[LAYERS], lora[LAYERS]))
    return norm.apply({"params": params["final_norm"]}, x)
