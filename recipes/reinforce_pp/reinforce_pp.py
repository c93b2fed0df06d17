"""REINFORCE++ (arXiv 2501.03262) as two advantage estimators in a file of one's own; `step` is an `Outcomes`.

The first is also built in (`adv_estimator = "reinforce_plus_plus"`). The second is the paper's own form: the KL from
the reference is subtracted from each token's reward, so it is part of the return and not of the loss.
"""

import numpy as np


def batch_normalised(step, *, gamma=1.0):
    """The discounted reward on each token, normalised over all tokens of the step. `[N, T]`"""
    following = step.mask.sum(axis=1, keepdims=True) - step.mask.cumsum(axis=1)
    return normalise(step.rewards[:, None] * gamma**following, step)


def kl_in_reward(step, *, kl_coef=0.01):
    """The same of `reward - kl_coef * sum of log(policy / reference) from the token on`. `[N, T]`"""
    divergence = np.where(step.mask, step.logprobs - step.reference, 0.0)
    to_come = divergence[:, ::-1].cumsum(axis=1)[:, ::-1]
    return normalise(step.rewards[:, None] - kl_coef * to_come, step)


def normalise(returns, step):
    counted = step.mask & np.isfinite(step.rewards)[:, None]
    known = returns[counted]
    if known.size < 2 or known.min() == known.max():
        return np.zeros(step.mask.shape)
    return np.where(counted, (returns - known.mean()) / np.sqrt(known.var(ddof=1) + 1e-8), 0.0)


# What a run asks of an estimator: neither compares within groups (so groups of one will do, and equal rewards in a
# group say something), and the second wants the reference's log-probabilities.
batch_normalised.group_relative = kl_in_reward.group_relative = False
kl_in_reward.needs_reference = True
