"""The `algorithm` section: what is optimised. Definitions of every term: docs of `covey.algorithms`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from covey.algorithms import Estimator, find_estimator
from covey.algorithms.down_sampling import DownSampling, find_down_sampling, read_down_sampling
from covey.algorithms.losses import default_epsilon, find_loss, function_name, loss_name
from covey.algorithms.mismatch import Correction, read_correction
from covey.algorithms.objective import Objective, make_objective
from covey.config.section import Options, Section
from covey.config.teacher import TeacherConfig
from covey.errors import ConfigError

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


def _tries(value: Any) -> Any:
    return 3 * value if isinstance(value, bool) else value


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
    """The loss. grpo averages over the tokens of a completion, then over completions; dapo over all tokens; bnpo over
    all tokens that are trained; dr_grpo divides by a constant. gspo and gspo_token use one ratio per completion, luspo
    too, times length; gmpo uses the geometric mean of clipped ratios. Others: cispo, sapo, vespo, clip_cov and kl_cov
    (limit tokens of high covariance), reinforce (no ratio, no clip), reinforce_kept (usmle-qa.md to the letter: mean
    over the completions that masks keep, KL over all sampled tokens). Your own: FILE.py:NAME."""
    loss_parameters: Options = Field(default_factory=dict)
    """Parameters of the loss by name. Losses that clip: epsilon_high (upper clip range; default epsilon, for dapo
    0.28), delta (cap on the ratio, which also bounds the loss of negative advantages), importance_sampling_level
    (token, sequence or gspo_token). cispo: epsilon_max. sapo: sapo_temperature_pos, sapo_temperature_neg. vespo: {
    k_pos = 2.0 } and so on."""
    adv_estimator: Annotated[
        AdvantageEstimator | Annotated[str, Field(pattern=r".:.")], BeforeValidator(function_name)
    ] = "grpo"
    """How rewards become advantages. grpo: against the group's mean and standard deviation. naive_grpo: the same, with
    each multi-turn episode counted once. dr_grpo: mean only. rloo: mean of the others. gigpo: for agents, also compares
    turns that began with the same observation. gdpo: normalises each reward function in its group, then their sum over
    the batch. reinforce_plus_plus: against the batch; reinforce_plus_plus_baseline: group mean, then batch. remax:
    against the greedy completion. opo: mean weighted by length. optimal_token_baseline: per token, weighted by gradient
    length. gpg. grpo_passk: only the best of the group. Your own: FILE.py:FUNCTION or MODULE:FUNCTION."""
    adv_parameters: Options = Field(default_factory=dict)
    """Parameters of the estimator by name. reinforce_plus_plus: gamma. Estimators that divide by a standard deviation:
    std_correction (1 divides by G - 1, 0 by G). grpo with agents: step_score, the score of a turn: episode (reward of
    the whole episode), return (discounted return) or step (the turn's own reward). discount of returns. gigpo:
    step_advantage_weight (the paper's omega)."""
    scale_rewards: Annotated[Literal["group", "batch", "none"], BeforeValidator(_spread)] = "group"
    """Divide advantages by the standard deviation of the group, of the whole batch, or not at all. No effect with an
    adv_estimator that does not divide, such as dr_grpo and rloo. True means group, False none."""
    beta: float = Field(default=0.04, ge=0)
    """Weight of the KL divergence from the reference model; 0 turns it off and saves its forward pass."""
    kl_estimator: KLEstimator = "k3"
    """How that KL is estimated per token. k3 is never negative; k3_unbiased is also correct off-policy; exact sums over
    the vocabulary; exact_weighted reproduces a published formula that is not unbiased."""
    epsilon: Annotated[float | None, Field(ge=0, lt=1), BeforeValidator(_loss_s_own)] = Field(
        default_factory=default_epsilon
    )
    """Lower clip range: an importance ratio below 1 - epsilon has no further gradient. none = the default of loss_type:
    0.2; 0.0003 for gspo and gspo_token; 0.002 for luspo; for gmpo 0.4, a range of log-ratios."""
    num_iterations: int = Field(default=1, ge=1, le=1000)
    """Passes over each batch of completions (the paper's mu)."""
    num_minibatches: int = Field(default=1, ge=1, le=10_000)
    """Optimiser steps of each pass, on random parts of the batch. Ratios compare with the policy that sampled the
    batch."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus; 0 = off."""
    adaptive_entropy: AdaptiveEntropy | None = None
    """Adapt entropy_coef to keep the entropy at a target (Skywork-OR1). A table, which may be empty: { target = 0.2,
    delta = 0.005, min = 0.0, max = 1.0 }. After each optimiser step entropy_coef moves by delta: up if the entropy (in
    nats, mean over trained tokens) is at or below target, else down. The bonus acts only after a step with entropy at
    or below target. none = off."""
    mask_truncated_completions: bool = False
    """Leave completions that hit max_completion_length out of the loss."""
    off_policy_mask_threshold: float | None = Field(default=None, ge=0)
    """Remove the policy gradient of a completion with a negative advantage if the mean over its tokens of old - new
    log-probability, in nats, is above this. Averages and its KL term stay (DeepSeek-V3.2, equation 8). none = off."""
    reference_drift_threshold: Annotated[float | str | None, _readable(_read_drift)] = None
    """Leave a completion out of the loss, whatever its advantage, unless the mean over its tokens of policy - reference
    log-probability, in nats, is below this; 0.5 in the USMLE recipe. sum:12 = the sum over its tokens. none = off."""
    keep_sampling_mask: bool = False
    """Store the ids that top_k, top_p and min_p left for each token, and compute all log-probabilities over those ids
    only (DeepSeek-V3.2)."""
    validity_min_length: int | None = Field(default=None, ge=0)
    """Validity mask: leave a completion out of the loss if it has fewer characters than this, has no valid answer or
    repeats itself. It still counts in its group's mean. Without invalid completions nothing teaches the valid form.
    none = off; 10 in the USMLE recipe."""
    top_entropy_quantile: float = Field(default=1.0, gt=0, le=1)
    """Only this fraction of the tokens, those of highest entropy, has a policy gradient. Averages, KL and entropy terms
    still cover all tokens. 1 = all, 0.2 in arXiv 2506.01939."""
    importance_sampling_correction: Annotated[str, _readable(read_correction)] = "auto"
    """Correct for a sampler whose log-probabilities differ from the trainer's. token_truncate and sequence_truncate
    weight tokens or completions by their ratio, capped; token_mask and sequence_mask drop those beyond the cap. The cap
    is 3 unless given (token_truncate:2), or a smallest and a largest ratio (token_mask:0.5:5: IcePop). auto =
    token_truncate with vLLM, a server of another kind than covey, a sampling.sampler_dtype narrower than the model's,
    or schedule.max_staleness above 0; else off."""
    reference_update_steps: int | None = Field(default=None, ge=1)
    """Optimiser steps between updates of the reference from the policy; none = the reference never changes."""
    reference_ema_decay: float = Field(default=0.0, ge=0, lt=1)
    """Share of the old reference that an update keeps (exponential moving average); 0 = a copy."""
    dynamic_sampling: Annotated[int, BeforeValidator(_tries)] = Field(default=0, ge=0)
    """Replace groups whose rewards are all equal by newly sampled ones (DAPO). The number is how many times a step may
    sample in all before it trains on the groups it has. 0 = off; 3 is usual."""
    down_sampling: Annotated[str, BeforeValidator(function_name), _readable(read_down_sampling)] = "none"
    """Train only on some completions of each group, 4 unless a number is given: max_variance:8 (those whose rewards
    vary most: PODS), largest_advantage:8 (CPPO), shortest:8 and token_efficiency:8 (GFPO), first:8, or your own,
    FILE.py:RULE:8. Advantages compare the selected completions or the whole group, as in the rule's paper (group for
    largest_advantage); append `:selected` or `:group` to choose. none = all."""

    teacher: TeacherConfig | None = None
    """A teacher, which says of each sampled token how likely it should be, beside the rewards or in their place. A
    table: { weights = "ema", context = "solution", use = "sum", coef = 1.0, ... }; docs/teachers.md lists its
    settings. none = off."""

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
        terms = {name: getattr(self, name) for name in ("beta", "kl_estimator", "entropy_coef")}
        terms |= {"adaptive_entropy": self.adaptive_entropy is not None, "teacher": self.teacher and self.teacher.term}
        try:
            return make_objective(loss, **terms, **own, **self.loss_parameters)
        except ConfigError as error:
            in_table = str(error).partition("=")[0] in self.loss_parameters
            raise ConfigError(f"{'loss_parameters.' * in_table}{error}") from error

    @property
    def estimator(self) -> Estimator:
        """Of the advantages. Raises `ConfigError`: there is none of that name, or it takes other parameters."""
        own, teacher = find_estimator(self.adv_estimator, self.adv_parameters), self.teacher
        if teacher is None:
            return own
        from covey.algorithms.teaching import taught  # loaded where there is a teacher

        names = ("use", "coef", "task_coef", "reweigh_share", "reweigh_range", "gate_slope")
        return taught(own, teacher.may_teach, **{name: getattr(teacher, name) for name in names})

    @property
    def correction(self) -> Correction | None:
        """How a sampler that differs is corrected for, None = not at all.

        "auto" counts as off here: what a run makes of it says `covey.config.effects.correction_mode`.
        """
        mode, correction = read_correction(self.importance_sampling_correction)
        return None if mode in ("auto", "off") else correction

    @property
    def selection(self) -> DownSampling | None:
        """Which completions of a group are trained on, None = all; `ConfigError`: a rule in a file cannot be found."""
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
