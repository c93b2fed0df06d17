"""Settings that another setting makes pointless: said, so that nobody believes that they act."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from covey.algorithms import ADVANTAGE_ESTIMATORS
from covey.config_names import field_path

if TYPE_CHECKING:
    from covey.config import GRPOConfig

_Condition = Callable[["GRPOConfig"], bool]


def uses_kl(config: GRPOConfig) -> bool:
    """True when some phase of the run has a KL term."""
    return config.algorithm.beta > 0 or any(phase.beta for phase in config.schedule.phases)


def uses_reference(config: GRPOConfig) -> bool:
    """True when something looks at the reference."""
    own = ":" in config.algorithm.adv_estimator  # somebody's own estimator may
    return own or uses_kl(config) or config.algorithm.reference_drift_threshold is not None


def _loss(*names: str) -> _Condition:
    return lambda config: config.algorithm.loss_type in names


def _divides(config: GRPOConfig) -> bool:
    function = ADVANTAGE_ESTIMATORS.get(config.algorithm.adv_estimator)  # nothing is known of somebody's own
    return getattr(function, "scaled", True)


def _set(field: str) -> _Condition:
    return lambda config: bool(getattr(config, field))


_CLIPS = _loss("grpo", "bnpo", "dapo", "dr_grpo", "gspo", "gspo_token")
_NOT_REINFORCE = _loss("grpo", "bnpo", "dapo", "dr_grpo", "gspo", "gspo_token", "cispo", "sapo")

_ACTS_WHEN: tuple[tuple[str, _Condition, str], ...] = (
    ("kl_estimator", uses_kl, "algorithm.beta is above 0"),
    ("epsilon", _CLIPS, "algorithm.loss_type clips; this one does not"),
    ("epsilon_high", _CLIPS, "algorithm.loss_type clips; this one does not"),
    ("delta", _CLIPS, "algorithm.loss_type clips; this one does not"),
    ("epsilon_max", _loss("cispo"), "algorithm.loss_type is cispo"),
    ("sapo_temperature_pos", _loss("sapo"), "algorithm.loss_type is sapo"),
    ("sapo_temperature_neg", _loss("sapo"), "algorithm.loss_type is sapo"),
    ("importance_sampling_level", _NOT_REINFORCE, "algorithm.loss_type has a ratio; this one has none"),
    (
        "importance_sampling_cap",
        lambda c: bool(c.algorithm.importance_sampling_correction) or c.schedule.max_staleness > 0,
        "algorithm.importance_sampling_correction is set",
    ),
    (
        "scale_rewards",
        lambda c: _divides(c) or c.algorithm.scale_rewards == "none",
        "algorithm.adv_estimator divides by a spread; this one does not",
    ),
    (
        "std_correction",
        lambda c: _divides(c) and c.algorithm.scale_rewards != "none",
        "advantages are divided by a spread; these are not",
    ),
    (
        "reference_update",
        uses_reference,
        "something looks at the reference: algorithm.beta above 0, or reference_drift_threshold",
    ),
    ("reference_update_steps", lambda c: c.algorithm.reference_update != "none", "algorithm.reference_update is set"),
    ("reference_ema_decay", lambda c: c.algorithm.reference_update == "ema", "algorithm.reference_update is ema"),
    (
        "reference_drift_reduction",
        lambda c: c.algorithm.reference_drift_threshold is not None,
        "algorithm.reference_drift_threshold is set",
    ),
    ("validity_min_length", _set("validity_mask"), "algorithm.validity_mask is true"),
    ("dynamic_sampling_max_tries", _set("dynamic_sampling"), "algorithm.dynamic_sampling is true"),
    (
        "num_train_epochs",
        lambda c: c.schedule.max_steps < 0 and not c.schedule.phases,
        "neither schedule.max_steps nor schedule.phases says how long the run is",
    ),
    ("lora_r", _set("use_peft"), "model.use_peft is true"),
    ("lora_alpha", _set("use_peft"), "model.use_peft is true"),
    ("lora_dropout", _set("use_peft"), "model.use_peft is true"),
    ("lora_target_modules", _set("use_peft"), "model.use_peft is true"),
    ("inference_server_url", _set("upload_adapters_to_server"), "server.upload_adapters_to_server is true"),
    ("inference_server_kind", _set("upload_adapters_to_server"), "server.upload_adapters_to_server is true"),
    ("adapter_folder", lambda c: c.server.inference_server_kind == "vllm", "server.inference_server_kind is vllm"),
)
"""(field, when it acts, the same in words)."""


def without_effect(config: GRPOConfig) -> list[str]:
    """One sentence for each setting that somebody has changed and that changes nothing, given the others."""
    found = []
    for field, acts, when in _ACTS_WHEN:
        section = getattr(config, field_path(field).partition(".")[0])
        default = type(section)(loss_type=section.loss_type) if field == "epsilon" else type(section)()
        value = getattr(section, field)
        if value != getattr(default, field) and not acts(config):
            found.append(f"{field_path(field)}={value!r} has no effect: it acts only where {when}")
    for phase in config.schedule.phases:
        if (
            phase.min_accuracy is None
            and phase.learning_rate_cut != type(phase).model_fields["learning_rate_cut"].default
        ):
            found.append(
                f"phase {phase.name!r}: learning_rate_cut has no effect: it acts only where min_accuracy is set"
            )
    return found
