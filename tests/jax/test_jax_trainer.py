"""The loop around a loss, here a parabola: steps, schedules, exact resume; the same numbers on a mesh of devices."""

import itertools
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.sharding import AbstractMesh
from jax_cases import PROMPTS, make_trainer, small_transformer

import covey
from covey.errors import CheckpointError, ConfigError
from covey.jax import Trainer, TrainState, make_optimizer
from covey.jax.sharding import batch_sharding, place_rows, variables_sharding
from fakes import raises

ONE = {"scale": np.float32(1.0)}  # an array of JAX would start it in every process that collects tests


class Parabola(Trainer):
    def create_train_state(self, key: jax.Array, dummy_input: jax.Array) -> TrainState:
        return TrainState.create(apply_fn=None, params={"x": jnp.asarray(dummy_input, float)}, tx=self.optimizer)

    def compute_loss(self, params: Any, batch: Mapping[str, Any]) -> jax.Array:
        return jnp.sum(batch["scale"] * params["x"] ** 2)


def parabola(optimizer: Any, *begin: float) -> tuple[Parabola, TrainState]:
    trainer = Parabola(optimizer)
    return trainer, trainer.create_train_state(jax.random.key(0), jnp.asarray(begin))


def test_a_step_by_hand_and_the_loop_counts_saves_and_stops(tmp_path: Path) -> None:
    trainer, state = parabola(optax.sgd(0.25), 3.0, 4.0)
    state, metrics = trainer.train_step(state, ONE)
    assert state.params["x"].tolist() == [1.5, 2.0]  # x - 0.25 · 2 x
    assert (int(state.step), float(metrics["loss"]), float(metrics["grad_norm"])) == (1, 25, 10)
    trainer, state = parabola(optax.sgd(0.1), 3.0)
    seen: list[int] = []
    saving: dict[str, Any] = {"checkpoint_folder": tmp_path, "save_steps": 2}
    trainer.train(state, [ONE] * 9, max_steps=5, on_step=lambda step, metrics: seen.append(step), **saving)
    assert (seen, sorted(p.name for p in tmp_path.iterdir())) == ([1, 2, 3, 4, 5], ["2", "4"])
    raises(ConfigError, "save_steps=1: there is nowhere", trainer.train, state, [ONE], save_steps=1)


@pytest.mark.parametrize("scale", [0.0, np.nan, np.inf])
def test_a_gradient_that_is_zero_or_not_finite_moves_nothing(scale: float) -> None:
    """Not even by momentum."""
    trainer, state = parabola(optax.adam(0.1), 3.0)
    state, _ = trainer.train_step(state, ONE)
    after, metrics = trainer.train_step(state, {"scale": jnp.asarray(scale)})
    assert (int(after.step), int(metrics["updated"])) == (2, 0)
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.opt_state), (state.params, state.opt_state))


def test_the_loop_keeps_one_state() -> None:
    """`train` steps in place on a copy; `train_step` leaves what it is given alone, and both give the same numbers."""
    trainer, state = make_trainer(small_transformer(lora_rank=2), kl_coeff=0.1)
    held, program, batch = list[Any](), trainer._compiled_step, {"prompts": PROMPTS}

    def watched(state: Any, ready: Any) -> Any:
        held.append(jax.tree.leaves((state.params, state.opt_state)))
        return program(state, ready)

    trainer._compiled_step = watched  # type: ignore[assignment]
    after = trainer.train(state, [batch, batch])
    assert len(held) == 2
    assert not any(array.is_deleted() for array in jax.tree.leaves(state))
    assert all(array.is_deleted() for array in itertools.chain(*held))
    once, _ = trainer.train_step(state, batch)
    twice, _ = trainer.train_step(once, batch)
    jax.tree.map(np.testing.assert_array_equal, after.params, twice.params)


def test_resume_gives_the_same_numbers(tmp_path: Path) -> None:
    """Two steps, saved, loaded into a new process's objects, two more: bit for bit the four steps in one go."""
    model = small_transformer(lora_rank=2)
    optimizer = make_optimizer(0.05, lr_scheduler_type="cosine", warmup_steps=1, max_steps=4, weight_decay=0.1)
    batches = [{"prompts": PROMPTS}] * 4
    how = {"optimizer": optimizer, "loss_type": "grpo", "adv_estimator": "grpo"}
    trainer, begin = make_trainer(model, **how)
    whole, half = trainer.train(begin, batches), trainer.train(begin, batches[:2])
    trainer.save_checkpoint(half, tmp_path)
    other, fresh = make_trainer(model, **how)
    resumed = other.load_checkpoint(tmp_path, fresh)
    assert int(resumed.step) == 2
    resumed = other.train(resumed, batches[2:])
    jax.tree.map(np.testing.assert_array_equal, (whole.params, whole.opt_state), (resumed.params, resumed.opt_state))
    assert any((x != 0).any() for x in jax.tree.leaves(whole.params["lora"]))
    jax.tree.map(np.testing.assert_array_equal, trainer.frozen_params, other.frozen_params)


def test_a_checkpoint_holds_the_reference_and_what_is_wrong_with_one_is_said(tmp_path: Path) -> None:
    trainer, state = make_trainer()
    raises(CheckpointError, "holds no checkpoint", trainer.load_checkpoint, tmp_path, state)
    trainer.ref_params = {"params": {"table": jnp.full((7, 7), 0.5)}}
    trainer.save_checkpoint(state, tmp_path)
    raises(CheckpointError, "already", trainer.save_checkpoint, state, tmp_path)
    other, fresh = make_trainer()
    assert other.load_checkpoint(tmp_path, fresh).params["params"]["table"].tolist()
    assert (other.ref_params["params"]["table"] == 0.5).all()
    other, wrong = make_trainer(optimizer=optax.sgd(0.1))
    raises(CheckpointError, "cannot be restored", other.load_checkpoint, tmp_path, wrong)


def test_steps_of_the_optimiser_are_those_of_pytorch() -> None:
    """AdamW behind a clipped gradient, with weight decay and a rate that rises."""
    rng = np.random.default_rng(0)
    ours: Any = {"a": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32), "b": jnp.asarray([2.0, -1.0])}
    theirs = {name: torch.nn.Parameter(torch.tensor(np.asarray(x))) for name, x in ours.items()}
    optimizer = make_optimizer(0.1, warmup_steps=2, weight_decay=0.3, max_grad_norm=0.5, betas=(0.8, 0.9))
    adamw = torch.optim.AdamW(theirs.values(), lr=0.1, weight_decay=0.3, betas=(0.8, 0.9))
    state = optimizer.init(ours)
    for rate, size in ((0.0, 1.0), (0.05, 0.01), (0.1, 3.0)):  # the second is not clipped
        gradient = {name: size * rng.normal(size=x.shape).astype(np.float32) for name, x in ours.items()}
        updates, state = optimizer.update(jax.tree.map(jnp.asarray, gradient), state, ours)
        ours = optax.apply_updates(ours, updates)
        for name, parameter in theirs.items():
            parameter.grad = torch.from_numpy(gradient[name])
        torch.nn.utils.clip_grad_norm_(theirs.values(), 0.5)
        adamw.param_groups[0]["lr"] = rate
        adamw.step()
    for name, parameter in theirs.items():
        np.testing.assert_allclose(ours[name], parameter.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_schedules() -> None:
    """The learning rate read off what SGD-like first updates of AdamW move: |Δ| = rate, for a constant gradient."""

    def rates(**settings: Any) -> list[float]:
        optimizer, x = make_optimizer(1.0, max_grad_norm=0, **settings), jnp.zeros(1)
        state, moves = optimizer.init(x), []
        for _ in range(4):
            updates, state = optimizer.update(jnp.ones(1), state, x)
            moves.append(round(-float(updates[0]), 3))
        return moves

    assert (rates(), rates(warmup_steps=2)) == ([1, 1, 1, 1], [0, 0.5, 1, 1])
    assert rates(lr_scheduler_type="linear", max_steps=4) == [1, 0.75, 0.5, 0.25]
    assert rates(lr_scheduler_type="cosine", max_steps=4) == [1, 0.854, 0.5, 0.146]
    raises(ConfigError, "lr_scheduler_type='step'", make_optimizer, 1.0, lr_scheduler_type="step")
    with pytest.raises(ConfigError, match=r"max_steps=3.*warmup_steps=3"):
        make_optimizer(1.0, lr_scheduler_type="linear", max_steps=3, warmup_steps=3)


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
