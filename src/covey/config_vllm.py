"""What vLLM samplers cannot do, and which of its two kinds of log-probability a run's are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

_INSTEAD = "or distributed.sampler_kind to covey"


def logprobs_mode(config: Any) -> str:
    """The value of vLLM's `--logprobs-mode` with which it tells log-probabilities over all tokens, at the temperature
    of training; "" if none does.

    "processed" ones are taken after the temperature and after tokens were cut, "raw" ones before both.
    """
    if not config.sampling.cuts:
        return "processed_logprobs"
    return "" if any(value != 1 for value in _temperatures(config)) else "raw_logprobs"


def vllm_problems(config: Any) -> Iterator[str]:
    """A sentence for each setting of a `GRPOConfig` that vLLM samplers cannot follow."""
    if not config.distributed.samplers or config.distributed.sampler_kind != "vllm":
        return
    if config.algorithm.keep_sampling_mask:
        yield (
            "algorithm.keep_sampling_mask=True: vLLM does not tell which tokens could be drawn; set it to false, "
            f"{_INSTEAD}"
        )
    elif not logprobs_mode(config):
        other = next(value for value in _temperatures(config) if value != 1)
        yield (
            f"sampling.temperature={other:g} with top_k, top_p or min_p: vLLM tells log-probabilities either before "
            "the temperature or after tokens were cut, and training needs them between the two; set the temperature to "
            f"1, cut nothing, {_INSTEAD}"
        )
    if config.environment.world is not None and config.environment.action_format == "choice":
        yield (
            "environment.action_format='choice': vLLM does not choose among sequences of tokens; set it to text or "
            f"tags, {_INSTEAD}"
        )
    if config.sampling.sampler_dtype not in ("model", config.model.dtype):
        yield (
            f"sampling.sampler_dtype={config.sampling.sampler_dtype!r}: vLLM samples in the model's own number format; "
            f"set it to model, {_INSTEAD}"
        )
    name = config.model.model
    path = Path(name).expanduser()
    if name.startswith("pkg:") or path.is_file() or (path.is_dir() and not (path / "config.json").is_file()):
        yield (
            f"model.model={name!r:.200}: vLLM reads a folder with config.json and safetensors, or a name on the hub; "
            f"save the model so, {_INSTEAD}"
        )


def _temperatures(config: Any) -> list[float]:
    phases = (phase.temperature for phase in config.schedule.phases)
    return [config.sampling.temperature, *(value for value in phases if value is not None)]
