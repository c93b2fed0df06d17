"""What every sampler refuses."""

from __future__ import annotations

from covey.errors import ConfigError
from covey.types import SamplingSettings


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
