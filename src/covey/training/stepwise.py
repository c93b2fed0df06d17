"""A trainer's parts one at a time, for those who write the loop themselves, by the names of grpo-architecture.md.

    rollout = trainer.rollout()
    loss = trainer.compute_loss(rollout)
    trainer.learner.optim_step(1e-5)
    trainer.publish()

`train_step()` is these four. `GRPOTrainer.train` does the same with counters, checkpoints and evaluations.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from covey.adapters import CONFIG_FILE
from covey.config.effects import uses_reference
from covey.config.whole import GRPOConfig
from covey.errors import ConfigError, DataError
from covey.rollout.collect import Collector, Rollout
from covey.rollout.learning import Learner
from covey.tasks.dataset import load_rows
from covey.training import setup
from covey.training.evaluate import correct_completions, rollout_metrics
from covey.training.prefetch import Sampled
from covey.training.schedule import PhasePlan
from covey.training.state import TrainerState
from covey.training.update import update
from covey.types import Prompt

COMPLETION_STREAM = 3
"""Second entry of the random streams of `complete`."""


def one_of(**named: Any) -> Any:
    """What was given under one of several names of one argument; None = under none."""
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: two names of one argument; pass one of them")
    return next(iter(given.values()), None)


def named_model(args: Any, model: Any) -> tuple[GRPOConfig, Any]:
    """Settings that name the model, and the model where it is a loaded one."""
    args = GRPOConfig() if args is None else args
    if not isinstance(args, GRPOConfig):
        raise ConfigError(f"args={args!r:.200}: a {type(args).__name__}; pass a GRPOConfig, such as GRPOConfig(...)")
    if isinstance(model, str | Path):
        return args.replace(model=str(model)), None
    name = str(getattr(model, "name_or_path", "") or type(model).__name__)
    return args if model is None else args.replace(model=name), model


def other_reference(config: GRPOConfig, other: Any, model: Any) -> tuple[GRPOConfig, Any]:
    """`ref_model` where it is another checkpoint than the model, else None; and the settings that it needs."""
    path = os.path.expanduser(other) if isinstance(other, str | Path) else None
    same = path is not None and os.path.realpath(path) == os.path.realpath(config.model.model)
    if other is None or other is model or (same and config.model.adapter is None):
        return config, None
    is_adapter = path is not None and (Path(path) / CONFIG_FILE).is_file()
    beside = config.model.use_peft and not is_adapter
    moves = config.schedule.max_staleness > 0 or config.algorithm.reference_update != "none"
    for fails, why in (
        (path is None and not hasattr(other, "named_parameters"), "no model; give a loaded one, a folder or a hub id"),
        (not uses_reference(config), "nothing compares with it; set algorithm.beta above 0, or leave it out"),
        (config.model.backend != "pytorch", "only model.backend='pytorch' has another reference; leave it out"),
        (config.distributed.learners > 1, "one learner has another reference; set distributed.learners to 1"),
        (
            beside and moves,
            "beside an adapter it needs schedule.max_staleness=0 and no algorithm.reference_update_steps",
        ),
    ):
        if fails:
            raise ConfigError(f"ref_model={path or type(other).__name__}: {why}")
    # Fused layers read joined copies of the weights.
    return config.replace(fused_layers=False) if beside else config, path or other


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

    def train_step(self: Any, rows: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
        """One step: sample, score, learn, publish; `rows` as in `rollout`. Returns its metrics, and writes nothing."""
        began, phase, state = time.perf_counter(), self.phases.at(self._elapsed()), self.state
        rollout = self.rollout(rows)
        correct = correct_completions(rollout.whole, self.data.is_correct)
        position = state.data_position + (len(rollout.groups) if rows is None else 0)
        sampled = Sampled(rollout, phase, position, correct, self.data.scorer.take_logged())
        done = self.learn(self.make_batch(rollout.groups, phase), phase)
        self._publish(done, self)
        self._count(sampled, time.perf_counter() - began)
        found = rollout_metrics(rollout, self.estimator, self.args.algorithm.scaling["correction"])
        return {**found, **done.metrics, **({} if sampled.accuracy is None else {"accuracy": sampled.accuracy})}

    def rollout(self, rows: Sequence[Mapping[str, Any]] | None = None) -> Rollout:
        """Sample `num_generations` completions of each prompt with the present weights, and score them.

        Returns:
            A group for each prompt; `rewards` of a group are `[num_generations]`.
        """
        phase, state = self.phases.at(self._elapsed()), self.state
        prompts = None if rows is None else self._prompts(rows)
        count = self.args.data.prompts_per_step if prompts is None else len(prompts)
        following, streams = self._next_prompts(state.data_position, count)
        return self.collect(
            following if prompts is None else prompts,
            setup.sampling_settings(self.args, self.policy, phase.temperature),
            num_generations=phase.num_generations,
            streams=streams,
            policy_version=state.policy_version,
        )

    def _prompts(self, rows: Any) -> list[Prompt]:
        data, rows = self.args.data, load_rows([rows] if isinstance(rows, str | Mapping) else rows)
        if data.task is not None and any(data.prompt_column not in row for row in rows):
            raise DataError(
                f"rows without a column {data.prompt_column!r}: data.task={data.task!r} makes it from the rows of its "
                "file; pass rows of trainer.data.train or trainer.data.held_out, or a prompt in each row"
            )
        return list(self._tokenize(rows))

    def complete(self, rows: Sequence[Mapping[str, Any]], num_generations: int = 1) -> Rollout:
        """Sample completions of other prompts with the present weights, at the temperature of training."""
        prompts, first = self._prompts(rows), (self.args.run.seed, COMPLETION_STREAM, self.state.global_step)
        return self.collect(
            prompts,
            setup.sampling_settings(self.args, self.policy, self.args.sampling.temperature),
            num_generations=num_generations,
            streams=[(*first, row) for row in range(len(prompts))],
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
