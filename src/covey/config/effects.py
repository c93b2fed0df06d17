"""How settings depend on each other: what has no effect beside another, and what vLLM in this process cannot follow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from covey.algorithms import ADVANTAGE_ESTIMATORS
from covey.algorithms.losses import LOSSES
from covey.config.names import FIELDS, field_path
from covey.config.sampling import VLLMConfig


def uses_kl(config: Any) -> bool:
    """True when some phase of the run has a KL term."""
    return config.algorithm.beta > 0 or any(phase.beta for phase in config.schedule.phases)


def uses_reference(config: Any) -> bool:
    """True when something looks at the reference."""
    own = ":" in config.algorithm.adv_estimator  # somebody's own estimator may
    return own or uses_kl(config) or config.algorithm.uses_reference


def _estimator(config: Any) -> Any:
    return ADVANTAGE_ESTIMATORS.get(config.algorithm.adv_estimator)  # nothing is known of somebody's own


def _clips(config: Any) -> bool:
    loss = LOSSES.get(config.algorithm.loss_type)  # one in a file may have any parameter
    return loss is None or "epsilon" in loss.parameters


def another_program_samples(config: Any) -> bool:
    """True when not Covey's engine samples: vLLM in this process, or another server."""
    server = config.server
    by_server = server.upload_adapters_to_server and server.inference_server_kind != "covey"
    return bool(by_server or config.sampling.engine == "vllm")


def correction_mode(config: Any) -> str:
    """`algorithm.importance_sampling_correction` of a run, "auto" resolved."""
    chosen: str = config.algorithm.importance_sampling_correction
    mode, colon, bounds = chosen.partition(":")
    if mode != "auto":
        return chosen
    sampler_dtype = config.sampling.sampler_dtype
    narrower = sampler_dtype == "int8" or (sampler_dtype == "bfloat16" and config.model.dtype != "bfloat16")
    # A server is given the adapter, and has a base of its own, which need not be quantised, or not so.
    other_base = config.model.quantization != "none" and config.server.upload_adapters_to_server
    differs = narrower or other_base or config.schedule.max_staleness > 0 or another_program_samples(config)
    return f"token_truncate{colon}{bounds}" if differs else "off"


def _has_ranks(config: Any) -> bool:
    own, server = config.distributed, config.server
    units = own.samplers is not None or (server.upload_adapters_to_server and len(server.urls) > 1)
    return units or own.reward_workers is not None or own.learners > 1 or "WORLD_SIZE" in os.environ


_ACTS_WHEN: dict[tuple[str, ...], tuple[Callable[[Any], object], str]] = {
    ("kl_estimator",): (uses_kl, "algorithm.beta is above 0"),
    ("epsilon",): (_clips, "algorithm.loss_type clips; this one does not"),
    ("importance_sampling_correction",): (
        lambda c: c.algorithm.importance_sampling_correction == "off" or correction_mode(c) != "off",
        "the sampler may differ from the trainer, or a mode is chosen",
    ),
    ("scale_rewards",): (
        lambda c: getattr(_estimator(c), "scaled", True) or c.algorithm.scale_rewards == "none",
        "algorithm.adv_estimator divides by a standard deviation; this one does not",
    ),
    ("reference_update_steps",): (
        uses_reference,
        "the reference is used: algorithm.beta above 0, or reference_drift_threshold",
    ),
    ("reference_ema_decay",): (
        lambda c: c.algorithm.reference_update_steps is not None,
        "algorithm.reference_update_steps is set",
    ),
    ("max_generations",): (
        lambda c: getattr(_estimator(c), "group_relative", True),
        "algorithm.adv_estimator compares completions within a group; this one does not",
    ),
    ("num_train_epochs",): (
        lambda c: c.schedule.max_steps < 0 and not c.schedule.phases,
        "neither schedule.max_steps nor schedule.phases is set",
    ),
    ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"): (
        lambda c: c.model.use_peft and c.model.adapter is None,
        "a new adapter is made: model.use_peft is true and model.adapter is not set",
    ),
    ("inference_server_kind",): (lambda c: c.server.inference_server_url, "server.inference_server_url is set"),
    ("groups_per_unit", "timeout_seconds", "max_restarts", "allow_mixture"): (
        _has_ranks,
        "there are several samplers, learners, workers or servers",
    ),
    ("ray_address",): (
        lambda c: c.distributed.actors or c.distributed.learners > 1,
        "distributed.learners is above 1, or there are Ray actors: samplers or workers",
    ),
    ("gpus_per_sampler",): (lambda c: c.distributed.samplers, "distributed.samplers is above 0"),
    tuple(VLLMConfig.model_fields): (lambda c: c.sampling.engine == "vllm", "sampling.engine is vllm"),
    ("offload",): (lambda c: c.model.device != "cpu", "the model is on a GPU"),
    ("reward_workers",): (
        lambda c: c.environment.world is None,
        "environment.world is not set (worlds score in place)",
    ),
    ("adapter_folder",): (
        lambda c: c.server.inference_server_kind != "covey",
        "server.inference_server_kind is not covey",
    ),
}
"""Fields -> when they have an effect, as a function and in words."""


def without_effect(config: Any) -> list[str]:
    """One sentence for each changed setting that has no effect."""
    found = []
    for fields, (acts, when) in _ACTS_WHEN.items():
        for field in [] if acts(config) else fields:
            section = getattr(config, FIELDS[field])
            default = type(section)(loss_type=section.loss_type) if section is config.algorithm else type(section)()
            if (value := getattr(section, field)) != getattr(default, field):
                found.append(f"{field_path(field)}={value!r} has no effect: it acts only if {when}")
    for phase in config.schedule.phases:
        if phase.min_accuracy is None and phase.learning_rate_cut != 0.5:
            found.append(f"phase {phase.name!r}: learning_rate_cut has no effect: it acts only if min_accuracy is set")
    return found


def logprobs_mode(config: Any) -> str:
    """The value of vLLM's `--logprobs-mode` with which it tells log-probabilities over all tokens, at the temperature
    of training; "" if none does.

    "processed" ones are taken after the temperature and after tokens were cut, "raw" ones before both.
    """
    if not config.sampling.cuts:
        return "processed_logprobs"
    return "" if any(value != 1 for value in _temperatures(config)) else "raw_logprobs"


def vllm_problems(config: Any) -> Iterator[str]:
    """A sentence for each setting of a `GRPOConfig` that a vLLM in the learner's process cannot follow."""
    if config.sampling.engine != "vllm":
        return
    words, chosen, instead = "sampling.engine='vllm'", config.distributed, "or sampling.engine to covey"
    servers = "for vLLM behind URLs set server.inference_server_url=URL, server.inference_server_kind=vllm and"
    if config.algorithm.keep_sampling_mask:
        yield (
            "algorithm.keep_sampling_mask=True: vLLM does not report which tokens could be sampled; set it to false, "
            f"{instead}"
        )
    elif not logprobs_mode(config):
        other = next(value for value in _temperatures(config) if value != 1)
        yield (
            f"sampling.temperature={other:g} with top_k, top_p or min_p: vLLM cannot return log-probabilities after "
            "the temperature and before the cut, which training needs; set the temperature to 1, remove the cut, "
            f"{instead}"
        )
    if config.environment.world is not None and config.environment.action_format == "choice":
        yield (
            "environment.action_format='choice': vLLM cannot be restricted to a list of actions; set it to text or "
            f"tags, {instead}"
        )
    if config.sampling.sampler_dtype not in ("model", config.model.dtype):
        yield (
            f"sampling.sampler_dtype={config.sampling.sampler_dtype!r}: vLLM samples in the model's number format; set "
            f"it to model, {instead}"
        )
    if config.model.quantization != "none" and config.vllm.llm_argument("enable_lora", False):
        yield (
            f"{words} with model.quantization={config.model.quantization!r} and vllm.llm_arguments.enable_lora: vLLM "
            "would sample from the base model without quantization; remove enable_lora"
        )
    if config.server.upload_adapters_to_server:
        yield f"{words} and server.inference_server_url: both would sample; remove one"
    if chosen.samplers:
        yield f"{words} and distributed.samplers={chosen.samplers}: both would sample; set sampling.engine to covey"
    elif chosen.learners > 1:
        yield f"{words} and distributed.learners={chosen.learners}: {servers} sampling.engine=covey"
    if config.schedule.max_staleness > 0:
        yield (
            f"{words} and schedule.max_staleness={config.schedule.max_staleness}: vLLM sleeps during the update; set "
            f"max_staleness to 0; {servers} sampling.engine=covey"
        )


def _temperatures(config: Any) -> list[float]:
    phases = (phase.temperature for phase in config.schedule.phases)
    return [config.sampling.temperature, *(value for value in phases if value is not None)]
