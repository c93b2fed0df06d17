"""Training in JAX: a state, a step that is compiled once, checkpoints. What is minimised is left to a subclass."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax.training import train_state

from covey.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

Metrics = dict[str, jax.Array]
StepObserver = Callable[[int, Mapping[str, float]], None]
"""Called with the number of steps taken and the metrics of the last one."""


class TrainState(train_state.TrainState):
    """Flax's. Each step changes `step`, `opt_state` and `params`, which are as Flax's `apply` takes them:
    `{"params": ...}` or `{"lora": ...}`; `tx` is the optimiser.
    """


class Trainer(ABC):
    """The training loop around a loss.

    A subclass defines the first state (`create_train_state`) and the loss (`compute_loss`). It may also prepare batches
    outside the compiled step (`prepare_batch`) and report metrics (`loss_and_metrics`).

    Args:
        optimizer: any Optax gradient transformation, for example from `make_optimizer`.
    """

    passes_per_batch = 1

    def __init__(self, optimizer: optax.GradientTransformation) -> None:
        self.optimizer = optimizer
        self._compiled_step = jax.jit(self._step, donate_argnames=("state",))

    @abstractmethod
    def create_train_state(self, key: jax.Array, dummy_input: jax.Array) -> TrainState:
        """A state at step 0.

        Args:
            key: random key of the parameters.
            dummy_input: an input of the model; only its shape and type matter.
        """

    @abstractmethod
    def compute_loss(self, params: Any, batch: Mapping[str, Any]) -> jax.Array:
        """The scalar loss of a batch; a function that `jax.jit` and `jax.grad` accept."""

    def loss_and_metrics(self, params: Any, batch: Mapping[str, Any]) -> tuple[jax.Array, Metrics]:
        """The loss, and scalars to report with it."""
        return self.compute_loss(params, batch), {}

    def prepare_batch(self, state: TrainState, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Prepare a batch for the compiled step."""
        return batch

    def train_step(self, state: TrainState, batch: Mapping[str, Any]) -> tuple[TrainState, Metrics]:
        """One optimiser step, compiled for each shape of batch.

        If the gradient is zero everywhere or not finite, only the step count changes. Otherwise momentum would move the
        weights without a reason.

        Returns:
            The next state, and scalars: `loss`, `grad_norm` before clipping, `updated` (1 or 0), and those of
            `loss_and_metrics`.
        """
        ready = self.prepare_batch(state, batch)
        return self._advance(jax.tree.map(jnp.copy, state), ready)

    def _advance(self, state: TrainState, ready: Mapping[str, Any]) -> tuple[TrainState, Metrics]:
        """The compiled step on a prepared batch, which writes to the memory of the state that it is given."""
        found: tuple[TrainState, Metrics] = self._compiled_step(state, ready)
        return found

    def _step(self, state: TrainState, batch: Mapping[str, Any]) -> tuple[TrainState, Metrics]:
        (loss, metrics), grads = jax.value_and_grad(self.loss_and_metrics, has_aux=True)(state.params, batch)
        norm = optax.tree.norm(grads)
        moves = jnp.isfinite(norm) & (norm > 0)
        moved = state.apply_gradients(grads=grads)
        new, old = ((each.params, each.opt_state) for each in (moved, state))
        kept = jax.tree.map(partial(jnp.where, moves), new, old)
        after = moved.replace(params=kept[0], opt_state=kept[1])
        return after, metrics | {"loss": loss, "grad_norm": norm, "updated": moves.astype(jnp.int32)}

    def train(
        self,
        state: TrainState,
        batches: Iterable[Mapping[str, Any]],
        *,
        max_steps: int | None = None,
        on_step: StepObserver | None = None,
        checkpoint_folder: str | Path | None = None,
        save_steps: int = 0,
    ) -> TrainState:
        """Train on batches in order, `passes_per_batch` steps on each.

        The state is copied once, at the beginning. Then each step reuses the memory of the one before, which
        `train_step` by itself does not.

        Args:
            state: the first state. To resume, load it and skip the batches that it has seen.
            batches: batches for `prepare_batch`.
            max_steps: stop when `state.step` reaches this; None = when the batches end.
            on_step: called after each step.
            checkpoint_folder: folder for checkpoints.
            save_steps: write a checkpoint every this many steps; 0 = never. Checkpoints are written between batches,
                never between passes over one.

        Returns the state after the last step.

        Raises `ConfigError`: `save_steps` is set without a folder.
        """
        if save_steps and checkpoint_folder is None:
            raise ConfigError(f"save_steps={save_steps}: there is nowhere to save to; pass checkpoint_folder")
        taken = saved = int(state.step)
        state = jax.tree.map(jnp.copy, state)
        for batch in batches:
            if max_steps is not None and taken >= max_steps:
                break
            ready = self.prepare_batch(state, batch)
            for _ in range(self.passes_per_batch):
                state, metrics = self._advance(state, ready)
                taken += 1
                if on_step is not None:
                    on_step(taken, {name: float(value) for name, value in metrics.items()})
            if save_steps and checkpoint_folder is not None and taken - saved >= save_steps:
                self.save_checkpoint(state, checkpoint_folder)
                saved = taken
        return state

    def constants(self) -> dict[str, Any]:
        """Arrays outside the state that are saved with it and that a resumed run needs unchanged."""
        return {}

    def set_constants(self, constants: Mapping[str, Any]) -> None:  # noqa: B027 (most trainers have none)
        """Restore the arrays that `constants` returned when the checkpoint was written."""

    def save_checkpoint(self, state: TrainState, folder: str | Path) -> Path:
        """Write the state to `folder/STEP`; the folder appears only when it is complete.

        Returns the folder written.

        Raises `CheckpointError`: there is already a checkpoint of this step, or the folder cannot be written.
        """
        path = Path(folder).absolute() / str(int(state.step))
        if path.exists():
            raise CheckpointError(f"{path}: there is a checkpoint of this step already; choose another folder")
        try:
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(path, self._tree(state))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written ({error}); choose another folder") from error
        return path

    def load_checkpoint(self, folder: str | Path, state: TrainState) -> TrainState:
        """Read the newest checkpoint of a folder.

        Args:
            folder: the folder given to `save_checkpoint`, or one `STEP` folder in it.
            state: from `create_train_state`, for shapes, types, placement and the optimiser.

        Raises `CheckpointError`: there is no checkpoint, it is damaged, or it belongs to another model or optimiser.
        """
        path = Path(folder).absolute()
        if not (path.name.isdigit() and path.is_dir()):
            steps = [entry for entry in path.glob("*") if entry.name.isdigit()]
            if not steps:
                raise CheckpointError(f"{path}: holds no checkpoint; name the folder that save_checkpoint was given")
            path = max(steps, key=lambda entry: int(entry.name))
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, self._tree(state))
        try:
            with ocp.StandardCheckpointer() as checkpointer:
                tree = checkpointer.restore(path, target)
        except Exception as error:  # Orbax raises whatever its storage does
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CheckpointError(
                f"{path}: cannot be restored ({reason}); use the model, LoRA rank and optimiser that wrote it"
            ) from error
        self.set_constants(tree["constants"])
        return state.replace(step=tree["step"], params=tree["params"], opt_state=tree["opt_state"])

    def _tree(self, state: TrainState) -> dict[str, Any]:
        parts = {"step": jnp.asarray(state.step), "params": state.params, "opt_state": state.opt_state}
        return parts | {"constants": self.constants()}


def make_optimizer(
    learning_rate: float,
    *,
    lr_scheduler_type: str = "constant",
    warmup_steps: int = 0,
    max_steps: int | None = None,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.999),
) -> optax.GradientTransformation:
    """AdamW with gradient clipping and the schedules of the PyTorch trainer.

    Args:
        learning_rate: learning rate after warm-up.
        lr_scheduler_type: `constant`, or `linear` or `cosine` down to 0 at `max_steps`.
        warmup_steps: steps over which the learning rate rises from 0.
        max_steps: length of the run, for `linear` and `cosine`.
        weight_decay: of AdamW.
        max_grad_norm: larger gradients are scaled down to this norm; 0 = never.
        betas: of AdamW.

    Raises `ConfigError`: the schedule is unknown, or needs `max_steps` above `warmup_steps`.
    """
    if lr_scheduler_type not in ("constant", "linear", "cosine"):
        raise ConfigError(f"lr_scheduler_type={lr_scheduler_type!r}: no such schedule; use constant, linear or cosine")
    rate: optax.Schedule
    if lr_scheduler_type == "constant":
        rate = optax.constant_schedule(learning_rate)
    elif max_steps is None or max_steps <= warmup_steps:
        told = f"max_steps={max_steps}: schedule {lr_scheduler_type!r} ends there"
        raise ConfigError(f"{told}; set it above warmup_steps={warmup_steps}")
    elif lr_scheduler_type == "linear":
        rate = optax.linear_schedule(learning_rate, 0.0, max_steps - warmup_steps)
    else:
        rate = optax.cosine_decay_schedule(learning_rate, max_steps - warmup_steps)
    if warmup_steps:
        rate = optax.join_schedules([optax.linear_schedule(0.0, learning_rate, warmup_steps), rate], [warmup_steps])
    adamw = optax.adamw(rate, b1=betas[0], b2=betas[1], weight_decay=weight_decay)
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), adamw) if max_grad_norm > 0 else adamw
