"""Arrays lie on a mesh by their names, and the numbers stay what they are on one device."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax_cases import make_trainer, small_transformer

import covey
from covey.errors import ConfigError
from covey.jax.sharding import batch_sharding, place_rows, variables_sharding

MESH: Any = AbstractMesh((2, 4), ("data", "tensor"))
SPLIT: list[Any] = [(("q_proj", "kernel"), (8, 16), (8, 4)), (("q_proj", "bias"), (16,), (4,))]
SPLIT += [(("gate_proj", "a"), (8, 2), (8, 2)), (("gate_proj", "b"), (2, 16), (2, 4))]
SPLIT += [(("down_proj", "kernel"), (16, 8), (4, 8)), (("o_proj", "bias"), (8,), (8,))]
SPLIT += [(("o_proj", "a"), (16, 2), (4, 2)), (("o_proj", "b"), (2, 8), (2, 8)), (("norm", "scale"), (8,), (8,))]
SPLIT += [(("params", "embedding"), (12, 8), (3, 8)), (("params", "head"), (8, 12), (8, 3))]
SPLIT += [(("params", "head"), (8, 13), (8, 13))]  # 13 tokens over 4 devices: copied
SPLIT += [(("q_proj", "kernel"), (8, 4, 4), (8, 4, 4))]  # other dimensions
SPLIT += [(("dense", "kernel"), (8, 16), (8, 16))]  # another name


def shapes_on(tree: Any, mesh: Any = MESH, model: Any = None) -> list[tuple[int, ...]]:
    """What one device has of each array."""
    places = jax.tree.leaves(variables_sharding(tree, mesh, model))
    return [at.shard_shape(x.shape) for x, at in zip(jax.tree.leaves(tree), places, strict=True)]


@pytest.mark.parametrize(("names", "shape", "part"), SPLIT)
def test_names_say_what_is_split(names: tuple[str, str], shape: tuple[int, ...], part: tuple[int, ...]) -> None:
    tree = {names[0]: {names[1]: np.zeros(shape)}}
    assert shapes_on(tree) == [part]
    assert shapes_on({"moments": (tree, 0 * tree[names[0]][names[1]])}) == [part, shape]
    assert shapes_on(tree, AbstractMesh((8,), ("data",))) == [shape]


def test_key_value_heads_stay_whole_and_prompts_are_spread_over_the_data_axis() -> None:
    """Two heads over four devices are copied, however wide they are."""
    tree = {name: {"kernel": np.zeros((8, 16))} for name in ("k_proj", "q_proj")}
    assert shapes_on(tree, model=small_transformer(num_kv_heads=4)) == [(8, 4), (8, 4)]
    assert shapes_on(tree, model=small_transformer(num_kv_heads=2)) == [(8, 16), (8, 4)]
    assert batch_sharding(MESH).shard_shape((6, 5)) == (3, 5)
    assert batch_sharding(AbstractMesh((4,), ("tensor",))).shard_shape((6, 5)) == (6, 5)
    with pytest.raises(ConfigError, match=r"responses=3: the 2 parts .* pass a multiple of 2 responses"):
        place_rows({"mask": np.zeros((3, 4)), "steps": np.zeros(())}, MESH, "responses")
    with pytest.raises(ConfigError, match=r"mesh axis 'model': prompts .* 'data' and weights .* 'tensor'; name it so"):
        make_trainer(mesh=jax.make_mesh((1,), ("model",)))


@pytest.mark.parametrize("optimizer", [optax.adamw(0.1), optax.sgd(0.1, momentum=0.9), optax.adafactor(0.1)])
def test_optimiser_state_follows_the_parameters(optimizer: Any) -> None:
    """Moments of a parameter's shape lie where it lies; Adafactor's row and column sums are copied."""
    state = jax.eval_shape(optimizer.init, {"q_proj": {"kernel": jnp.zeros((128, 256))}})
    for leaf, part in zip(jax.tree.leaves(state), shapes_on(state), strict=True):
        assert part == ((128, 64) if leaf.shape == (128, 256) else leaf.shape)


@pytest.mark.parametrize(
    "meshes",
    [("data 2, tensor 4",), pytest.param(("data 8", "tensor 8", "data 2, tensor 4"), marks=pytest.mark.slow)],
    ids=["one mesh", "all"],
)
def test_a_mesh_changes_nothing_but_where_it_runs(meshes: tuple[str, ...], tmp_path: Path) -> None:
    """Tokens, losses, gradients, steps and resumed runs, in a process of eight devices."""
    here = Path(__file__).parent
    environment = {
        "PYTHONPATH": os.pathsep.join([str(Path(covey.__file__).parent.parent), str(here)]),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "NPROC": "64",  # threads of the pool that sums over devices wait on; see docs/internals.md
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
    }
    command = [sys.executable, "-W", "error", str(here / "sharding_checks.py"), str(tmp_path), *meshes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | environment)
    assert done.stdout.strip() == "same", done.stderr[-3000:]
