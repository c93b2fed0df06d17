"""A run's learner as it was before some step, moved on with the batches that are stored, without sampling."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from covey.algorithms.masks import masks_by_policy
from covey.backend import Backend
from covey.config.effects import uses_reference
from covey.config.whole import GRPOConfig
from covey.distributed.ranks import Ranks
from covey.distributed.replicated import SharedPacks
from covey.errors import ConfigError, RunFolderError
from covey.observe.run_folder import RunFolder, table_name
from covey.rollout.batching import Score, estimator_of
from covey.rollout.learning import Learner, TrainedPolicy
from covey.training import setup
from covey.training.batches import StoredStep, read_step
from covey.training.checkpoint import Checkpoint, random_state, restore_random
from covey.training.ledger import Ledger
from covey.training.restoring import checked_state, damage_explained
from covey.training.schedule import Elapsed, PhasePlan, ResolvedPhase
from covey.training.state import TrainerState
from covey.training.step import scorer, step_batch, step_update
from covey.training.update import Pass, Update
from covey.types import Batch, Prompt

Tensors = dict[str, dict[str, Any]]


class ReplayedLearner(Learner, Protocol):
    """A learner that shows the gradient which `forward_backward` has left."""

    def gradient(self) -> dict[str, NDArray[np.float32]]: ...


@dataclass(slots=True, eq=False)
class Done:
    """A step that was done again: the batch before the policy is run; the update, whose batch has all masks, None where
    there were no weights; every optimiser step, and the gradient of the first.
    """

    batch: Batch
    update: Update | None
    passes: list[Pass] = field(default_factory=list)
    gradient: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    @property
    def updated(self) -> Update:
        """What the update did, where there were weights."""
        assert self.update is not None
        return self.update


def stored_step(folder: RunFolder, step: int) -> StoredStep:
    """What a step was trained on.

    Raises:
        RunFolderError: the run has not kept it, or it is damaged.
    """
    path = folder.batches / table_name(step)
    if path.exists():
        return read_step(path, step)
    kept = folder.batch_steps()
    if not kept:
        raise RunFolderError(
            f"{folder.path} has no batches/, so no step of it can be replayed; a run keeps them with "
            "run.keep_batches=true"
        )
    raise RunFolderError(
        f"{folder.path}: step {step} is not in batches/, which has {len(kept)} steps from {kept[0]} to {kept[-1]}; "
        "replay one of those (run.keep_batches keeps them)"
    )


def settings_of(stored: StoredStep) -> GRPOConfig:
    """The settings that a step was trained with.

    Raises:
        RunFolderError: what is stored are no settings.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # the run has said them
            return GRPOConfig(**stored.facts.settings)
    except (ConfigError, TypeError) as error:
        raise RunFolderError(
            f"batches/step_{stored.facts.step:06d}.parquet: its settings are not those of a run ({str(error)[:300]}); "
            "restore it from a backup"
        ) from error


def phase_of(config: GRPOConfig, stored: StoredStep) -> tuple[PhasePlan, ResolvedPhase]:
    """The plan, and the phase that was in force."""
    plan, facts = setup.phase_plan(config), stored.facts
    if facts.phase > 0 and facts.phase >= len(config.schedule.phases):
        raise RunFolderError(
            f"batches/step_{facts.step:06d}.parquet: phase {facts.phase + 1} of {len(config.schedule.phases)}"
        )
    begin = {"step": 0, "tokens": 0, "seconds": 0.0}
    plan.restore({"index": facts.phase, "start": begin, "learning_rate_factor": facts.learning_rate_factor})
    return plan, plan.at(Elapsed())


def reward_weights(config: GRPOConfig, stored: StoredStep) -> list[float]:
    """Of the reward functions whose rewards are stored.

    Raises:
        ConfigError: the settings have another number of weights.
    """
    names, given = list(stored.groups[0].reward_parts), config.rewards.reward_weights
    if given is not None and names and len(given) != len(names):
        raise ConfigError(
            f"rewards.reward_weights={list(given)}: the step has rewards of {', '.join(names)}; give as many"
        )
    return list(given) if given is not None else [1.0] * len(names)


def batch_of(stored: StoredStep, config: GRPOConfig, score: Score | None = None) -> Batch:
    """Advantages and masks of a stored step with these settings; without `score` there are no weights.

    Raises:
        ConfigError: the settings need what is not there.
    """
    estimator = estimator_of(config.algorithm)
    agents = any(group.trajectories for group in stored.groups)
    setup.check_estimator(config, cast(Any, agents or None))
    if score is None and (estimator.needs_reference or estimator.needs_sum_pi_squared):
        raise ConfigError(
            f"algorithm.adv_estimator={estimator.name!r}: it asks for log-probabilities of the weights; leave out "
            "--batch-only"
        )
    if estimator.greedy_baseline and all(np.isnan(group.greedy_reward) for group in stored.groups):
        raise ConfigError(
            f"algorithm.adv_estimator={estimator.name!r}: it compares with a greedy completion, and the step has none; "
            "use another estimator"
        )
    if config.algorithm.keep_sampling_mask and any(e.support is None for g in stored.groups for e in g.episodes):
        raise ConfigError("algorithm.keep_sampling_mask=True: the step was sampled without; leave it out")
    return step_batch(
        stored.groups,
        config,
        reward_weights=reward_weights(config, stored),
        has_answer=stored.has_answer,
        score=score,
    )


class Rerun:
    """Policy, learner and counters of a run, at a step."""

    def __init__(
        self, config: GRPOConfig, first: StoredStep, checkpoint: Checkpoint | None, *, needs_reference: bool = False
    ) -> None:
        """Build the parts, and restore the checkpoint of the step before `first`, if any, into them.

        Raises:
            ConfigError, ModelError: there is no such model here.
            CheckpointError: it is of another model, or damaged.
        """
        self.config = config
        self._backend = _backend(first)
        self._backend.check(config)
        looking = config.replace(beta=1.0) if needs_reference and not uses_reference(config) else config
        self.policy: TrainedPolicy = self._backend.make_policy(looking)
        self._longest = Prompt(np.zeros(first.facts.longest_prompt, np.int64), "")
        self.learner = self._new_learner(config)
        self.state = TrainerState()
        _require_tokens(first, self.policy.vocabulary)
        if checkpoint is not None:
            counted = checkpoint.state.get("trainer")
            chosen_by = counted.get("best_metric_name") if isinstance(counted, dict) else ""
            self.state = checked_state(checkpoint, self.learner.tensors(), str(chosen_by))
            with damage_explained(checkpoint):
                restore_random(checkpoint.state["random"])
                held = dict(checkpoint.tensors)
                if looking is not config:  # the run held none: it is that of its beginning
                    held["reference"] = self.learner.tensors()["reference"]
                self.learner.restore(held, self.state.updates)

    def _new_learner(self, config: GRPOConfig) -> ReplayedLearner:
        learner = self._backend.make_learner(config, self.policy)
        nobody = SimpleNamespace(expect=lambda length: None)
        self._backend.expect(config, cast(Any, nobody), learner, [self._longest])
        return cast(ReplayedLearner, learner)

    def do(
        self,
        stored: StoredStep,
        config: GRPOConfig,
        *,
        ledger: Callable[[Pass], None] | None = None,
        keep_gradient: bool = False,
    ) -> Done:
        """The step that comes next, with all its optimiser steps; the learner and the counters move on."""
        _require_tokens(stored, self.policy.vocabulary)
        plan, phase = phase_of(config, stored)
        self.learner.tokens_per_micro_batch = stored.facts.tokens_per_micro_batch
        batch = batch_of(stored, config, scorer(self.learner, phase.temperature))
        passes: list[Pass] = []
        first: dict[str, NDArray[np.float32]] = {}

        def look(done: Pass) -> None:
            if ledger is not None:
                ledger(done)
            passes.append(done)
            if keep_gradient and not first:
                first.update(self.learner.gradient())

        length = setup.run_length(config, plan, stored.facts.prompts)
        update = step_update(self.learner, batch, config, phase, length, self.state, look)
        self.state.updates += update.optimizer_steps
        self.state.policy_version += update.optimizer_steps
        self.state.global_step += 1
        return Done(batch, update, passes, first)

    def tensors(self) -> Tensors:
        """A copy of weights, reference and moments as they are now."""
        return {
            group: {name: value.detach().clone() if hasattr(value, "detach") else value for name, value in own.items()}
            for group, own in self.learner.tensors().items()
        }

    def mark(self) -> Callable[[GRPOConfig], None]:
        """Remember this moment. What is returned goes back to it, with a learner of these settings."""
        held, state, random = self.tensors(), replace(self.state), random_state()

        def back(config: GRPOConfig) -> None:
            self.learner = self._new_learner(config)
            self.learner.restore(held, state.updates)
            self.state = replace(state)
            restore_random(random)

        return back

    def ledger(self, groups: Iterable[int]) -> Ledger:
        """What notes the tokens of some groups."""
        return Ledger(self.policy.tokenizer.decode, sorted(set(groups)))


def needs_weights_for_masks(config: GRPOConfig) -> bool:
    """True where masks look at the policy."""
    return masks_by_policy(config.algorithm) or config.algorithm.objective().loss.select is not None


def _backend(stored: StoredStep) -> Backend:
    """What computed the run. Several ranks add gradients in fixed point, whose sum one process has bit for bit too."""
    from covey.pytorch.backend import BACKEND, PyTorchBackend

    return PyTorchBackend(SharedPacks(Ranks())) if stored.facts.learner.startswith("Leading") else BACKEND


def _require_tokens(stored: StoredStep, vocabulary: int) -> None:
    largest = max(int(e.token_ids.max()) for group in stored.groups for e in group.episodes)
    if largest >= vocabulary:
        raise RunFolderError(
            f"batches/step_{stored.facts.step:06d}.parquet has the token id {largest}, and the model {vocabulary} "
            "embeddings: it is damaged, or of another model"
        )
