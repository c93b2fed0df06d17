"""What every sampler refuses."""

from __future__ import annotations

from typing import Any

from covey.errors import ConfigError, GenerationError
from covey.types import SamplingSettings

NO_VERSION = -1
"""The version of an engine that holds no weights."""


def check_call(settings: SamplingSettings, policy_version: int, *, held: int, tokenizer: Any, model: str) -> None:
    """Refuse what an engine in this process cannot sample.

    Args:
        settings: how tokens are drawn.
        policy_version: that is asked for.
        held: version of the weights that the engine holds, or `NO_VERSION`.
        tokenizer: of the engine, or None.
        model: what the engine calls what it is built from, for the messages.

    Raises:
        GenerationError: other weights are held, or there is no tokenizer to see stop strings with.
        ConfigError: the settings describe no distribution.
    """
    if policy_version != held:
        raise GenerationError(
            f"policy_version={policy_version}: the engine holds {version_in_words(held)}; "
            f"call engine.publish(policy.weights({policy_version})) first"
        )
    check_settings(settings)
    if settings.stop_strings and tokenizer is None:
        raise GenerationError(
            f"stop_strings={settings.stop_strings!r}: the engine has no tokenizer to see text with; "
            f"build it with Engine({model}, tokenizer)"
        )


def version_in_words(held: int) -> str:
    """What an error says of the weights that are held."""
    return "no weights" if held == NO_VERSION else f"version {held}"


def check_settings(settings: SamplingSettings) -> None:
    """Refuse settings that describe no distribution.

    Raises:
        ConfigError: naming the setting.
    """
    rules = (
        (
            "temperature",
            settings.temperature >= 0,
            "it divides the logits; use 0 for greedy, 1 for the model's own",
        ),
        ("top_k", settings.top_k >= 0, "it counts tokens; use 0 to keep all"),
        ("top_p", 0 < settings.top_p <= 1, "it is a probability; use 1.0 to keep all"),
        ("min_p", 0 <= settings.min_p <= 1, "it is a fraction of the top probability; use 0.0 to keep all"),
        ("max_tokens", settings.max_tokens >= 1, "a completion has at least one token; use 1 or more"),
        ("stop_strings", all(settings.stop_strings), "every text contains the empty string; remove it"),
    )
    for name, holds, why in rules:
        if not holds:
            raise ConfigError(f"{name}={getattr(settings, name)!r}: {why}")
