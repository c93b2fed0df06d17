"""The `algorithm` section: what is optimised. Definitions of every term: docs of `covey.algorithms`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from covey.algorithms.down_sampling import DownSampling, find_down_sampling
from covey.algorithms.losses import default_of, find_loss, function_name, loss_name
from covey.algorithms.mismatch import Correction
from covey.algorithms.objective import Objective, make_objective

KLEstimator = Literal["k1", "k2", "k3", "k1+", "k3+", "abs", "k3_unbiased", "exact", "exact_weighted"]
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
    "optimal_token_baseline",
    "gpg",
    "grpo_passk",
]
MismatchCorrection = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class AlgorithmConfig(BaseModel, extra="forbid", frozen=True, strict=True, allow_inf_nan=False):
    """Advantages, surrogate, KL to the reference, masks."""

    loss_type: str = Field(
        default="grpo",
        description="What is minimised. On the shelf: grpo (mean within a completion, then over completions), "
        "bnpo, dapo (mean over tokens), dr_grpo (constant denominator), gspo and gspo_token (sequence "
        "ratio), luspo (the same, times length), gmpo (geometric mean of clipped ratios), cispo, sapo, vespo, clip_cov "
        "and kl_cov (hold tokens of high covariance back), reinforce (no ratio, no clip), reinforce_kept (the same, "
        "mean over the completions that masks leave, and the KL over all sampled tokens: usmle-qa.md to the letter). "
        "Or a loss of your own: FILE.py:NAME.",
    )
    loss_parameters: dict[str, float | int | bool | str] = Field(
        default_factory=dict,
        description="Parameters of the loss that have no setting of their own, by name: { k_pos = 2.0 } for vespo.",
    )
    adv_estimator: AdvantageEstimator | Annotated[str, Field(pattern=r".:.")] = Field(
        default="grpo",
        description="How a reward becomes an advantage: grpo (against the group's mean and spread), "
        "naive_grpo (the same, each multi-turn episode counted once), dr_grpo (mean only), rloo (mean of "
        "the others), gigpo (agents: episodes, and turns that began with the same observation), reinforce_plus_plus "
        "(against the batch) and reinforce_plus_plus_baseline (group's mean, then batch), remax (against the prompt's "
        "greedy completion), opo (mean weighed by length), optimal_token_baseline (weighed by the length of gradients, "
        "token by token), gpg, grpo_passk (the best of the group only), or a function "
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
    epsilon: float | None = Field(
        default_factory=default_of("epsilon"),
        ge=0,
        lt=1,
        description="Clip range: importance ratios below 1 - epsilon gain nothing further. none = what loss_type says: "
        "0.2, and 0.0003 for gspo and gspo_token, whose sequence ratio moves far less than a token's, 0.002 for luspo. "
        "For gmpo a range of log-ratios, 0.4.",
    )
    epsilon_high: float | None = Field(
        default=None,
        ge=0,
        description="Upper clip range (ratio above 1 + epsilon_high); none = what loss_type says: 0.28 for "
        "dapo, 0.0004 for gspo and gspo_token, 0.0025 for luspo, else the same as epsilon.",
    )
    delta: float | None = Field(
        default=None,
        gt=1,
        description="Cap on the ratio itself, which also bounds the loss of negative advantages (two-sided "
        "clipping); choose it above 1 + epsilon. none = no cap.",
    )
    epsilon_max: float | None = Field(
        default_factory=default_of("epsilon_max"),
        gt=0,
        description="Cap on the importance ratio with loss_type cispo; other losses do not use it.",
    )
    sapo_temperature_pos: float | None = Field(
        default_factory=default_of("sapo_temperature_pos"),
        gt=0,
        description="Sharpness of the soft gate of loss_type sapo for advantages above 0.",
    )
    sapo_temperature_neg: float | None = Field(
        default_factory=default_of("sapo_temperature_neg"),
        gt=0,
        description="Sharpness of the soft gate of loss_type sapo for advantages up to 0.",
    )
    importance_sampling_level: Literal["token", "sequence", "gspo_token"] | None = Field(
        default=None,
        description="One importance ratio for each token, or one for each completion (GSPO); none = what "
        "loss_type says.",
    )
    num_iterations: int = Field(
        default=1, ge=1, le=1000, description="Passes over each batch of completions (the paper's mu)."
    )
    num_minibatches: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="Optimiser steps of each pass, on random parts of the batch; ratios are against the policy that "
        "sampled all of it.",
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of an entropy bonus; 0 = off.")
    use_adaptive_entropy: bool = Field(
        default=False,
        description="Move entropy_coef, which is then where it begins, after each optimiser step: up by "
        "entropy_coef_delta while the entropy is at or below entropy_target, else down. The bonus acts only after a "
        "step whose entropy was at or below the target (Skywork-OR1, arXiv 2505.22312).",
    )
    entropy_target: float = Field(
        default=0.2, ge=0, description="Entropy that use_adaptive_entropy holds, in nats, mean over trained tokens."
    )
    entropy_coef_delta: float = Field(default=0.005, gt=0, description="Step of use_adaptive_entropy.")
    entropy_coef_min: float = Field(default=0.0, ge=0, description="Least weight with use_adaptive_entropy.")
    entropy_coef_max: float = Field(default=1.0, ge=0, description="Largest weight with use_adaptive_entropy.")
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
    importance_sampling_correction: MismatchCorrection | Literal["auto", "off"] = Field(
        default="auto",
        description="Correct for a sampler whose log-probabilities differ from the trainer's: weigh tokens "
        "or completions by their ratio, truncated at importance_sampling_cap, or drop those above it; auto = "
        "token_truncate where they do differ (vLLM or a server of another kind than covey samples, "
        "sampling.sampler_dtype is narrower than the model's, or schedule.max_staleness is above 0), else off.",
    )
    importance_sampling_cap: float = Field(
        default=3.0, gt=0, description="Largest ratio for importance_sampling_correction."
    )
    importance_sampling_floor: float | None = Field(
        default=None,
        ge=0,
        description="Smallest ratio for importance_sampling_correction, which then bounds on both sides (IcePop); none "
        "= no bound.",
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

    down_sampling: (
        Literal["none", "max_variance", "largest_advantage", "shortest", "token_efficiency", "first"]
        | (Annotated[str, Field(pattern=r".:.")])
    ) = Field(
        default="none",
        description="Which completions of each group are trained on, down_sampling_size of them: those whose rewards "
        "vary most (max_variance: PODS), largest_advantage (CPPO), shortest and token_efficiency (GFPO), the first, or "
        "what a function of yours chooses, FILE.py:RULE. none = all.",
    )
    down_sampling_size: int = Field(
        default=4, ge=1, description="Completions of each group that down_sampling leaves to be trained on."
    )
    down_sampling_statistics: Literal["selected", "group"] | None = Field(
        default=None,
        description="Which rewards an advantage is compared with: those of the completions that are trained on, or "
        "those of the whole group. none = what the paper of the rule does: group for largest_advantage, else selected.",
    )

    @field_validator("scale_rewards", mode="before")
    @classmethod
    def _bool_means_group_or_none(cls, value: Any) -> Any:
        return {True: "group", False: "none"}[value] if isinstance(value, bool) else value

    @field_validator("loss_type", mode="before")
    @classmethod
    def _a_loss(cls, value: Any) -> Any:
        return loss_name(value)

    @field_validator("adv_estimator", "down_sampling", mode="before")
    @classmethod
    def _a_function(cls, value: Any) -> Any:
        return function_name(value)

    @field_validator("epsilon", "epsilon_max", "sapo_temperature_pos", "sapo_temperature_neg", mode="before")
    @classmethod
    def _none_means_the_loss_s_own(cls, value: Any, info: ValidationInfo) -> Any:
        return default_of(str(info.field_name))(info.data) if value is None else value

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        fitting = ("grpo", "naive_grpo", "gigpo")
        if self.multi_objective_aggregation == "normalize_then_sum" and self.adv_estimator not in fitting:
            raise ValueError(
                f"adv_estimator={self.adv_estimator!r}: multi_objective_aggregation 'normalize_then_sum' (GDPO) is an "
                "estimator of its own, which would not use it; remove one of the two settings"
            )
        floor, cap = self.importance_sampling_floor, self.importance_sampling_cap
        if floor is not None and floor >= cap:
            raise ValueError(f"importance_sampling_floor={floor}: choose less than importance_sampling_cap={cap}")
        low, high = self.entropy_coef_min, self.entropy_coef_max
        if self.use_adaptive_entropy and not low <= self.entropy_coef <= high:
            raise ValueError(
                f"entropy_coef={self.entropy_coef}: use_adaptive_entropy keeps it from entropy_coef_min={low} to "
                f"entropy_coef_max={high}; choose a number between these"
            )
        for name in self.loss_parameters:
            setting = "use_adaptive_entropy" if name == "adaptive_entropy" else name
            if setting in type(self).model_fields:
                raise ValueError(f"loss_parameters.{name}: it is a setting of its own; set algorithm.{setting}")
        if ":" not in self.loss_type:  # a file is read when the run begins: a config can be read without it
            self.objective()
        return self

    def objective(self) -> Objective:
        """What is minimised. A parameter of the loss with the name of a setting of this section has its value.

        Raises:
            ConfigError: the loss cannot be found, fails, or has no such parameters.
        """
        loss = find_loss(self.loss_type)
        own = {name: getattr(self, name) for name in loss.parameters if name in type(self).model_fields}
        return make_objective(
            loss,
            beta=self.beta,
            kl_estimator=self.kl_estimator,
            entropy_coef=self.entropy_coef,
            adaptive_entropy=self.use_adaptive_entropy,
            **own,
            **self.loss_parameters,
        )

    @property
    def correction(self) -> Correction | None:
        """How a sampler that differs is corrected for, None = not at all.

        "auto" counts as off here: what a run makes of it says `covey.config.effects.correction_mode`.
        """
        mode, cap = self.importance_sampling_correction, self.importance_sampling_cap
        return None if mode in ("auto", "off") else Correction(mode, cap, self.importance_sampling_floor)

    @property
    def selection(self) -> DownSampling | None:
        """Which completions of a group are trained on, None = all.

        Raises:
            ConfigError: a rule in a file cannot be found.
        """
        if self.down_sampling == "none":
            return None
        return find_down_sampling(self.down_sampling, self.down_sampling_size, self.down_sampling_statistics)

    @property
    def scaling(self) -> dict[str, Any]:
        """What advantages are divided by, as arguments of `group_advantages` and `Outcomes`."""
        return {"scale": self.scale_rewards, "correction": self.std_correction}

    @property
    def uses_reference(self) -> bool:
        """True when something looks at the reference policy."""
        return self.beta > 0 or self.reference_drift_threshold is not None

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps that each step of the run takes."""
        return self.num_iterations * self.num_minibatches

    def entropy_weight(self, coefficient: float | None, entropy: float | None) -> float:
        """The weight of the entropy bonus in an optimiser step."""
        if not self.use_adaptive_entropy:
            return self.entropy_coef
        if coefficient is None or entropy is None or entropy > self.entropy_target:
            return 0.0
        return coefficient

    def next_entropy_coef(self, coefficient: float | None, entropy: float) -> float:
        """Where `use_adaptive_entropy` moves the coefficient after an optimiser step of that entropy, in nats."""
        step = self.entropy_coef_delta if entropy <= self.entropy_target else -self.entropy_coef_delta
        begun = self.entropy_coef if coefficient is None else coefficient
        return min(max(begun + step, self.entropy_coef_min), self.entropy_coef_max)
