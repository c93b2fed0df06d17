"""The `algorithm` section: what is optimised. Definitions of every term: docs of `covey.algorithms`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from covey.algorithms.down_sampling import DownSampling, find_down_sampling, read_down_sampling
from covey.algorithms.losses import default_epsilon, find_loss, function_name, loss_name
from covey.algorithms.mismatch import Correction, read_correction
from covey.algorithms.objective import Objective, make_objective
from covey.config.section import Options, Section

KLEstimator = Literal["k1", "k2", "k3", "k1+", "k3+", "abs", "k3_unbiased", "exact", "exact_weighted"]
_Comparing = Literal["grpo", "naive_grpo", "dr_grpo", "rloo", "gigpo", "gdpo"]
_Reinforce = Literal["reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "optimal_token_baseline"]
AdvantageEstimator = Literal[_Comparing, _Reinforce, "gpg", "grpo_passk"]


def _read_drift(text: str) -> float:
    try:
        kind, number = text.split(":")
        if kind == "sum":
            return float(number)
    except ValueError:
        pass
    raise ValueError("must be a number, of the mean over tokens, or sum: and a number, such as sum:12")


def _readable(read: Callable[[str], object]) -> AfterValidator:
    def check(value: Any) -> Any:
        if isinstance(value, str):
            read(value)
        return value

    return AfterValidator(check)


def _spread(value: Any) -> Any:
    return {True: "group", False: "none"}[value] if isinstance(value, bool) else value


def _loss_s_own(value: Any, info: ValidationInfo) -> Any:
    return default_epsilon(info.data) if value is None else value


class AdaptiveEntropy(Section, frozen=True):
    """How the weight of the entropy bonus follows the entropy (Skywork-OR1, arXiv 2505.22312)."""

    target: float = Field(default=0.2, ge=0)
    delta: float = Field(default=0.005, gt=0)
    min: float = Field(default=0.0, ge=0)
    max: float = Field(default=1.0, ge=0)


class AlgorithmConfig(Section, frozen=True):
    """Advantages, surrogate, KL to the reference, masks."""

    loss_type: Annotated[str, BeforeValidator(loss_name)] = "grpo"
    """What is minimised. On the shelf: grpo (mean within a completion, then over completions), bnpo, dapo (mean over
    tokens), dr_grpo (constant denominator), gspo and gspo_token (sequence ratio), luspo (the same, times length), gmpo
    (geometric mean of clipped ratios), cispo, sapo, vespo, clip_cov and kl_cov (hold tokens of high covariance back),
    reinforce (no ratio, no clip), reinforce_kept (the same, mean over the completions that masks leave, and the KL over
    all sampled tokens: usmle-qa.md to the letter). Or a loss of your own: FILE.py:NAME."""
    loss_parameters: Options = Field(default_factory=dict)
    """The loss's own parameters by name, as its function has them: epsilon_high (upper clip range, where it is another
    one than epsilon: 0.28 for dapo), delta (cap on the ratio itself, which also bounds the loss of negative advantages)
    and importance_sampling_level (token, sequence or gspo_token: one ratio for each of these) of losses that clip,
    epsilon_max of cispo, sapo_temperature_pos and sapo_temperature_neg of sapo, { k_pos = 2.0 } of vespo."""
    adv_estimator: Annotated[
        AdvantageEstimator | Annotated[str, Field(pattern=r".:.")], BeforeValidator(function_name)
    ] = "grpo"
    """How a reward becomes an advantage: grpo (against the group's mean and spread), naive_grpo (the same, each
    multi-turn episode counted once), dr_grpo (mean only), rloo (mean of the others), gigpo (agents: episodes, and turns
    that began with the same observation), gdpo (several reward functions: each is normalised in its group, and their
    sum over the batch), reinforce_plus_plus (against the batch) and reinforce_plus_plus_baseline (group's mean, then
    batch), remax (against the prompt's greedy completion), opo (mean weighed by length), optimal_token_baseline
    (weighed by the length of gradients, token by token), gpg, grpo_passk (the best of the group only), or a function of
    yours, FILE.py:FUNCTION or MODULE:FUNCTION."""
    adv_parameters: Options = Field(default_factory=dict)
    """The estimator's own parameters by name: gamma of reinforce_plus_plus; std_correction where rewards are divided by
    a spread (1 divides squares by G - 1, 0 by G); of agents step_score of grpo (what is compared: the reward of a
    turn's whole episode, its discounted return, or the turn's own reward: episode, return, step), discount of returns,
    and step_advantage_weight of gigpo (the paper's omega)."""
    scale_rewards: Annotated[Literal["group", "batch", "none"], BeforeValidator(_spread)] = "group"
    """Spread that advantages are divided by: that of the group, of the whole batch, or none. Has no effect with an
    adv_estimator that does not divide, such as dr_grpo and rloo. True means group, False none."""
    beta: float = Field(default=0.04, ge=0)
    """Weight of the KL divergence from the reference model; 0 turns it off and saves its forward pass."""
    kl_estimator: KLEstimator = "k3"
    """How that KL is estimated, per token. k3 is never negative; k3_unbiased is also right off-policy; exact sums over
    the vocabulary; exact_weighted reproduces a published formula that is not unbiased."""
    epsilon: Annotated[float | None, Field(ge=0, lt=1), BeforeValidator(_loss_s_own)] = Field(
        default_factory=default_epsilon
    )
    """Clip range: importance ratios below 1 - epsilon gain nothing further. none = what loss_type says: 0.2, and 0.0003
    for gspo and gspo_token, whose sequence ratio moves far less than a token's, 0.002 for luspo. For gmpo a range of
    log-ratios, 0.4."""
    num_iterations: int = Field(default=1, ge=1, le=1000)
    """Passes over each batch of completions (the paper's mu)."""
    num_minibatches: int = Field(default=1, ge=1, le=10_000)
    """Optimiser steps of each pass, on random parts of the batch; ratios are against the policy that sampled all of
    it."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus; 0 = off."""
    adaptive_entropy: AdaptiveEntropy | None = None
    """A table, { target = 0.2, delta = 0.005, min = 0.0, max = 1.0 }, which may be empty: move entropy_coef, which is
    then where it begins, after each optimiser step, up by delta while the entropy (in nats, mean over trained tokens)
    is at or below target, else down, from min to max. The bonus acts only after a step whose entropy was at or below
    the target (Skywork-OR1). none = off."""
    mask_truncated_completions: bool = False
    """Leave completions that hit max_completion_length out of the loss."""
    off_policy_mask_threshold: float | None = Field(default=None, ge=0)
    """A completion with a negative advantage has no policy gradient when the mean over its tokens of old - new
    log-probability, in nats, is above this; averages and its KL term stay (DeepSeek-V3.2, equation 8). none = off."""
    reference_drift_threshold: Annotated[float | str | None, _readable(_read_drift)] = None
    """Leave a completion out of the loss unless policy - reference log-probability, in nats, mean over its tokens, is
    below this, whatever its advantage; 0.5 in the USMLE recipe. sum:12 = the sum over its tokens. none = off."""
    keep_sampling_mask: bool = False
    """Keep, with each token, the ids that top_k, top_p and min_p had left, and take all log-probabilities over those
    ids only (DeepSeek-V3.2)."""
    validity_min_length: int | None = Field(default=None, ge=0)
    """Validity mask: leave a completion that has fewer characters than this, has no valid answer or repeats itself out
    of the loss (it still counts in its group's mean). Beware: with every invalid completion goes the signal that would
    teach a valid form. none = off; 10 in the USMLE recipe."""
    top_entropy_quantile: float = Field(default=1.0, gt=0, le=1)
    """Only this fraction of the tokens, the most uncertain ones, has a policy gradient; averages are still over all
    tokens, and so are KL and entropy terms. 1 = all, 0.2 in arXiv 2506.01939."""
    importance_sampling_correction: Annotated[str, _readable(read_correction)] = "auto"
    """Correct for a sampler whose log-probabilities differ from the trainer's. token_truncate, sequence_truncate: weigh
    tokens or completions by their ratio, up to a largest; token_mask, sequence_mask: drop those beyond it. The largest
    ratio follows, 3 unless it is given (token_truncate:2), or the smallest and the largest (token_mask:0.5:5: IcePop).
    auto = token_truncate where they do differ (vLLM or a server of another kind than covey samples,
    sampling.sampler_dtype is narrower than the model's, or schedule.max_staleness is above 0), else off."""
    reference_update_steps: int | None = Field(default=None, ge=1)
    """Optimiser steps between updates by which the reference follows the policy; none = it never does."""
    reference_ema_decay: float = Field(default=0.0, ge=0, lt=1)
    """Share of the old reference that an update keeps (exponential moving average); 0 = a copy."""
    dynamic_sampling: int = Field(default=0, ge=0)
    """Replace groups that teach nothing, whose rewards are all equal, by newly sampled ones (DAPO): how many times a
    step may sample in all before it trains on the groups it has. 0 = off; 3 is usual."""
    down_sampling: Annotated[str, BeforeValidator(function_name), _readable(read_down_sampling)] = "none"
    """Which completions of each group are trained on, and how many, 4 unless it is said: max_variance:8 (those whose
    rewards vary most: PODS), largest_advantage:8 (CPPO), shortest:8 and token_efficiency:8 (GFPO), first:8, or what a
    function of yours chooses, FILE.py:RULE:8. An advantage is compared with the completions that are trained on, or
    with the whole group, as the paper of the rule does (group for largest_advantage); `:selected` or `:group` after the
    number says otherwise. none = all."""

    def problems(self) -> Iterator[str]:
        entropy = self.adaptive_entropy
        if entropy is not None and not entropy.min <= self.entropy_coef <= entropy.max:
            yield (
                f"entropy_coef={self.entropy_coef}: adaptive_entropy keeps it from min={entropy.min} to "
                f"max={entropy.max}; choose a number between these"
            )
        for name in (name for name in self.loss_parameters if name in type(self).model_fields):
            yield f"loss_parameters.{name}: it is a setting of its own; set algorithm.{name}"
        if ":" not in self.loss_type:  # a file is read when the run begins: a config can be read without it
            self.objective()

    def objective(self) -> Objective:
        """What is minimised. A parameter of the loss with the name of a setting of this section has its value.

        Raises `ConfigError`: the loss cannot be found, fails, or has no such parameters.
        """
        loss = find_loss(self.loss_type)
        own = {name: getattr(self, name) for name in loss.parameters if name in type(self).model_fields}
        return make_objective(
            loss,
            beta=self.beta,
            kl_estimator=self.kl_estimator,
            entropy_coef=self.entropy_coef,
            adaptive_entropy=self.adaptive_entropy is not None,
            **own,
            **self.loss_parameters,
        )

    @property
    def correction(self) -> Correction | None:
        """How a sampler that differs is corrected for, None = not at all.

        "auto" counts as off here: what a run makes of it says `covey.config.effects.correction_mode`.
        """
        mode, correction = read_correction(self.importance_sampling_correction)
        return None if mode in ("auto", "off") else correction

    @property
    def selection(self) -> DownSampling | None:
        """Which completions of a group are trained on, None = all.

        Raises `ConfigError`: a rule in a file cannot be found.
        """
        return find_down_sampling(self.down_sampling)

    @property
    def scaling(self) -> dict[str, Any]:
        """What advantages are divided by, as arguments of `group_advantages` and `Outcomes`."""
        return {"scale": self.scale_rewards, "correction": self.adv_parameters.get("std_correction", 1)}

    @property
    def reference_update(self) -> Literal["none", "copy", "ema"]:
        """Whether the reference follows the policy: never, as a copy of it, or as a moving average."""
        if self.reference_update_steps is None:
            return "none"
        return "ema" if self.reference_ema_decay > 0 else "copy"

    @property
    def reference_drift(self) -> tuple[float, str] | None:
        """Threshold and reduction of `reference_drift_mask`, None = no such mask."""
        threshold = self.reference_drift_threshold
        if isinstance(threshold, str):
            return _read_drift(threshold), "sum"
        return None if threshold is None else (threshold, "per_token_mean")

    @property
    def uses_reference(self) -> bool:
        """True when something looks at the reference policy."""
        return self.beta > 0 or self.reference_drift_threshold is not None

    @property
    def masks_by_entropy(self) -> bool:
        """True when a mask looks at the entropy of the current policy."""
        return self.top_entropy_quantile < 1

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps that each step of the run takes."""
        return self.num_iterations * self.num_minibatches

    def entropy_weight(self, coefficient: float | None, entropy: float | None) -> float:
        """The weight of the entropy bonus in an optimiser step."""
        if self.adaptive_entropy is None:
            return self.entropy_coef
        if coefficient is None or entropy is None or entropy > self.adaptive_entropy.target:
            return 0.0
        return coefficient

    def next_entropy_coef(self, coefficient: float | None, entropy: float) -> float:
        """Where `adaptive_entropy` moves the coefficient after an optimiser step of that entropy, in nats."""
        by = self.adaptive_entropy or AdaptiveEntropy()
        begun = self.entropy_coef if coefficient is None else coefficient
        return min(max(begun + (by.delta if entropy <= by.target else -by.delta), by.min), by.max)
