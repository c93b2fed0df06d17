"""Advantages against other baselines than the group's mean; see `covey.algorithms.estimators` for what they are."""

from __future__ import annotations

from typing import Literal

import numpy as np
from array_api_compat import array_namespace

from covey.algorithms.advantages import at_least_one, batch_std, group_statistics, over_groups, prepare
from covey.algorithms.arrays import Array, as_float, expand_rows, masked, to_library_of, unknown_name
from covey.algorithms.outcomes import Outcomes, states
from covey.errors import ConfigError
from covey.types import Group


@states(group_relative=False, scaled=False)
def reinforce_plus_plus(step: Outcomes, *, gamma: float = 1.0) -> Array:
    """REINFORCE++ (arXiv 2501.03262): discounted return of each token, normalised over all tokens of the batch.

    Rewards 0 and 3 of completions with 2 and 1 tokens: the tokens' returns 0, 0, 3 have mean 1 and sample variance 3,
    so that the advantages are -1/sqrt(3), -1/sqrt(3), 2/sqrt(3).

    Args:
        step: see `Outcomes`.
        gamma: discount for each token that follows.

    Returns:
        `[N, T]`.
    """
    rewards, _, scorable = prepare(step.rewards, step.groups)
    xp = array_namespace(rewards)
    weight = xp.astype(step.tokens, rewards.dtype)
    following = xp.sum(weight, axis=1, keepdims=True) - xp.cumulative_sum(weight, axis=1)
    base = xp.full_like(following, gamma)
    return normalise_tokens(rewards[:, None] * base**following, step.tokens & scorable[:, None])


@states(group_relative=False, scaled=False)
def reinforce_plus_plus_baseline(step: Outcomes) -> Array:
    """REINFORCE++ with baseline (arXiv 2501.03262): the group's mean is subtracted, then tokens are normalised over the
    batch. A group of one has no baseline, so that groups of one are REINFORCE++.

    Completions of different length give the batch a mean that is not 0, so a group of equal rewards has advantages too.

    Returns:
        `[N, T]`.
    """
    rewards, groups, scorable = prepare(step.rewards, step.groups)
    xp = array_namespace(rewards)
    group = group_statistics(rewards, groups, scorable)
    centred = xp.where(group.count > 1, rewards - group.mean, rewards)
    # Exactly 0 where all are equal: a mean is rounded.
    centred = xp.where((group.count > 1) & group.tied, xp.zeros_like(centred), centred)
    return normalise_tokens(centred, step.tokens & scorable[:, None])


@states(group_relative=False, scaled=False, greedy_baseline=True)
def remax(step: Outcomes) -> Array:
    """ReMax (arXiv 2310.10505): reward minus that of the prompt's greedy completion; 1 and 0 against 1 give 0 and -1.

    Returns:
        `[N]`, 0 where either cannot be scored.
    """
    assert step.greedy is not None, "the run has asked for greedy_baseline"
    rewards, _, scorable = prepare(step.rewards, step.groups)
    xp = array_namespace(rewards)
    greedy = to_library_of(rewards, as_float(step.greedy))
    return xp.where(scorable & xp.isfinite(greedy), rewards - greedy, xp.zeros_like(rewards))


@states(scaled=False)
def opo(step: Outcomes) -> Array:
    """OPO (arXiv 2505.23585, equation 6): the baseline is the group's mean weighed by length, `sum(l r) / sum(l)`.

    Rewards 1 and 0 of 1 and 3 tokens: baseline 1/4, advantages 3/4 and -1/4.

    Returns:
        `[N]`.
    """
    rewards, groups, scorable = prepare(step.rewards, step.groups)
    xp = array_namespace(rewards)
    lengths = xp.where(scorable, xp.sum(xp.astype(step.tokens, rewards.dtype), axis=1), xp.zeros_like(rewards))
    earned = lengths * xp.where(scorable, rewards, xp.zeros_like(rewards))

    def total(values: Array) -> Array:
        return over_groups(lambda inside: xp.sum(xp.where(inside, values[None, :], 0.0), axis=1), groups, scorable)

    advantages = rewards - total(earned) / at_least_one(total(lengths))
    tied = group_statistics(rewards, groups, scorable).tied
    return xp.where(scorable & ~tied, advantages, xp.zeros_like(advantages))


@states(scaled=False)
def gpg(step: Outcomes, *, f_norm: float = 1.0, alpha: Literal["differing", "nonzero"] = "differing") -> Array:
    """GPG (arXiv 2504.02546, equation 7): `alpha (r - mean_g) / f_norm`; alpha makes up for groups without gradient.

    Rewards 0, 1 in one group and 1, 1 in another: half of the completions are in groups that differ, alpha = 2 and the
    advantages are -1, 1, 0, 0.

    Args:
        step: see `Outcomes`.
        f_norm: the paper's F_norm; 1 = none.
        alpha: Number of completions over the number of those in groups whose rewards are `differing`, as in the paper,
            or over the number of those whose reward is `nonzero`, as in verl.

    Returns:
        `[N]`.
    """
    rewards, groups, scorable = prepare(step.rewards, step.groups)
    xp = array_namespace(rewards)
    group = group_statistics(rewards, groups, scorable)
    if alpha == "differing":
        counted = scorable & ~group.tied
    elif alpha == "nonzero":
        counted = scorable & (rewards != 0)
    else:
        raise unknown_name(alpha, ("differing", "nonzero"), "algorithm.adv_parameters alpha")
    if not f_norm > 0:
        raise ConfigError(f"algorithm.adv_parameters f_norm={f_norm!r}: advantages are divided by it; use more than 0")
    number = xp.sum(xp.astype(scorable, rewards.dtype))
    factor = number / at_least_one(xp.sum(xp.astype(counted, rewards.dtype)))
    advantages = factor * (rewards - group.mean) / f_norm
    return xp.where(scorable & ~group.tied, advantages, xp.zeros_like(advantages))


def _best_is_alone(group: Group) -> bool:
    """True when one completion of the group is better than all others."""
    scored = group.rewards[np.isfinite(group.rewards)]
    return len(scored) >= 2 and int((scored == scored.max()).sum()) == 1


@states(teaches=_best_is_alone)
def grpo_passk(step: Outcomes) -> Array:
    """GRPO for pass@k (arXiv 2503.19595): only the best of a group has an advantage, its lead over the second best,
    divided as `scale` says.

    Rewards 3, 1, 1: the lead is 2, the sample standard deviation 2/sqrt(3), the advantages sqrt(3), 0, 0. Two equally
    good ones have no lead.

    Returns:
        `[N]`.
    """
    rewards, groups, scorable = prepare(step.rewards, step.groups)
    xp = array_namespace(rewards)

    def largest(member: Array) -> Array:
        least = -float("inf")
        return over_groups(lambda inside: xp.max(xp.where(inside, rewards[None, :], least), axis=1), groups, member)

    group = group_statistics(rewards, groups, scorable, correction=step.correction)
    best = scorable & (rewards == largest(scorable))
    number = over_groups(lambda inside: xp.sum(xp.astype(inside, rewards.dtype), axis=1), groups, best)
    alone = best & (number == 1) & ~group.tied
    lead = xp.where(alone, rewards - largest(scorable & ~best), xp.zeros_like(rewards))
    if step.scale == "group":
        return lead / (group.std + step.epsilon)
    return lead / (batch_std(rewards, scorable, step.correction) + step.epsilon) if step.scale == "batch" else lead


def normalise_tokens(values: Array, mask: Array) -> Array:
    """Mean 0 and variance 1 over all tokens of the batch where `mask` is True, 0 elsewhere and where all are equal.

    The variance is the sample's, and 1e-8 is added to it (the choice of verl).

    Args:
        values: `[N, T]`, or `[N]` for all tokens of a row.
        mask: `[N, T]` boolean.
    """
    xp = array_namespace(values)
    if 0 in mask.shape:
        return xp.zeros_like(expand_rows(values))
    weight = xp.astype(mask, values.dtype)
    values, count = masked(values, mask), xp.sum(weight)
    centred = weight * (values - xp.sum(values) / at_least_one(count))
    variance = xp.sum(centred * centred) / at_least_one(count - 1)
    infinite = float("inf")
    differ = xp.max(xp.where(mask, values, -infinite)) > xp.min(xp.where(mask, values, infinite))
    return xp.where(differ, centred / xp.sqrt(variance + 1e-8), xp.zeros_like(centred))
