"""Sampling for a `rollout_func`, imported as in TRL's examples with OpenEnv."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from covey.errors import ConfigError
from covey.tasks.dataset import build_prompts
from covey.training.setup import sampling_settings
from covey.trl.translate import as_mapping
from covey.types import Request


def generate_rollout_completions(
    trainer: Any, prompts: Sequence[Any], *, generation_overrides: Mapping[str, Any] | None = None, **_: Any
) -> list[dict[str, Any]]:
    """Sample a completion of each prompt with the current weights.

    Args:
        trainer: the trainer given to `rollout_func`.
        prompts: strings or conversations; a repeated prompt gets a different completion each time.
        generation_overrides: not supported.

    Returns:
        For each prompt `prompt_ids`, `completion_ids`, `logprobs` (a float for each sampled token) and `text`.

    Raises:
        ConfigError: `generation_overrides` is given.
        DataError: a prompt is malformed or too long.
        GenerationError: from the engine.
    """
    if generation_overrides:
        raise ConfigError(
            f"generation_overrides={dict(generation_overrides)!r:.200}: a run samples in one way; set GRPOConfig"
        )
    run, kwargs = trainer.run, as_mapping("chat_template_kwargs", trainer.args.chat_template_kwargs)
    found = build_prompts([{"prompt": one} for one in prompts], run.policy.tokenizer, chat_template_kwargs=kwargs)
    # A rollout of several turns calls this several times a step: the prompt tells the calls apart.
    key = (run.args.run.seed, run.state.global_step)
    requests = [
        Request(prompt.token_ids, (*key, zlib.crc32(prompt.token_ids.tobytes()), place))
        for place, prompt in enumerate(found)
    ]
    settings = sampling_settings(run.args, run.policy, run.args.sampling.temperature)
    completions = run.engine(requests, settings, policy_version=run.state.policy_version)
    return [
        {
            "prompt_ids": prompt.token_ids.tolist(),
            "completion_ids": completion.token_ids.tolist(),
            "logprobs": completion.logprobs.tolist(),
            "text": run.decode(completion.token_ids.tolist()),
        }
        for prompt, completion in zip(found, completions, strict=True)
    ]
