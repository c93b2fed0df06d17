"""The `algorithm` section: what is optimised. Definitions of every term: docs of `covey.algorithms`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from covey.algorithms.presets import LOSS_PRESETS

LossType = Literal[
    "grpo", "bnpo", "dapo", "dr_grpo", "gspo", "gspo_token", "cispo", "sapo", "reinforce", "reinforce_kept"
]
KLEstimator = Literal["k1", "k2", "k3", "k3_unbiased", "exact", "exact_weighted"]
AdvantageEstimator = Literal[
    "grpo",
    "naive_grpo",
    "dr_grpo",
    "rloo",
    "gigpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "grpo_passk",
]
MismatchCorrection = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def _preset_epsilon(validated: dict[str, Any]) -> float:
    return LOSS_PRESETS[validated.get("loss_type", "grpo")].eps_low


class AlgorithmConfig(BaseModel, extra="forbid", frozen=True, strict=True, allow_inf_nan=False):
    """Advantages, surrogate, KL to the reference, masks."""

    loss_type: LossType = Field(
        default="grpo",
        description="Surrogate and its average: grpo (mean within a completion, then over completions), "
        "bnpo, dapo (mean over tokens), dr_grpo (constant denominator), gspo and gspo_token (sequence "
        "ratio), cispo, sapo, reinforce (no ratio, no clip), reinforce_kept (the same, mean over the completions "
        "that masks leave, and the KL over all sampled tokens: usmle-qa.md to the letter).",
    )
    adv_estimator: AdvantageEstimator | Annotated[str, Field(pattern=r".:.")] = Field(
        default="grpo",
        description="How a reward becomes an advantage: grpo (against the group's mean and spread), "
        "naive_grpo (the same, each multi-turn episode counted once), dr_grpo (mean only), rloo (mean of "
        "the others), gigpo (agents: episodes, and turns that began with the same observation), reinforce_plus_plus "
        "(against the batch) and reinforce_plus_plus_baseline (group's mean, then batch), remax (against the prompt's "
        "greedy completion), opo (mean weighed by length), gpg, grpo_passk (the best of the group only), or a function "
        "of yours, FILE.py:FUNCTION or MODULE:FUNCTION.",
    )
    adv_parameters: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="The estimator's own parameters by name, such as gamma."
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        default="group",
        description="Spread that advantages are divided by: that of the group, of the whole batch, or "
        "none. Has no effect with an adv_estimator that does not divide, such as dr_grpo and rloo. True means group, "
        "False none.",
    )
    std_correction: Literal[0, 1] = Field(
        default=1,
        description="Standard deviation of a group: 1 divides by G - 1 (sample), 0 by G (population).",
    )
    beta: float = Field(
        default=0.04,
        ge=0,
        description="Weight of the KL divergence from the reference model; 0 turns it off and saves its forward pass.",
    )
    kl_estimator: KLEstimator = Field(
        default="k3",
        description="How that KL is estimated, per token. k3 is never negative; k3_unbiased is also right "
        "off-policy; exact sums over the vocabulary; exact_weighted reproduces a published formula that is "
        "not unbiased.",
    )
    epsilon: float = Field(
        default_factory=_preset_epsilon,
        ge=0,
        lt=1,
        description="Clip range: importance ratios below 1 - epsilon gain nothing further. 0.2 unless "
        "given, and 0.0003 for gspo and gspo_token, whose sequence ratio moves far less than a token's.",
    )
    epsilon_high: float | None = Field(
        default=None,
        ge=0,
        description="Upper clip range (ratio above 1 + epsilon_high); none = what loss_type says: 0.28 for "
        "dapo, 0.0004 for gspo and gspo_token, else the same as epsilon.",
    )
    delta: float | None = Field(
        default=None,
        gt=1,
        description="Cap on the ratio itself, which also bounds the loss of negative advantages (two-sided "
        "clipping); choose it above 1 + epsilon. none = no cap.",
    )
    epsilon_max: float = Field(
        default=5.0,
        gt=0,
        description="Cap on the importance ratio with loss_type cispo; other losses do not use it.",
    )
    sapo_temperature_pos: float = Field(
        default=1.0, gt=0, description="Sharpness of the soft gate of loss_type sapo for advantages above 0."
    )
    sapo_temperature_neg: float = Field(
        default=1.05, gt=0, description="Sharpness of the soft gate of loss_type sapo for advantages up to 0."
    )
    importance_sampling_level: Literal["token", "sequence"] | None = Field(
        default=None,
        description="One importance ratio for each token, or one for each completion (GSPO); none = what "
        "loss_type says.",
    )
    num_iterations: int = Field(
        default=1, ge=1, le=1000, description="Passes over each batch of completions (the paper's mu)."
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of an entropy bonus; 0 = off.")
    mask_truncated_completions: bool = Field(
        default=False, description="Leave completions that hit max_completion_length out of the loss."
    )
    off_policy_mask_threshold: float | None = Field(
        default=None,
        ge=0,
        description="A completion with a negative advantage has no policy gradient when the mean over its tokens of "
        "old - new log-probability, in nats, is above this; averages and its KL term stay (DeepSeek-V3.2, equation 8). "
        "none = off.",
    )
    reference_drift_threshold: float | None = Field(
        default=None,
        description="Leave a completion out of the loss unless policy - reference log-probability, in "
        "nats, is below this, whatever its advantage; 0.5 in the USMLE recipe. none = off.",
    )
    reference_drift_reduction: Literal["per_token_mean", "sum"] = Field(
        default="per_token_mean",
        description="How reference_drift_threshold reduces a completion's tokens to a number.",
    )
    keep_sampling_mask: bool = Field(
        default=False,
        description="Keep, with each token, the ids that top_k, top_p and min_p had left, and take all "
        "log-probabilities over those ids only (DeepSeek-V3.2).",
    )
    validity_mask: bool = Field(
        default=False,
        description="Leave a completion that is too short, has no valid answer or repeats itself out of "
        "the loss (it still counts in its group's mean). Beware: with every invalid completion goes the "
        "signal that would teach a valid form.",
    )
    validity_min_length: int = Field(
        default=10,
        ge=0,
        description="Completions shorter than this many characters are invalid for validity_mask.",
    )
    top_entropy_quantile: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Only this fraction of the tokens, the most uncertain ones, has a policy gradient; averages are "
        "still over all tokens, and so are KL and entropy terms. 1 = all, 0.2 in arXiv 2506.01939.",
    )
    importance_sampling_correction: MismatchCorrection | None = Field(
        default=None,
        description="Correct for a sampler whose log-probabilities differ from the trainer's: weigh tokens "
        "or completions by their ratio, truncated at importance_sampling_cap, or drop those above it; none "
        "= off.",
    )
    importance_sampling_cap: float = Field(
        default=3.0, gt=0, description="Largest ratio for importance_sampling_correction."
    )
    reference_update: Literal["none", "copy", "ema"] = Field(
        default="none",
        description="Whether the reference follows the policy: never, by copying it, or by an exponential "
        "moving average.",
    )
    reference_update_steps: int = Field(
        default=100, ge=1, description="Optimiser steps between updates of the reference."
    )
    reference_ema_decay: float = Field(
        default=0.99, ge=0, lt=1, description="Share of the old reference that an ema update keeps."
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        default="sum_then_normalize",
        description="With several reward functions: add their weighted rewards and then normalise per "
        "group, or normalise each per group, add, and normalise the sum over the batch (GDPO; adv_estimator and "
        "scale_rewards have no part in it).",
    )
    dynamic_sampling: bool = Field(
        default=False,
        description="Replace groups that teach nothing, whose rewards are all equal, by newly sampled ones (DAPO).",
    )
    dynamic_sampling_max_tries: int = Field(
        default=3,
        ge=1,
        description="How many times a step may sample in all before it trains on the groups it has.",
    )

    @field_validator("scale_rewards", mode="before")
    @classmethod
    def _bool_means_group_or_none(cls, value: Any) -> Any:
        return {True: "group", False: "none"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.loss_type in ("gspo", "gspo_token") and self.importance_sampling_level == "token":
            raise ValueError(
                f"importance_sampling_level='token': loss_type {self.loss_type!r} is defined by its "
                "sequence ratio; remove algorithm.importance_sampling_level, or set algorithm.loss_type to "
                "'grpo'"
            )
        fitting = ("grpo", "naive_grpo", "gigpo")
        if self.multi_objective_aggregation == "normalize_then_sum" and self.adv_estimator not in fitting:
            raise ValueError(
                f"adv_estimator={self.adv_estimator!r}: multi_objective_aggregation 'normalize_then_sum' (GDPO) is an "
                "estimator of its own, which would not use it; remove one of the two settings"
            )
        if self.loss_type == "cispo" and self.epsilon_high is not None:
            raise ValueError(
                f"epsilon_high={self.epsilon_high}: loss_type 'cispo' does not clip, it caps the ratio; "
                "set algorithm.epsilon_max to the cap and algorithm.epsilon_high to none"
            )
        return self
