"""Settings that another setting makes pointless: said, so that nobody believes that they act."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from covey.algorithms import ADVANTAGE_ESTIMATORS
from covey.algorithms.losses import LOSSES
from covey.config.names import field_path
from covey.config.sampling import VLLMConfig

_Condition = Callable[[Any], bool]
"""Asked of a `GRPOConfig`, which is composed above this module."""


def uses_kl(config: Any) -> bool:
    """True when some phase of the run has a KL term."""
    return config.algorithm.beta > 0 or any(phase.beta for phase in config.schedule.phases)


def uses_reference(config: Any) -> bool:
    """True when something looks at the reference."""
    own = ":" in config.algorithm.adv_estimator  # somebody's own estimator may
    return own or uses_kl(config) or config.algorithm.uses_reference


def _loss_takes(parameter: str) -> _Condition:
    """True when the loss has the parameter; one in a file may have any."""

    def takes(config: Any) -> bool:
        loss = LOSSES.get(config.algorithm.loss_type)
        return loss is None or parameter in loss.parameters

    return takes


def _divides(config: Any) -> bool:
    function = ADVANTAGE_ESTIMATORS.get(config.algorithm.adv_estimator)  # nothing is known of somebody's own
    return getattr(function, "scaled", True)


def _compares(config: Any) -> bool:
    function = ADVANTAGE_ESTIMATORS.get(config.algorithm.adv_estimator)
    return getattr(function, "group_relative", True)


def _set(field: str) -> _Condition:
    return lambda config: bool(getattr(config, field))


def another_program_samples(config: Any) -> bool:
    """True when not Covey's engine samples: vLLM in this process, or another server."""
    server = config.server
    by_server = server.upload_adapters_to_server and server.inference_server_kind != "covey"
    return bool(by_server or config.sampling.engine == "vllm")


def correction_mode(config: Any) -> str:
    """`algorithm.importance_sampling_correction` of a run, "auto" resolved."""
    chosen: str = config.algorithm.importance_sampling_correction
    if chosen != "auto":
        return chosen
    narrower = config.sampling.sampler_dtype == "bfloat16" and config.model.dtype != "bfloat16"
    # A server is given the adapter, and has a base of its own, which need not be quantised, or not so.
    other_base = config.model.quantization != "none" and config.server.upload_adapters_to_server
    differs = narrower or other_base or config.schedule.max_staleness > 0 or another_program_samples(config)
    return "token_truncate" if differs else "off"


def _corrects(config: Any) -> bool:
    return correction_mode(config) != "off"


def _down_samples(config: Any) -> bool:
    return bool(config.algorithm.down_sampling != "none")


_DOWN_SAMPLING = ("down_sampling_size", "down_sampling_statistics")
_BOUNDS = ("importance_sampling_cap", "importance_sampling_floor")
_ENTROPY = ("entropy_target", "entropy_coef_delta", "entropy_coef_min", "entropy_coef_max")

_OF_RANKS = ("groups_per_unit", "timeout_seconds", "max_restarts", "allow_mixture")


def _vllm_here(config: Any) -> bool:
    return bool(config.sampling.engine == "vllm")


def _has_units(config: Any) -> bool:
    server = config.server
    return config.distributed.samplers is not None or (server.upload_adapters_to_server and len(server.urls) > 1)


def _has_workers(config: Any) -> bool:
    return config.distributed.reward_workers is not None


def _has_ranks(config: Any) -> bool:
    return _has_units(config) or _has_workers(config) or config.distributed.learners > 1 or "WORLD_SIZE" in os.environ


_OF_ADAPTERS = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")


def _makes_an_adapter(config: Any) -> bool:
    return config.model.use_peft and config.model.adapter is None


_ACTS_WHEN: tuple[tuple[str, _Condition, str], ...] = (
    ("kl_estimator", uses_kl, "algorithm.beta is above 0"),
    ("epsilon", _loss_takes("epsilon"), "algorithm.loss_type clips; this one does not"),
    ("epsilon_high", _loss_takes("epsilon_high"), "algorithm.loss_type clips; this one does not"),
    ("delta", _loss_takes("delta"), "algorithm.loss_type clips; this one does not"),
    ("epsilon_max", _loss_takes("epsilon_max"), "algorithm.loss_type is cispo"),
    ("sapo_temperature_pos", _loss_takes("sapo_temperature_pos"), "algorithm.loss_type is sapo"),
    ("sapo_temperature_neg", _loss_takes("sapo_temperature_neg"), "algorithm.loss_type is sapo"),
    (
        "importance_sampling_level",
        _loss_takes("importance_sampling_level"),
        "algorithm.loss_type has a ratio; this one has none",
    ),
    *((bound, _corrects, "algorithm.importance_sampling_correction is set") for bound in _BOUNDS),
    *((field, _set("use_adaptive_entropy"), "algorithm.use_adaptive_entropy is true") for field in _ENTROPY),
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
    ("max_generations", _compares, "completions of a group compete; with this algorithm.adv_estimator they do not"),
    ("dynamic_sampling_max_tries", _set("dynamic_sampling"), "algorithm.dynamic_sampling is true"),
    *((field, _down_samples, "algorithm.down_sampling is set") for field in _DOWN_SAMPLING),
    (
        "num_train_epochs",
        lambda c: c.schedule.max_steps < 0 and not c.schedule.phases,
        "neither schedule.max_steps nor schedule.phases says how long the run is",
    ),
    *((field, _makes_an_adapter, "an adapter is made: model.use_peft and no model.adapter") for field in _OF_ADAPTERS),
    ("inference_server_url", _set("upload_adapters_to_server"), "server.upload_adapters_to_server is true"),
    ("inference_server_kind", _set("upload_adapters_to_server"), "server.upload_adapters_to_server is true"),
    *((field, _has_ranks, "there are several samplers, learners, workers or servers") for field in _OF_RANKS),
    (
        "ray_address",
        lambda c: c.distributed.actors or c.distributed.learners > 1,
        "distributed.learners is above 1, or there are Ray actors: samplers or workers",
    ),
    ("gpus_per_sampler", _set("samplers"), "distributed.samplers is above 0"),
    *((field, _vllm_here, "sampling.engine is vllm") for field in VLLMConfig.model_fields),
    ("offload", lambda c: c.model.device != "cpu", "the model is on a GPU"),
    ("reward_workers", lambda c: c.environment.world is None, "there is no environment.world, which scores itself"),
    (
        "adapter_folder",
        lambda c: c.server.inference_server_kind != "covey",
        "server.inference_server_kind is not covey",
    ),
)
"""(field, when it acts, the same in words)."""


def without_effect(config: Any) -> list[str]:
    """One sentence for each setting that somebody has changed and that changes nothing, given the others."""
    found = []
    for field, acts, when in _ACTS_WHEN:
        section = getattr(config, field_path(field).partition(".")[0])
        default = type(section)(loss_type=section.loss_type) if section is config.algorithm else type(section)()
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
