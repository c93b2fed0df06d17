"""`covey.jax.GRPOConfig`: the options of a recipe that this trainer has, with defaults of their own, and a few more.

The defaults are the plain computation: advantage `r - mean of the group`, loss `-advantage * log-probability of the
response`, KL `log-probability - reference`. `loss_type="grpo", adv_estimator="grpo", kl_estimator="k3"` is GRPO as
published (clipped ratio, rewards divided by the group's spread, a KL estimate that is never negative).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import Parameter, Signature
from typing import Annotated, Any

import jax
from pydantic import BaseModel, Field, ValidationError, field_validator

from covey.algorithms.arrays import unknown_name
from covey.config.algorithm import AlgorithmConfig
from covey.config.sampling import SamplingConfig
from covey.errors import ConfigError

_RENAMED = {"beta": "kl_coeff", "num_generations": "num_samples_per_prompt"}
"""Option of a recipe -> its name here; either will do."""
_DEFAULTS: dict[str, Any] = {"loss_type": "reinforce", "kl_estimator": "k1", "adv_estimator": "dr_grpo"}
_DEFAULTS |= {"num_generations": 8, "max_completion_length": 64}
_ORDER = """
    kl_coeff num_samples_per_prompt temperature max_completion_length eos_token_ids pad_token_id top_k top_p min_p
    loss_type loss_parameters kl_estimator adv_estimator scale_rewards epsilon num_iterations entropy_coef
    mask_truncated_completions off_policy_mask_threshold reference_drift_threshold keep_sampling_mask
    validity_min_length top_entropy_quantile importance_sampling_correction rows_per_pass prompt_bucket seed
    adv_parameters
"""
_OPTIONS = _ORDER.split()
_SIGNATURE = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in _OPTIONS])


class GRPOConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Settings of `covey.jax.GRPOTrainer`, immutable.

    Options have flat names, as in `GRPOConfig(kl_coeff=0.1).temperature`. Those of sampling and of the loss mean the
    same as in a recipe; `covey config --explain NAME` prints them. From the `sampling` section there are
    `num_samples_per_prompt` (a recipe's `num_generations`; default 8), `temperature`, `top_k`, `top_p`, `min_p` and
    `max_completion_length` (default 64). From the `algorithm` section there are `kl_coeff` (a recipe's `beta`) and all
    settings that act within one step. Other defaults are `loss_type="reinforce"`, `adv_estimator="dr_grpo"` and
    `kl_estimator="k1"`.

    Attributes:
        algorithm: the options of the loss.
        sampling: the options of sampling.
        eos_token_ids: tokens that end a response; they belong to it.
        pad_token_id: the token after the end of a response.
        rows_per_pass: number of responses whose activations and logits are held at the same time; the backward pass
            recomputes the others. None = all. It changes memory and time, not the loss.
        prompt_bucket: prompts are padded to this width times a power of two, so that few shapes are compiled.
        seed: of sampling; step s draws from `fold_in(key(seed), s)`.
    """

    algorithm: AlgorithmConfig
    sampling: SamplingConfig
    eos_token_ids: Annotated[tuple[int, ...], Field(strict=False)] = ()
    pad_token_id: int = 0
    rows_per_pass: int | None = Field(default=None, ge=1)
    prompt_bucket: int = Field(default=16, ge=1)
    seed: int = 0

    def __init__(self, *positional: Any, **settings: Any) -> None:
        """Take options by name, or in the order of the names in the module.

        Raises `ConfigError`: an unknown name, with the nearest one; a value out of range; options that do not fit
        together.
        """
        named = {_RENAMED.get(name, name): value for name, value in settings.items()}
        if len(named) < len(settings):
            raise ConfigError(f"{', '.join(settings)}: one of these is given under two names; remove one of the two")
        for name in named:
            if name not in _OPTIONS:
                raise unknown_name(name, _OPTIONS, "grpo_config field")
        given = _SIGNATURE.bind(*positional, **named).arguments
        values = _DEFAULTS | given | {name: given[ours] for name, ours in _RENAMED.items() if ours in given}
        try:
            super().__init__(
                algorithm=AlgorithmConfig(**_of(AlgorithmConfig, values)),
                sampling=SamplingConfig(**_of(SamplingConfig, values)),
                **_of(GRPOConfig, values),
            )
        except ValidationError as error:
            raise _explained(error, given) from error
        objective, estimator = self.algorithm.objective(), self.algorithm.estimator  # what stands in a file is read now
        if self.algorithm.teacher is not None:
            raise ConfigError("teacher: this trainer has none; train with covey.GRPOTrainer")
        needs_more = estimator.needs_turns or estimator.needs_reference or estimator.needs_sum_pi_squared
        if needs_more or estimator.greedy_baseline:
            raise ConfigError(
                f"adv_estimator={self.algorithm.adv_estimator!r}: it needs turns, other log-probabilities or greedy "
                "completions, which this trainer does not give to estimators; choose another one, such as grpo"
            )
        problem = estimator.group_problem({"num_samples_per_prompt": self.sampling.num_generations})
        problem = problem or estimator.credit_problem(objective, jax.grad, jax.numpy.asarray)
        if problem:
            raise ConfigError(problem)

    @field_validator("eos_token_ids", mode="before")
    @classmethod
    def _plain_integers(cls, value: Any) -> Any:
        """NumPy's and JAX's integers are no integers to pydantic."""
        if not isinstance(value, Iterable):
            return value
        return tuple(int(token) if hasattr(token, "__index__") else token for token in value)

    @classmethod
    def of(cls, settings: GRPOConfig | Mapping[str, Any]) -> GRPOConfig:
        """A config as it is, or from a dictionary."""
        if isinstance(settings, cls):
            return settings
        if not isinstance(settings, Mapping):
            raise ConfigError(f"grpo_config={settings!r}: not a GRPOConfig and no dictionary; pass one of these")
        return cls(**settings)

    def __getattr__(self, name: str) -> Any:
        """Read an option without naming its section."""
        option = next((theirs for theirs, ours in _RENAMED.items() if ours == name), name)
        for section in (self.__dict__.get("algorithm"), self.__dict__.get("sampling")):
            if isinstance(section, BaseModel) and option in type(section).model_fields:
                return getattr(section, option)
        raise AttributeError(f"GRPOConfig has no option {name!r}")


def _of(section: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in section.model_fields}


def _explained(error: ValidationError, given: Mapping[str, Any]) -> ConfigError:
    """The first mistake, as a message that names value, reason and fix."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:  # of several options: the text begins with the values at fault
        return ConfigError(str(first["ctx"]["error"]))
    option = str(first["loc"][0])
    name = _RENAMED.get(option, option)
    if first["type"] == "value_error":
        return ConfigError(f"{name}={given[name]!r}: {first['ctx']['error']}")
    fields = {**AlgorithmConfig.model_fields, **SamplingConfig.model_fields, **GRPOConfig.model_fields}
    meaning = (fields[option].description or "").partition(". ")[0].rstrip(".")
    reason = first["msg"][:1].lower() + first["msg"][1:]
    return ConfigError(f"{name}={given[name]!r}: {reason}{f' ({meaning})' if meaning else ''}; choose such a value")
