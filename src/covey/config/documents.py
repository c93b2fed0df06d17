"""Options of published recipes that are no field under another name, with the meaning that they have there.

They are those of usmle-qa.md's `GRPO_CONFIG`; plain synonyms (`kl_coef`) are in `covey.config.names`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from covey.errors import ConfigError

Options = Mapping[str, Any]
Settings = Iterator[tuple[str, Any, str]]
"""(field, value, the option as it was written)."""
Translator = Callable[[Options, Options], Settings]


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: it switches something on or off; write true or false")
    return value


def _baseline(options: Options, known: Options) -> Settings:
    if not _switch("use_baseline", options["use_baseline"]):
        raise ConfigError(
            "use_baseline=False: without its group's mean a reward is no advantage, and the loss no GRPO; remove it"
        )
    yield from ()


def _unbiased_kl(options: Options, known: Options) -> Settings:
    """On: the estimator that is unbiased. The document's own formula is not, and is called `exact_weighted`."""
    on = _switch("use_unbiased_kl", options["use_unbiased_kl"])
    yield "kl_estimator", "k3_unbiased" if on else "k1", f"use_unbiased_kl={on}"


def _off_policy(options: Options, known: Options) -> Settings:
    """The document's mask compares with the reference, whatever its name says."""
    on = _switch("use_off_policy_masking", options.get("use_off_policy_masking", True))
    threshold = options.get("off_policy_threshold", 0.5)
    written = ", ".join(f"{name}={options[name]}" for name in _OFF_POLICY if name in options)
    yield "reference_drift_threshold", threshold if on else None, written


_OFF_POLICY = ("use_off_policy_masking", "off_policy_threshold")

TRANSLATORS: tuple[tuple[tuple[str, ...], Translator], ...] = (
    (("use_baseline",), _baseline),
    (("use_unbiased_kl",), _unbiased_kl),
    (_OFF_POLICY, _off_policy),
)
"""Which options each translator reads together."""

NAMES: dict[str, str] = {
    "use_baseline": "adv_estimator",
    "use_unbiased_kl": "kl_estimator",
    **dict.fromkeys(_OFF_POLICY, "reference_drift_threshold"),
}
"""Option -> the field that it is about."""


def translate(options: Options, known: Options) -> tuple[list[tuple[str, Any, str]], list[str]]:
    """Turn options into fields."""
    settings: list[tuple[str, Any, str]] = []
    problems: list[str] = []
    for names, translator in TRANSLATORS:
        if any(name in options for name in names):
            try:
                settings.extend(translator(options, known))
            except ConfigError as error:
                problems.append(str(error))
    return settings, problems
