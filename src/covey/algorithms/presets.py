"""What is minimised, as a value: an `Objective` names its parts, a preset is a named combination of them.

A new surrogate, ratio or aggregation is a new entry in its registry; nothing else has to know about it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from covey.algorithms.aggregation import AGGREGATORS
from covey.algorithms.arrays import Array, lookup, unknown_name
from covey.algorithms.kl import KL_ESTIMATORS, VOCABULARY_KL
from covey.algorithms.surrogates import (
    RATIOS,
    Surrogate,
    cispo_surrogate,
    clip_surrogate,
    reinforce_surrogate,
    sapo_surrogate,
)
from covey.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective of one run: hashable, so that it can be a static argument of a compiled function.

    Attributes:
        surrogate: name in `SURROGATES`.
        importance_sampling_level: name in `RATIOS`: `token`, `sequence` (GSPO) or `gspo_token`.
        aggregation: name in `AGGREGATORS`; used through `token_weights`.
        eps_low: the ratio is clipped below `1 - eps_low`.
        eps_high: the ratio is clipped above `1 + eps_high`; None = `eps_low`.
        delta: upper cap of the ratio for negative advantages too (two-sided clip); None = none.
        epsilon_max: cap of the weight of `cispo`.
        sapo_temperature_pos: temperature of the gate of `sapo` for positive advantages.
        sapo_temperature_neg: the same for the others.
        beta: weight of the KL to the reference; 0 = no KL term.
        kl_estimator: name in `KL_ESTIMATORS` or `VOCABULARY_KL`.
        kl_aggregation: name in `AGGREGATORS`: masks leave the KL alone, and its average is this one over all sampled
            tokens; None = the KL has the surrogate's masks and weights.
        entropy_coef: weight of the entropy bonus; 0 = none.
    """

    surrogate: str = "clip"
    importance_sampling_level: str = "token"
    aggregation: str = "sequence_mean"
    eps_low: float = 0.2
    eps_high: float | None = None
    delta: float | None = None
    epsilon_max: float = 5.0
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    beta: float = 0.0
    kl_estimator: str = "k3"
    kl_aggregation: str | None = None
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        """Check names and ranges.

        Raises:
            ConfigError: an unknown name, or a number out of range.
        """
        lookup(SURROGATES, self.surrogate, "surrogate")
        lookup(RATIOS, self.importance_sampling_level, "importance_sampling_level")
        lookup(AGGREGATORS, self.aggregation, "aggregation")
        lookup(AGGREGATORS, self.kl_aggregation or self.aggregation, "kl_aggregation")
        lookup({**KL_ESTIMATORS, **VOCABULARY_KL}, self.kl_estimator, "kl_estimator")
        _require(0 <= self.eps_low <= 1, "epsilon", self.eps_low, "ratios are clipped around 1", "0 to 1")
        _require(self.upper >= 0, "epsilon_high", self.upper, "ratios are clipped around 1", "0 or more")
        _require(
            self.delta is None or self.delta > 1 + self.upper,
            "delta",
            self.delta,
            f"below 1 + epsilon_high = {1 + self.upper:g} it would replace the clip",
            "a larger one, or None",
        )
        _require(self.epsilon_max > 0, "epsilon_max", self.epsilon_max, "it caps a ratio", "more than 0")
        for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "the gate divides by it", "more than 0")
        _require(self.beta >= 0, "beta", self.beta, "it would reward leaving the reference", "0 or more")

    @property
    def upper(self) -> float:
        """`eps_high`, or `eps_low` where it is not set."""
        return self.eps_low if self.eps_high is None else self.eps_high


def _require(fine: bool, name: str, value: object, reason: str, fix: str) -> None:
    if not fine:
        raise ConfigError(f"{name}={value}: {reason}; choose {fix}")


def _clip(ratio: Array, logp: Array, advantages: Array, objective: Objective) -> Surrogate:
    return clip_surrogate(ratio, advantages, objective.eps_low, objective.upper, objective.delta)


def _reinforce(ratio: Array, logp: Array, advantages: Array, objective: Objective) -> Surrogate:
    return reinforce_surrogate(logp, advantages)


def _cispo(ratio: Array, logp: Array, advantages: Array, objective: Objective) -> Surrogate:
    return cispo_surrogate(ratio, logp, advantages, objective.epsilon_max)


def _sapo(ratio: Array, logp: Array, advantages: Array, objective: Objective) -> Surrogate:
    return sapo_surrogate(ratio, advantages, objective.sapo_temperature_pos, objective.sapo_temperature_neg)


SURROGATES: dict[str, Callable[[Array, Array, Array, Objective], Surrogate]] = {
    "clip": _clip,
    "reinforce": _reinforce,
    "cispo": _cispo,
    "sapo": _sapo,
}
"""`surrogate` -> `f(ratio, logp, advantages, objective) -> Surrogate`, arrays `[N, T]`."""

LOSS_PRESETS: dict[str, Objective] = {
    "grpo": Objective(),
    "bnpo": Objective(aggregation="token_mean"),
    "dapo": Objective(aggregation="token_mean", eps_high=0.28),  # clip-higher, arXiv 2503.14476
    "dr_grpo": Objective(aggregation="constant_length"),
    # A sequence ratio is a geometric mean and moves far less than a token's: the bounds of the GSPO paper,
    # section 5.1.
    "gspo": Objective(importance_sampling_level="sequence", eps_low=3e-4, eps_high=4e-4),
    "gspo_token": Objective(importance_sampling_level="gspo_token", eps_low=3e-4, eps_high=4e-4),
    "cispo": Objective(surrogate="cispo", aggregation="token_mean"),
    "sapo": Objective(surrogate="sapo"),
    "reinforce": Objective(surrogate="reinforce", aggregation="sequence_sum_mean"),
    # usmle-qa.md, train_step: -(log_probs * advantages * mask).sum() / mask.sum() + kl_coef * kl.mean()
    "reinforce_kept": Objective(surrogate="reinforce", aggregation="sequence_sum_kept", kl_aggregation="token_mean"),
}
"""`loss_type` -> its objective."""

_SYNONYMS = {"epsilon": "eps_low", "epsilon_high": "eps_high"}


def make_objective(loss_type: str = "grpo", **overrides: Any) -> Objective:
    """The objective of a preset, with fields replaced.

    Args:
        loss_type: a name in `LOSS_PRESETS`.
        **overrides: fields of `Objective`; `epsilon` and `epsilon_high` are accepted for `eps_low` and
            `eps_high`. None keeps the preset's value, and so does leaving a field out; but an `eps_low` above
            the preset's `eps_high` holds for both sides unless `eps_high` is given too.

    Raises:
        ConfigError: unknown preset, field or part (the message gives the nearest name), or a number out of
            range.
    """
    preset = lookup(LOSS_PRESETS, loss_type, "loss_type")
    known = [field.name for field in fields(Objective)]
    changes = {}
    for name, value in overrides.items():
        field = _SYNONYMS.get(name, name)
        if field not in known:
            raise unknown_name(name, known, "objective field")
        if value is not None:
            changes[field] = value
    if "eps_low" in changes and "eps_high" not in changes and changes["eps_low"] > preset.upper:
        changes["eps_high"] = None
    return replace(preset, **changes)
