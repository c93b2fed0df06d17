"""`covey.jax.GRPOConfig`: names of the JAX interface where it has one, those of the `algorithm` section elsewhere.

The defaults are the plain computation: advantage `r - mean of the group`, loss `-advantage * log-probability of the
response`, KL `log-probability - reference`. `loss_type="grpo", adv_estimator="grpo", kl_estimator="k3"` is GRPO as
published (clipped ratio, rewards divided by the group's spread, a KL estimate that is never negative).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from covey.algorithms import MISMATCH_MODES, Correction, Objective, find_estimator, find_loss, make_objective
from covey.algorithms.arrays import lookup, unknown_name
from covey.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GRPOConfig:
    """Settings of `covey.jax.GRPOTrainer`.

    Attributes:
        kl_coeff: weight of the KL divergence from the reference; 0 turns it off and saves its forward pass.
        num_samples_per_prompt: N, responses for each prompt, 2 or more.
        temperature: divides the logits before the softmax, when sampling and when scoring; above 0.
        max_completion_length: T, longest response in tokens.
        eos_token_ids: sampling of a response stops after any of these; the token belongs to the response.
        pad_token_id: fills what follows a response.
        top_k: draw from the k most likely tokens; 0 = all.
        top_p: draw from the smallest set with at least this probability, after `top_k`; 1 = all.
        min_p: draw tokens with at least this fraction of the likeliest one's probability; 0 = all.
        loss_type: a name in `covey.algorithms.LOSSES`, or FILE.py:NAME.
        loss_parameters: parameters of the loss that are no setting here, by name.
        kl_estimator: a name in `covey.algorithms.KL_ESTIMATORS` or `VOCABULARY_KL`.
        adv_estimator: see `covey.algorithms.ADVANTAGE_ESTIMATORS`.
        scale_rewards: group, batch or none; dr_grpo and rloo do not divide whatever it says.
        std_correction: 1 sample, 0 population standard deviation.
        epsilon: lower clip range; None = what `loss_type` says. So are the following ones.
        epsilon_high: upper clip range.
        delta: cap on the ratio for negative advantages too.
        epsilon_max: cap of cispo.
        sapo_temperature_pos: gate of sapo for advantages above 0.
        sapo_temperature_neg: the same for the others.
        importance_sampling_level: token, sequence or gspo_token.
        num_iterations: optimiser steps that `train` takes on each sampled batch.
        entropy_coef: weight of an entropy bonus.
        mask_truncated_completions: leave responses that hit the limit out of the loss.
        off_policy_mask_threshold: DeepSeek-V3.2's mask of the surrogate, in nats; None = off.
        reference_drift_threshold: keep a response when policy - reference is below this, in nats; None = off.
        reference_drift_reduction: per_token_mean or sum.
        keep_sampling_mask: log-probabilities over the tokens that top_k, top_p and min_p left.
        validity_mask: leave short, answerless and repetitive responses out of the loss; needs `decode`.
        validity_min_length: in characters.
        top_entropy_quantile: only this share of the tokens, the most uncertain ones, has a surrogate; 1 = all.
        importance_sampling_correction: see `covey.algorithms.MISMATCH_MODES`; None = off.
        importance_sampling_cap: its largest ratio.
        importance_sampling_floor: its smallest ratio; None = no bound.
        rows_per_pass: responses whose activations and logits are held at once; the backward pass recomputes the others.
            None = all. Changes memory and time, not the loss.
        prompt_bucket: prompts are padded to this width times a power of two, so that few shapes are compiled.
        seed: of sampling; step s draws from `fold_in(key(seed), s)`.
    """

    kl_coeff: float = 0.04
    num_samples_per_prompt: int = 8
    temperature: float = 1.0
    max_completion_length: int = 64
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    loss_type: str = "reinforce"
    loss_parameters: Mapping[str, Any] = field(default_factory=dict)
    kl_estimator: str = "k1"
    adv_estimator: str = "dr_grpo"
    scale_rewards: str = "group"
    std_correction: int = 1
    epsilon: float | None = None
    epsilon_high: float | None = None
    delta: float | None = None
    epsilon_max: float | None = None
    sapo_temperature_pos: float | None = None
    sapo_temperature_neg: float | None = None
    importance_sampling_level: str | None = None
    num_iterations: int = 1
    entropy_coef: float = 0.0
    mask_truncated_completions: bool = False
    off_policy_mask_threshold: float | None = None
    reference_drift_threshold: float | None = None
    reference_drift_reduction: str = "per_token_mean"
    keep_sampling_mask: bool = False
    validity_mask: bool = False
    validity_min_length: int = 10
    top_entropy_quantile: float = 1.0
    importance_sampling_correction: str | None = None
    importance_sampling_cap: float = 3.0
    importance_sampling_floor: float | None = None
    rows_per_pass: int | None = None
    prompt_bucket: int = 16
    seed: int = 0
    objective: Objective = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check names and ranges, and make the objective.

        Raises:
            ConfigError: an unknown name, or a number out of range.
        """
        object.__setattr__(self, "eos_token_ids", tuple(int(token) for token in self.eos_token_ids))
        for name, fine, reason, fix in (
            ("kl_coeff", self.kl_coeff >= 0, "it would reward leaving the reference", "0 or more"),
            ("num_samples_per_prompt", self.num_samples_per_prompt >= 2, "a group compares its members", "2 or more"),
            ("temperature", self.temperature > 0, "logits are divided by it", "more than 0, usually 1"),
            ("max_completion_length", self.max_completion_length >= 1, "a response has a token", "1 or more"),
            ("top_k", self.top_k >= 0, "it counts tokens", "0 (all) or more"),
            ("top_p", 0 < self.top_p <= 1, "it is a probability", "0 < top_p <= 1"),
            ("min_p", 0 <= self.min_p < 1, "it is a fraction of a probability", "0 <= min_p < 1"),
            ("std_correction", self.std_correction in (0, 1), "the spread is divided by G or G - 1", "0 or 1"),
            ("scale_rewards", self.scale_rewards in ("group", "batch", "none"), "no such name", "group, batch or none"),
            ("num_iterations", self.num_iterations >= 1, "a batch is trained on", "1 or more"),
            ("entropy_coef", self.entropy_coef >= 0, "it is the weight of a bonus", "0 or more"),
            ("top_entropy_quantile", 0 < self.top_entropy_quantile <= 1, "it is a share of the tokens", "0 < q <= 1"),
            ("importance_sampling_cap", self.importance_sampling_cap > 0, "it bounds a ratio", "more than 0"),
            ("rows_per_pass", self.rows_per_pass is None or self.rows_per_pass >= 1, "it counts rows", "1 or more"),
            ("prompt_bucket", self.prompt_bucket >= 1, "it is a width in tokens", "1 or more"),
            (
                "reference_drift_reduction",
                self.reference_drift_reduction in ("per_token_mean", "sum"),
                "no such name",
                "per_token_mean or sum",
            ),
        ):
            if not fine:
                raise ConfigError(f"{name}={getattr(self, name)!r}: {reason}; choose {fix}")
        estimator = find_estimator(self.adv_estimator)
        if estimator.needs_turns or estimator.needs_reference or estimator.greedy_baseline:
            raise ConfigError(
                f"adv_estimator={self.adv_estimator!r}: it needs turns, the reference or greedy completions, which "
                "this trainer does not give to estimators; choose another one, such as grpo"
            )
        if self.importance_sampling_correction is not None:
            lookup(MISMATCH_MODES, self.importance_sampling_correction, "importance_sampling_correction")
        loss = find_loss(self.loss_type)
        own = {name: getattr(self, name) for name in loss.parameters if name in self.__slots__}
        objective = make_objective(
            loss,
            beta=self.kl_coeff,
            kl_estimator=self.kl_estimator,
            entropy_coef=self.entropy_coef,
            **own,
            **self.loss_parameters,
        )
        object.__setattr__(self, "objective", objective)

    @classmethod
    def of(cls, settings: GRPOConfig | Mapping[str, Any]) -> GRPOConfig:
        """A config as it is, or from a dictionary.

        Raises:
            ConfigError: an unknown name; the message gives the nearest known one.
        """
        if isinstance(settings, cls):
            return settings
        if not isinstance(settings, Mapping):
            raise ConfigError(f"grpo_config={settings!r}: not a GRPOConfig and no dictionary; pass one of these")
        known = [f.name for f in fields(cls) if f.init]
        for name in settings:
            if name not in known:
                raise unknown_name(name, known, "grpo_config field")
        return cls(**settings)

    @property
    def uses_reference(self) -> bool:
        """True when the reference model is run at all."""
        return self.kl_coeff > 0 or self.reference_drift_threshold is not None

    @property
    def uses_reference_logprobs(self) -> bool:
        """True when log-probabilities of the sampled tokens under the reference are used."""
        return self.objective.estimates_kl or self.reference_drift_threshold is not None

    @property
    def correction(self) -> Correction | None:
        """How a sampler that differs is corrected for, None = not at all."""
        mode, cap = self.importance_sampling_correction, self.importance_sampling_cap
        return None if mode is None else Correction(mode, cap, self.importance_sampling_floor)
