"""The names of the package, for type checkers and for its `__getattr__`."""

from covey.algorithms.advantages import (
    combine_rewards,
    compute_grpo_outcome_advantage,
    compute_naive_grpo_outcome_advantage,
    episode_advantages,
    group_advantages,
    normalise_tokens,
    rloo_advantages,
    soft_overlong_punishment,
)
from covey.algorithms.aggregation import AGGREGATORS, StepCounts, count_step, token_weights
from covey.algorithms.arrays import LOG_RATIO_LIMIT, Array, bounded_exp, row_mean, row_sum, stop_gradient
from covey.algorithms.estimators import ADVANTAGE_ESTIMATORS, Estimator, find_estimator, states
from covey.algorithms.kl import (
    KL_ESTIMATORS,
    VOCABULARY_KL,
    compute_unbiased_kl,
    exact_kl,
    exact_weighted_kl,
    k1,
    k2,
    k3,
    k3_unbiased,
)
from covey.algorithms.loss_function import Loss, LossInputs, Surrogate, loss
from covey.algorithms.losses import (
    LOSSES,
    RATIOS,
    clip_surrogate,
    find_loss,
    gspo_token_ratio,
    sequence_ratio,
    token_ratio,
)
from covey.algorithms.masks import (
    SURROGATE_MASKS,
    combine_masks,
    compute_off_policy_mask,
    create_sampling_mask,
    has_choice_letter,
    is_repetitive,
    off_policy_mask,
    policy_masks,
    reference_drift_mask,
    restrict_to_support,
    top_entropy_mask,
    uncertain_tokens,
    without_surrogate,
)
from covey.algorithms.mismatch import MISMATCH_MODES, Correction, mismatch_correction
from covey.algorithms.objective import LossTerms, Objective, add_metrics, make_objective, mean_metrics, policy_loss
from covey.algorithms.outcomes import Outcomes, Turns

__all__ = [
    "ADVANTAGE_ESTIMATORS", "AGGREGATORS", "KL_ESTIMATORS", "LOG_RATIO_LIMIT", "LOSSES",
    "MISMATCH_MODES", "RATIOS", "SURROGATE_MASKS", "VOCABULARY_KL", "Array", "Correction", "Estimator", "Loss",
    "LossInputs", "LossTerms", "Objective", "Outcomes", "StepCounts", "Surrogate", "Turns", "add_metrics",
    "bounded_exp", "clip_surrogate", "combine_masks", "combine_rewards", "compute_grpo_outcome_advantage",
    "compute_naive_grpo_outcome_advantage", "compute_off_policy_mask", "compute_unbiased_kl", "count_step",
    "create_sampling_mask", "episode_advantages", "exact_kl", "exact_weighted_kl", "find_estimator", "find_loss",
    "group_advantages", "gspo_token_ratio", "has_choice_letter", "is_repetitive", "k1", "k2", "k3", "k3_unbiased",
    "loss", "make_objective", "mean_metrics", "mismatch_correction", "normalise_tokens", "off_policy_mask",
    "policy_loss", "policy_masks", "reference_drift_mask", "restrict_to_support", "rloo_advantages", "row_mean",
    "row_sum", "sequence_ratio", "soft_overlong_punishment", "states", "stop_gradient", "token_ratio",
    "token_weights", "top_entropy_mask", "uncertain_tokens", "without_surrogate",
]  # fmt: skip
