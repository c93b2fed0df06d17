"""From the names that people write to the names of fields.

A setting may be given as `beta`, in a section (`algorithm.beta`, or a table `algorithm` with `beta` in it),
under a synonym (`kl_coef`) or under TRL's name. `canonical_names` reduces all of these to field -> value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from enum import Enum
from typing import Any

from pydantic import BaseModel

from covey import config_documents, config_trl
from covey.algorithms.config import AlgorithmConfig
from covey.environments.config import EnvironmentConfig
from covey.errors import ConfigError
from covey.observe.config import RunConfig
from covey.rewards.config import RewardConfig
from covey.rollout.config import ModelConfig, SamplingConfig
from covey.serving.config import ServerConfig
from covey.tasks.config import DataConfig
from covey.training.config import EvaluationConfig, OptimConfig, ScheduleConfig

SECTIONS: dict[str, type[BaseModel]] = {
    "model": ModelConfig,
    "algorithm": AlgorithmConfig,
    "sampling": SamplingConfig,
    "data": DataConfig,
    "rewards": RewardConfig,
    "environment": EnvironmentConfig,
    "server": ServerConfig,
    "optim": OptimConfig,
    "schedule": ScheduleConfig,
    "evaluation": EvaluationConfig,
    "run": RunConfig,
}

FIELDS: dict[str, str] = {name: section for section, model in SECTIONS.items() for name in model.model_fields}
"""Field -> its section. Field names are unique over all sections."""

SYNONYMS: dict[str, str] = {
    "kl_coef": "beta",
    "kl_coeff": "beta",
    "num_samples_per_prompt": "num_generations",
    "env.rollout.n": "num_generations",
    "max_new_tokens": "max_completion_length",
    "clip_epsilon": "epsilon",
    "num_epochs": "num_train_epochs",
    "update_reference_every": "reference_update_steps",
    "normalize_advantages": "scale_rewards",
    "norm_adv_by_std_in_grpo": "scale_rewards",
}
"""Accepted on input, never written. One with dots in it is a whole path."""

_OPTIONS = config_trl.NAMES | config_documents.NAMES
"""Names that are no fields and are translated into some."""


def field_path(field: str) -> str:
    """`beta` -> `algorithm.beta`."""
    return f"{FIELDS[field]}.{field}"


def resolve(path: str) -> str:
    """The field or TRL option that a written path means.

    Raises:
        ConfigError: no such section or setting, or a setting in another one's section.
    """
    if path in SYNONYMS:
        return SYNONYMS[path]
    section, _, name = path.rpartition(".")
    field = SYNONYMS.get(name, name)
    if section not in SECTIONS and section != "":
        raise ConfigError(f"{path}: there is no section {section!r}; {_nearest(name, section)}")
    if field in FIELDS:
        if section not in ("", FIELDS[field]):
            raise ConfigError(f"{path}: {name} is no setting of section {section}; write {field_path(field)}")
        return field
    if name in _OPTIONS:
        return name
    if path in SECTIONS:
        raise ConfigError(f"{path}: a section takes a table of settings, such as {path}={{...}}")
    raise ConfigError(f"{path}: there is no such setting; {_nearest(name, section)}")


def _nearest(name: str, section: str) -> str:
    if name in FIELDS:
        return f"write {field_path(name)}"
    sections = get_close_matches(section, SECTIONS, n=1) if section else []
    own = list(SECTIONS[sections[0]].model_fields) if sections else []
    for names in (own, [*FIELDS, *SYNONYMS, *sorted(_OPTIONS)]):
        for match in get_close_matches(name, names, n=1):
            field = SYNONYMS.get(match, match)
            return f"did you mean {field_path(field) if field in FIELDS else field}?"
    return "`covey config --explain` lists all settings"


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Tables opened up: `{"algorithm": {"beta": 0}}` -> `("algorithm.beta", 0)`."""
    for key, value in settings.items():
        path = f"{prefix}{key}"
        if path in SECTIONS and isinstance(value, SECTIONS[path]):
            value = {name: getattr(value, name) for name in value.model_fields_set}
        name = path.rpartition(".")[2]
        is_setting = name in FIELDS or name in SYNONYMS or name in _OPTIONS
        if isinstance(value, Mapping) and (path in SECTIONS or (value and not is_setting)):
            yield from _leaves(value, f"{path}.")
        else:
            value = value.value if isinstance(value, Enum) else value
            yield path, value.tolist() if hasattr(value, "tolist") else value  # of NumPy, torch or pandas


def _phase(phase: Any) -> Any:
    return {SYNONYMS.get(name, name): value for name, value in phase.items()} if isinstance(phase, Mapping) else phase


class _Settings:
    """Fields given so far, each with the way in which it was written."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.written: dict[str, str] = {}
        self.problems: list[str] = []

    def put(self, field: str, value: Any, written: str) -> None:
        if field == "scale_rewards" and isinstance(value, bool):
            value = "group" if value else "none"
        if field == "phases" and isinstance(value, list | tuple):
            value = tuple(_phase(phase) for phase in value)
        if isinstance(value, list):
            value = tuple(value)
        if field in self.values and self.values[field] != value:
            self.problems.append(
                f"{self.written[field]} and {written}: both set {field_path(field)}, to different values; keep one"
            )
        self.values[field] = value
        self.written[field] = written


def canonical_names(settings: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Reduce settings in any accepted form to field -> value; the values are not validated here.

    Args:
        settings: what somebody wrote, see the module docstring.
        base: fields that hold already, for options whose meaning depends on others (TRL's batch sizes).

    Raises:
        ConfigError: unknown names, or one setting given twice with different values.
    """
    result = _Settings()
    options: dict[str, Any] = {}
    for path, value in _leaves(settings):
        try:
            name = resolve(path)
        except ConfigError as error:
            result.problems.append(str(error))
            continue
        if name not in FIELDS:
            options[name] = value
        elif (shared := config_trl.shared_field(name, value)) is not None:
            result.put(*shared, f"{path}={value!r}")
            if path.rpartition(".")[2] == "update_reference_every":
                result.put("reference_update", "copy", f"{path}={value!r}")
    for strategy, steps in (("save_strategy", "save_steps"), ("eval_strategy", "eval_steps")):
        if options.get(strategy) == "no":  # in TRL the strategy decides whether the number is looked at
            result.values.pop(steps, None)
    known = {**(base or {}), **result.values}
    translated, problems = config_trl.translate(options, known, config_documents.TRANSLATORS)
    result.problems.extend(problems)
    for field, value, written in translated:
        result.put(field, value, written)
    if known.get("loss_type") == "cispo" and result.values.get("epsilon_high") is not None:
        # TRL gives CISPO's cap under this name.
        cap = result.values.pop("epsilon_high")
        result.put("epsilon_max", cap, result.written["epsilon_high"])
    if result.problems:
        raise ConfigError("\n".join(result.problems))
    return result.values
