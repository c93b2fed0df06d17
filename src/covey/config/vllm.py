"""What vLLM cannot do in this process, and which of its two kinds of log-probability a run's are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


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
