"""The mathematics of group relative policy optimization: arrays in, arrays out.

Every function is written once over the Python array API and runs on NumPy (float64 is the reference), on
torch tensors under autograd, and on JAX arrays under `jit` and `grad`. Importing this package imports neither
torch nor JAX.
"""

from covey.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    broadcast_steps,
    combine_rewards,
    compute_grpo_outcome_advantage,
    compute_naive_grpo_outcome_advantage,
    episode_advantages,
    group_advantages,
    multi_reward_advantages,
    rloo_advantages,
    step_advantages,
    step_scores,
)
from covey.algorithms.aggregation import AGGREGATORS, StepCounts, count_step, token_weights
from covey.algorithms.arrays import LOG_RATIO_LIMIT, Array, stop_gradient
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
from covey.algorithms.masks import (
    MASK_REASONS,
    combine_masks,
    compute_off_policy_mask,
    create_sampling_mask,
    has_choice_letter,
    is_repetitive,
    off_policy_mask,
    reference_drift_mask,
    restrict_to_support,
    top_entropy_mask,
    truncated_mask,
)
from covey.algorithms.mismatch import MISMATCH_MODES, mismatch_correction
from covey.algorithms.objective import LossTerms, add_metrics, mean_metrics, policy_loss
from covey.algorithms.presets import LOSS_PRESETS, SURROGATES, Objective, make_objective
from covey.algorithms.shaping import soft_overlong_punishment
from covey.algorithms.surrogates import (
    RATIOS,
    Surrogate,
    cispo_surrogate,
    clip_surrogate,
    gspo_token_ratio,
    reinforce_surrogate,
    sapo_surrogate,
    sequence_ratio,
    token_ratio,
)

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AGGREGATORS",
    "KL_ESTIMATORS",
    "LOG_RATIO_LIMIT",
    "LOSS_PRESETS",
    "MASK_REASONS",
    "MISMATCH_MODES",
    "RATIOS",
    "SURROGATES",
    "VOCABULARY_KL",
    "Array",
    "LossTerms",
    "Objective",
    "StepCounts",
    "Surrogate",
    "add_metrics",
    "broadcast_steps",
    "cispo_surrogate",
    "clip_surrogate",
    "combine_masks",
    "combine_rewards",
    "compute_grpo_outcome_advantage",
    "compute_naive_grpo_outcome_advantage",
    "compute_off_policy_mask",
    "compute_unbiased_kl",
    "count_step",
    "create_sampling_mask",
    "episode_advantages",
    "exact_kl",
    "exact_weighted_kl",
    "group_advantages",
    "gspo_token_ratio",
    "has_choice_letter",
    "is_repetitive",
    "k1",
    "k2",
    "k3",
    "k3_unbiased",
    "make_objective",
    "mean_metrics",
    "mismatch_correction",
    "multi_reward_advantages",
    "off_policy_mask",
    "policy_loss",
    "reference_drift_mask",
    "reinforce_surrogate",
    "restrict_to_support",
    "rloo_advantages",
    "sapo_surrogate",
    "sequence_ratio",
    "soft_overlong_punishment",
    "step_advantages",
    "step_scores",
    "stop_gradient",
    "token_ratio",
    "token_weights",
    "top_entropy_mask",
    "truncated_mask",
]
