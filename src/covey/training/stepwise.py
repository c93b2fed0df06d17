"""A trainer's parts one at a time, for those who write the loop themselves, by the names of grpo-architecture.md.

    rollout = trainer.rollout()
    loss = trainer.compute_loss(rollout)
    trainer.learner.optim_step(1e-5)
    trainer.publish()

`GRPOTrainer.train` does the same with counters, checkpoints and evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from covey.config import GRPOConfig
from covey.config_effects import uses_reference
from covey.rollout.collect import Collector, Rollout
from covey.rollout.learning import Learner
from covey.training import setup
from covey.training.schedule import PhasePlan
from covey.training.state import TrainerState
from covey.training.update import update

COMPLETION_STREAM = 3
"""Second entry of the random streams of `complete`."""


class StepByStep:
    """`policy_model`, `ref_model`, `rollout` and `compute_loss` of a `GRPOTrainer`, whose attributes they read."""

    args: GRPOConfig
    policy: Any
    learner: Learner
    phases: PhasePlan
    state: TrainerState
    collect: Collector
    make_batch: Any
    _tokenize: Any
    _next_prompts: Any
    _elapsed: Any

    @property
    def policy_model(self) -> Any:
        """The model that is trained, its adapter in it."""
        return self.policy.model

    @property
    def ref_model(self) -> Any:
        """The frozen reference, called like the model; None where nothing compares with it (`beta` 0).

        With LoRA it is the same network with the adapter off, no second copy.
        """
        return self.policy.reference if uses_reference(self.args) else None

    def rollout(self, rows: Sequence[Mapping[str, Any]] | None = None) -> Rollout:
        """Sample `num_generations` completions of each prompt with the present weights, and score them.

        Args:
            rows: like those of `train_dataset`; None = the prompts of the next step. The data's position stays.

        Returns:
            A group for each prompt; `rewards` of a group are `[num_generations]`.
        """
        phase, state = self.phases.at(self._elapsed()), self.state
        prompts = None if rows is None else self._tokenize(rows)
        count = self.args.data.prompts_per_step if prompts is None else len(prompts)
        following, streams = self._next_prompts(state.data_position, count)
        return self.collect(
            following if prompts is None else prompts,
            setup.sampling_settings(self.args, self.policy, phase.temperature),
            num_generations=phase.num_generations,
            streams=streams,
            policy_version=state.policy_version,
        )

    def complete(self, rows: Sequence[Mapping[str, Any]], num_generations: int = 1) -> Rollout:
        """Sample completions of other prompts with the present weights, at the temperature of training.

        Args:
            rows: like those of `train_dataset`, with the columns that the reward functions need.
            num_generations: completions of each.
        """
        return self.collect(
            self._tokenize(rows),
            setup.sampling_settings(self.args, self.policy, self.args.sampling.temperature),
            num_generations=num_generations,
            streams=[(self.args.run.seed, COMPLETION_STREAM, self.state.global_step, row) for row in range(len(rows))],
            policy_version=self.state.policy_version,
        )

    def compute_loss(self, rollout: Rollout) -> float:
        """The loss of a whole step, KL, masks and all, as `train` computes it in its first pass over the rollout.

        Its gradient is left in the parameters of `policy_model`, for `learner.optim_step`. The forward passes are
        split by `tokens_per_micro_batch`, which is why a number is returned and no graph. 0 where nothing can be
        learned: every advantage is 0, or every token masked.
        """
        phase = self.phases.at(self._elapsed())
        batch = self.make_batch(rollout.groups, phase)
        without_step: Any = SimpleNamespace(
            scores=self.learner.scores,
            forward_backward=self.learner.forward_backward,
            optim_step=lambda learning_rate: 0.0,
        )
        done = update(
            without_step,
            batch,
            setup.algorithm_in(self.args, phase).model_copy(update={"num_iterations": 1, "num_minibatches": 1}),
            0.0,
            temperature=phase.temperature,
            max_completion_length=self.args.sampling.max_completion_length,
            state=replace(self.state),
        )
        return float(done.metrics["loss"])
