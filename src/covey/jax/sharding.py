"""Where each array lies on a mesh of devices, by the names of the mesh's axes.

    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    axis "data"     rows of a batch are spread over it, weights are copied along it
    axis "tensor"   weights are split over it

    q, k, v, gate, up      kernel [in, out | split]     bias [out | split]     LoRA a copied, b [r, out | split]
    o, down                kernel [in | split, out]     bias copied            LoRA a [in | split, r], b copied
    embedding, head        split on the vocabulary

A product with a kernel split on its outputs, then one with a kernel split on its inputs, needs a single sum over the
devices (Megatron-LM, Shoeybi et al. 2019). The compiler puts it there: placement changes no result beyond rounding.

The rules read the last two names of an array's path, so that they hold for an optimiser's moments, which repeat the
names of the parameters. Arrays of other names or dimensions, or not divisible by the axis, are copied. So are k and v
where the axis would cut through a key-value head: the devices would exchange its parts in every layer for every token.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from covey.errors import ConfigError

DATA, TENSOR = "data", "tensor"

# Name of an array -> (number of its dimensions, the one that is split).
_Rules = dict[str, tuple[int, int]]
_SPLIT_OUTPUTS: _Rules = {"kernel": (2, 1), "bias": (1, 0), "b": (2, 1)}
_SPLIT_INPUTS: _Rules = {"kernel": (2, 0), "a": (2, 0)}
_LAYERS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), _SPLIT_OUTPUTS),
    **dict.fromkeys(("o_proj", "down_proj"), _SPLIT_INPUTS),
}
_VOCABULARY: _Rules = {"embedding": (2, 0), "head": (2, 1)}


def check_mesh(mesh: Mesh | None) -> Mesh | None:
    """The mesh, its axes left to the compiler. Those of `jax.make_mesh` are not: gathers would have to name theirs."""
    if mesh is None:
        return None
    for name in mesh.axis_names:
        if name not in (DATA, TENSOR):
            raise ConfigError(
                f"mesh axis {name!r}: prompts are spread over an axis {DATA!r} and weights over an axis {TENSOR!r}; "
                f"name it so, for example jax.make_mesh(({mesh.size},), ({DATA!r},))"
            )
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def variables_sharding(variables: Any, mesh: Mesh, model: Any = None) -> Any:
    """The same tree with the sharding of each array."""
    heads = getattr(getattr(model, "config", None), "num_kv_heads", None) or 0
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, _spec(path, leaf.shape, mesh, heads)), variables
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """That of arrays whose first axis counts prompts or responses."""
    return NamedSharding(mesh, PartitionSpec(DATA) if _size(mesh, DATA) > 1 else PartitionSpec())


def place(variables: Any, mesh: Mesh | None, model: Any = None) -> Any:
    """Arrays where `variables_sharding` says; without a mesh those of the host go to the device, others stay."""
    if mesh is None:
        return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, variables)
    return jax.device_put(variables, variables_sharding(variables, mesh, model))


def place_rows(arrays: Any, mesh: Mesh | None, counted: str = "prompts") -> Any:
    """Arrays spread on their first axis, which counts prompts or responses and must divide; scalars copied."""
    if mesh is None:
        return arrays
    parts, copied = _size(mesh, DATA), NamedSharding(mesh, PartitionSpec())
    for leaf in jax.tree.leaves(arrays):
        if leaf.ndim and leaf.shape[0] % parts:
            raise ConfigError(
                f"{counted}={leaf.shape[0]}: the {parts} parts of the mesh's axis {DATA!r} share them evenly; pass a "
                f"multiple of {parts} {counted}, or a mesh with a smaller axis"
            )
    return jax.device_put(arrays, jax.tree.map(lambda leaf: batch_sharding(mesh) if leaf.ndim else copied, arrays))


def keep_placed(variables: Any, mesh: Mesh | None, model: Any = None) -> Any:
    """Inside compiled code: arrays that will lie where `place` puts them, so that the next call need not move them."""
    if mesh is None:
        return variables
    return jax.lax.with_sharding_constraint(variables, variables_sharding(variables, mesh, model))


def _spec(path: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh, heads: int) -> PartitionSpec:
    parts = _size(mesh, TENSOR)
    layer, name = ["", "", *jax.tree_util.keystr(path, simple=True, separator="\n").split("\n")][-2:]
    dimensions, split = (_LAYERS.get(layer, {}) | _VOCABULARY).get(name, (0, 0))
    if parts == 1 or not dimensions or len(shape) != dimensions or shape[split] % parts:
        return PartitionSpec()
    if layer in ("k_proj", "v_proj") and heads % parts:
        return PartitionSpec()
    return PartitionSpec(*[None] * split, TENSOR)  # no None behind it: compiled code returns shardings without


def _size(mesh: Mesh, axis: str) -> int:
    return int(mesh.shape.get(axis, 1))
