"""Run by test_jax_trainer.py in a process of eight devices: `python sharding_checks.py EMPTY_FOLDER MESH...`."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax_cases import VOCAB, make_trainer, moved, small_transformer

from covey.errors import ConfigError, RewardError
from covey.jax import GRPOTrainer, TrainState, jax_reward
from covey.jax.sharding import variables_sharding

PROMPTS = [[2, 3], [4], [5, 6, 2], [3, 3, 3], [7], [8, 9], [10, 11], [12]]
BATCH = {"prompts": PROMPTS, "columns": {"wanted": np.arange(8) % 2}}
MESHES: dict[str, Any] = {"none": None, "data 8": ((8,), ("data",)), "tensor 8": ((8,), ("tensor",))}
MESHES["data 2, tensor 4"] = ((2, 4), ("data", "tensor"))
SETTINGS: dict[str, Any] = {"loss_type": "grpo", "adv_estimator": "grpo", "kl_estimator": "k3"}
SETTINGS |= {"kl_coeff": 0.1, "max_completion_length": 3, "optimizer": optax.sgd(0.1, momentum=0.9)}


@jax_reward
def parity(responses: Any, mask: Any, wanted: Any) -> Any:
    return ((responses % 2 == wanted[:, None]) & mask).sum(-1) / mask.sum(-1)


def trainer_on(name: str, rank: int = 0) -> tuple[GRPOTrainer, TrainState]:
    """A trainer on a mesh, its reference some way off the policy."""
    mesh = None if MESHES[name] is None else jax.make_mesh(*MESHES[name])
    shape: dict[str, Any] = {"vocab_size": 16, "num_heads": 8, "num_kv_heads": 4, "head_dim": 4}
    model = small_transformer(**shape, qkv_bias=True, out_bias=True, lora_rank=rank)
    trainer, state = make_trainer(model, parity, mesh=mesh, **SETTINGS)
    if not rank:
        trainer.ref_params = moved(numbers(state.params))  # on the first device
    return trainer, state


def numbers(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def assert_close(one: Any, other: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11), numbers(one), numbers(other))


def placement(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)


def check_numbers(folder: Path, meshes: list[str]) -> Any:
    """Two steps on a record: the same tokens, losses, moments (so gradients) and parameters on each mesh."""
    first: dict[str, Any] = {}
    for name in ("none", *meshes):
        trainer, begin = trainer_on(name)
        record = trainer.rollout(begin.params, trainer.prepare_batch(begin, BATCH))
        one, metrics = trainer.train_step(begin, record)
        two, again = trainer.train_step(one, record)
        found = {"tokens": record["tokens"], "losses": (metrics["loss"], again["loss"])}
        found |= {"opt_state": (one.opt_state, two.opt_state), "params": (one.params, two.params)}
        first = first or numbers(found)
        np.testing.assert_array_equal(first["tokens"], record["tokens"])
        assert_close(first, found)
        assert abs(first["losses"][0]) > 0.01
        assert trainer._compiled_step._cache_size() == 1
        if name == "none":
            continue
        assert placement(two) == placement(begin)
        assert placement(begin.params) == variables_sharding(begin.params, trainer.mesh, trainer.policy_model)
        assert placement(two.opt_state[0].trace) == placement(two.params) == placement(trainer.ref_params)
        assert record["responses"].sharding.shard_shape((32, 3)) == (32 // trainer.mesh.shape.get("data", 1), 3)
        if name == "data 8":
            other = trainer, begin, record
        if name == "data 2, tensor 4":
            check_compiled_sampling(trainer, begin, one, metrics)
            check_resume(folder, trainer, begin, one, two, record)
            if "data 8" in meshes:  # a checkpoint written on one mesh goes on on another
                check_resume_elsewhere(folder, *other, two)
    return {name: value for name, value in record.items() if name != "constants"}


def check_compiled_sampling(trainer: GRPOTrainer, begin: TrainState, one: TrainState, metrics: Any) -> None:
    """Sampling and the reward inside of the step: the same step as on the record."""
    inside, same = trainer.train_step(begin, BATCH)
    assert_close((one.params, metrics["loss"]), (inside.params, same["loss"]))
    trainer.train_step(inside, BATCH)
    assert trainer._compiled_step._cache_size() == 2  # one for records, one for prompts
    with pytest.raises(ConfigError, match=r"prompts=3: the 2 parts of .* pass a multiple of 2 prompts"):
        trainer.train_step(begin, {"prompts": [[2], [3], [4]]})


def check_resume(folder: Path, trainer: GRPOTrainer, begin: Any, one: Any, two: Any, record: Any) -> None:
    """Bit for bit, and every array where it was."""
    trainer.save_checkpoint(one, folder)
    reference, places = numbers(trainer.ref_params), placement(trainer.ref_params)
    fresh = trainer.create_train_state(jax.random.key(3), jnp.zeros((1, 4), jnp.int32))
    assert_close(begin.params, fresh.params)  # made on the mesh, and made on one device
    resumed = trainer.load_checkpoint(folder, fresh)
    assert placement(resumed) == placement(fresh) == placement(one)
    assert placement(trainer.ref_params) == places
    jax.tree.map(np.testing.assert_array_equal, reference, numbers(trainer.ref_params))
    resumed, _ = trainer.train_step(resumed, {**record, "constants": trainer._given()})
    jax.tree.map(np.testing.assert_array_equal, numbers(two), numbers(resumed))
    assert trainer._compiled_step._cache_size() == 2


def check_resume_elsewhere(folder: Path, trainer: GRPOTrainer, begin: TrainState, record: Any, two: TrainState) -> None:
    resumed = trainer.load_checkpoint(folder, begin)
    assert placement(resumed) == placement(begin)
    resumed, _ = trainer.train_step(resumed, {**record, "constants": trainer._given()})
    assert_close(two.params, resumed.params)
    assert trainer._compiled_step._cache_size() == 1


def check_lora(record: Any) -> None:
    """Factors are split like their kernels. The record is of another policy, and lies elsewhere."""
    found = []
    for name in ("none", "data 2, tensor 4"):
        trainer, state = trainer_on(name, rank=2)
        state = state.replace(params=jax.device_put(moved(state.params), placement(state.params)))
        after, metrics = trainer.train_step(state, numbers(record))
        found.append(numbers((metrics["loss"], after.params, after.opt_state)))
    assert_close(*found)
    for placed in (after.params, trainer.frozen_params):
        assert placement(placed) == variables_sharding(placed, trainer.mesh, trainer.policy_model)


def check_another_module() -> None:
    """A table of seven: copied. With Adam, a Python reward, passes of 4 rows, a mesh not by `jax.make_mesh`."""
    batch, found = {"prompts": [[2, 3], [4], [5, 6, 2], [3, 3, 3]]}, []
    for mesh, size in ((None, None), (Mesh(np.array(jax.devices()[:4]), ("data",)), 4)):
        trainer, state = make_trainer(mesh=mesh, rows_per_pass=size)
        state, metrics = trainer.train_step(state, batch)
        state, _ = trainer.train_step(state, batch)
        assert trainer._compiled_step._cache_size() == 1
        found.append(numbers((metrics["loss"], state.params)))
    assert_close(*found)
    assert abs(found[0][0]) > 1e-3
    table = state.params["params"]["table"]
    assert table.sharding.shard_shape(table.shape) == (VOCAB, VOCAB)

    def fails(responses: Any) -> Any:
        raise ValueError("no")

    trainer, state = make_trainer(reward=fails, mesh=mesh)
    with pytest.raises(RewardError, match="ValueError: no"):  # and no device waits for the one that called it
        trainer.train_step(state, batch)


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_enable_x64", True)
    assert len(jax.devices()) == 8
    record = check_numbers(Path(sys.argv[1]), sys.argv[2:])
    if len(sys.argv) > 3:
        check_lora(record)
        check_another_module()
    print("same")
