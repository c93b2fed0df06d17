"""The parts of a step by the names of grpo-architecture.md, for those who write the loop themselves.

    rollout = trainer.rollout()
    loss = trainer.compute_loss(rollout)
    trainer.learner.optim_step(1e-5)
    trainer.engine.sync(trainer.policy_model, trainer.state.policy_version)

`GRPOTrainer.train` does the same with counters, checkpoints and evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from covey.rollout.collect import Rollout
from covey.training import setup
from covey.training.update import update

if TYPE_CHECKING:
    from covey.rollout.learning import Learner
    from covey.training.trainer import GRPOTrainer


class StepByStep:
    """`policy_model`, `ref_model`, `rollout` and `compute_loss` of a `GRPOTrainer`."""

    @property
    def policy_model(self) -> Any:
        """The model that is trained, its adapter in it."""
        return cast("GRPOTrainer", self).policy.model

    @property
    def ref_model(self) -> Any:
        """The frozen reference, called like the model; None where nothing compares with it (`beta` 0).

        With LoRA it is the same network with the adapter off, no second copy.
        """
        trainer = cast("GRPOTrainer", self)
        return cast(Any, trainer.policy).reference if setup.needs_reference(trainer.args) else None

    def rollout(self, rows: Sequence[Mapping[str, Any]] | None = None) -> Rollout:
        """Sample `num_generations` completions of each prompt with the present weights, and score them.

        Args:
            rows: like those of `train_dataset`; None = the prompts of the next step. The data's position stays.

        Returns:
            A group for each prompt; `rewards` of a group are `[num_generations]`.
        """
        trainer = cast("GRPOTrainer", self)
        phase, state = trainer.phases.at(trainer._progress()), trainer.state
        if rows is None:
            prompts, streams = trainer._next_prompts(state.data_position, trainer.args.data.prompts_per_step)
        else:
            prompts = trainer._tokenize(rows)
            _, streams = trainer._next_prompts(state.data_position, len(prompts))
        return trainer.collect(
            prompts,
            setup.sampling_settings(trainer.args, trainer.policy, phase.temperature),
            num_generations=phase.num_generations,
            streams=streams,
            policy_version=state.policy_version,
        )

    def compute_loss(self, rollout: Rollout) -> float:
        """The loss of a whole step, KL, masks and all, as `train` computes it in its first pass over the rollout.

        Its gradient is left in the parameters of `policy_model`, for `learner.optim_step`. The forward passes are
        split by `tokens_per_micro_batch`, which is why a number is returned and no graph. 0 where nothing can be
        learned: every advantage is 0, or every token masked.
        """
        trainer = cast("GRPOTrainer", self)
        phase = trainer.phases.at(trainer._progress())
        batch, settings = trainer.make_batch(rollout.groups, phase), setup.update_settings(trainer.args, phase)
        done = update(cast("Learner", _WithoutStep(trainer.learner)), batch, replace(settings, num_iterations=1), 0.0)
        return float(done.metrics["loss"])


class _WithoutStep:
    """A learner that leaves its gradient where it is."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def optim_step(self, learning_rate: float) -> float:
        return 0.0
