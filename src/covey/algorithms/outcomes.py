"""What an advantage estimator is given: what the completions of a step earned, and the turns of agents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace, is_array_api_obj

from covey.algorithms.advantages import discounted_returns
from covey.algorithms.arrays import Array


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """The S turns of agents' episodes.

    Attributes:
        completion: `[S]` which of the N episodes it is a turn of.
        groups: `[S]` group of that episode.
        rewards: `[S]` reward of that whole episode; NaN, here and below, where the episode is excluded.
        earned: `[S]` the turn's own reward.
        anchors: `[S]` the observations before the turns.
        of_token: `[N, T]` the turn to which each sampled token belongs; -1 where there is none.
    """

    completion: Array
    groups: Array
    rewards: Array
    earned: Array
    anchors: list[str]
    of_token: Array

    def returns(self, discount: float = 1.0) -> Array:
        """`[S]` what each turn led to, its own reward and the discounted ones that follow in its episode."""
        ends = np.flatnonzero(np.diff(self.completion, append=-1)) + 1
        return np.concatenate([discounted_returns(list(each), discount) for each in np.split(self.earned, ends[:-1])])

    def spread(self, values: Array) -> Array:
        """A value for each turn `[S]` on the turn's tokens `[N, T]`, 0 elsewhere."""
        return np.where(self.of_token >= 0, np.append(values, 0.0)[self.of_token], 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """What the N completions of a step earned; of agents, what their N episodes earned.

    Arrays are those of one library: NumPy's in a run, JAX's in the trainer for Flax modules. A run always gives `mask`
    and `logprobs`.

    Attributes:
        rewards: `[N]` weighted sum of all reward functions; NaN where a completion cannot be scored.
        groups: `[N]` group ids: completions of the same prompt.
        scale: `algorithm.scale_rewards`: group, batch or none.
        correction: `std_correction` of `algorithm.adv_parameters`: 1 = sample, 0 = population standard deviation.
        epsilon: to be added to a standard deviation; `algorithm.adv_parameters` of `grpo` may give another one.
        parts: `[F, N]` unweighted rewards of each function, None for agents.
        weights: `[F]` of the functions.
        mask: `[N, T]` True where the completion has a sampled token.
        logprobs: `[N, T]` the sampler's log-probabilities, in nats.
        reference: `[N, T]` those of the reference policy, where `needs_reference`.
        gaps: `[N, T]` what a teacher says of each token, see `covey.algorithms.teaching`; NaN where there is none.
        sum_pi_squared: `[N, T]` sum over the vocabulary of the squared probabilities that the policy gave before each
            token, where `needs_sum_pi_squared`.
        greedy: `[N]` reward of the greedy completion of the same prompt, where `greedy_baseline`; NaN where it cannot
            be scored.
        turns: of agents, else None.
    """

    rewards: Array
    groups: Array
    scale: str = "group"
    correction: int = 1
    epsilon: float = 1e-6
    parts: Array | None = None
    weights: Array | None = None
    mask: Array | None = None
    logprobs: Array | None = None
    reference: Array | None = None
    gaps: Array | None = None
    sum_pi_squared: Array | None = None
    greedy: Array | None = None
    turns: Turns | None = None

    @property
    def tokens(self) -> Array:
        """`[N, T]` the mask; one token for each completion where none is known."""
        if self.mask is not None:
            return self.mask
        rewards = self.rewards if is_array_api_obj(self.rewards) else np.asarray(self.rewards, np.float64)
        return array_namespace(rewards).ones_like(rewards[:, None]) > 0

    @property
    def scaling(self) -> dict[str, Any]:
        """`scale`, `correction` and `epsilon` by name."""
        return {"scale": self.scale, "correction": self.correction, "epsilon": self.epsilon}
