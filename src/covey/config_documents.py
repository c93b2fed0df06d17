"""Options of published recipes that are no field under another name, with the meaning that they have there.

They are those of usmle-qa.md's `GRPO_CONFIG`; plain synonyms (`kl_coef`) are in `covey.config_names`.
"""

from __future__ import annotations

from typing import Any

from covey.config_trl import Options, Settings, Translator
from covey.errors import ConfigError


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

NAMES = frozenset(name for names, _ in TRANSLATORS for name in names)
