"""What a step does with its batch: who scores it, and the update on it. The trainer's loop and a replay share this."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.config.effects import another_program_samples
from covey.config.whole import GRPOConfig
from covey.rollout.batching import Score, agent_advantages, chosen, spread_over
from covey.rollout.learning import Learner
from covey.training.schedule import ResolvedPhase, TrainerState
from covey.training.setup import RunLength, algorithm_in
from covey.training.update import Pass, Update, update
from covey.types import Batch, Group

log = logging.getLogger(__name__)

MINIBATCH_STREAM = 2
"""Second entry of the random stream by which a step's rows are parted into mini-batches; see `EVALUATION_STREAM`."""


def scorer(learner: Learner, temperature: float) -> Score:
    """What estimators ask for log-probabilities of the learner's policy, or of its reference."""

    def score(batch: Batch, *, reference: bool = False, sharper: float = 1.0) -> NDArray[np.float32]:
        rows = np.arange(len(batch.episodes))
        return learner.scores(batch, rows, temperature=temperature / sharper, reference=reference)[0]

    return score


def episode_credit(groups: Sequence[Group], args: GRPOConfig) -> NDArray[np.float32] | None:
    """`[N, T]` the whole episode's part of agents' advantages; None without agents, or if the estimator has none."""
    part, selection = args.algorithm.estimator.episode_part, args.algorithm.selection
    if part is None or not any(group.trajectories for group in groups):
        return None
    compute = partial(agent_advantages, estimator=part, algorithm=args.algorithm, environment=args.environment)
    try:
        with np.errstate(over="ignore"):
            if selection is None:
                found = compute(groups).astype(np.float32)
            else:  # 0 for what `down_sampling` left out
                rows, compared = chosen(groups, selection)
                width = max(episode.num_sampled for group in groups for episode in group.episodes)
                whole = spread_over(rows, compute(compared), np.zeros((len(rows), width)))
                found = np.where(rows[:, None], whole, 0.0).astype(np.float32)
        if np.isfinite(found).all():
            return found
        log.warning("%s: it returned a number that is not finite; tables show whole advantages only", part.name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit of somebody's function is a failure like any other
        log.warning("%s failed (%s: %s); tables show whole advantages only", part.name, type(error).__name__, error)
    return None


def step_loss(learner: Learner, batch: Batch, args: GRPOConfig, phase: ResolvedPhase, state: TrainerState) -> float:
    """The loss of a step in the first pass over its batch. The gradient is left, and no optimiser step is taken."""
    parts = {"scores": learner.scores, "forward_backward": learner.forward_backward}
    without_step: Any = SimpleNamespace(**parts, optim_step=lambda learning_rate: 0.0)
    once = algorithm_in(args, phase).model_copy(update={"num_iterations": 1, "num_minibatches": 1})
    limits: Any = {"temperature": phase.temperature, "max_completion_length": args.sampling.max_completion_length}
    return float(update(without_step, batch, once, 0.0, **limits, state=replace(state)).metrics["loss"])


def step_update(
    learner: Learner,
    batch: Batch,
    args: GRPOConfig,
    phase: ResolvedPhase,
    length: RunLength,
    state: TrainerState,
    observe: Callable[[Pass], None] | None,
) -> Update:
    """The update of the step that follows those counted in `state`, at the learning rates that are due."""
    rates, algorithm = length.rates(phase, state.global_step), algorithm_in(args, phase)
    fresh = all(episode.policy_version == state.policy_version for episode in batch.episodes)
    own = not args.server.upload_adapters_to_server and not another_program_samples(args)
    done = update(
        learner,
        batch,
        algorithm,
        rates,
        temperature=phase.temperature,
        max_completion_length=args.sampling.max_completion_length,
        state=state,
        stream=(args.run.seed, MINIBATCH_STREAM, state.global_step),
        observe=observe,
        on_policy=fresh and own and algorithm.correction is None,
    )
    done.metrics["learning_rate"] = rates[-1]
    return done
