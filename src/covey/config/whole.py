"""`GRPOConfig`: flat for the person who writes it, sectioned for the code that reads it.

A field name is unique over all sections, so that the flat form is unambiguous. (`model` is a section and a
field in it: `GRPOConfig(model="folder")` sets the field, `config.model` reads the section.) Synonyms are accepted on
input (`covey.config.names`) and never written. TRL's names belong to `covey.trl`.
"""

from __future__ import annotations

import os
import shlex
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import tomli_w
from pydantic import ValidationError

from covey.algorithms.down_sampling import read_down_sampling
from covey.algorithms.estimators import ADVANTAGE_ESTIMATORS, small_step
from covey.config.algorithm import AlgorithmConfig
from covey.config.data import DataConfig, RewardConfig
from covey.config.effects import vllm_problems, without_effect
from covey.config.environment import EnvironmentConfig
from covey.config.names import FIELDS, HINTS, MEANS, SECTIONS, canonical_names
from covey.config.run import RunConfig
from covey.config.sampling import ModelConfig, SamplingConfig, VLLMConfig
from covey.config.section import Section
from covey.config.server import DistributedConfig, ServerConfig
from covey.config.text import explain_error, is_unset, parse_overrides, unusable
from covey.config.training import EvaluationConfig, OptimConfig, ScheduleConfig
from covey.errors import ConfigError, shown
from covey.files import no_path
from covey.functions import whole_path
from covey.metric_names import says_which_is_best

if TYPE_CHECKING:
    from typing import Unpack

    from covey.config.flat import Flat, Settings  # generated: tests/test_config_types.py
else:
    Flat = object

__all__ = ["GRPOConfig", "GRPOTrainingArgs"]


class GRPOConfig(Section, Flat, frozen=True):
    """All settings of a run, immutable. `covey config --explain` lists every field with its meaning, unit and range.

    A step samples `sampling.num_generations` completions for each of `data.prompts_per_step` prompts and trains on
    them, in `algorithm.num_iterations * algorithm.num_minibatches` optimiser steps (1 unless set).

    Example:
        config = GRPOConfig(num_generations=8, learning_rate=2e-5, output_dir="runs/first")
        config = GRPOConfig(sampling={"num_generations": 8}, optim={"learning_rate": 2e-5})  # by section
        config.sampling.num_generations, config.num_generations  # both read 8
    """

    model: ModelConfig
    algorithm: AlgorithmConfig
    sampling: SamplingConfig
    vllm: VLLMConfig
    data: DataConfig
    rewards: RewardConfig
    environment: EnvironmentConfig
    server: ServerConfig
    distributed: DistributedConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    evaluation: EvaluationConfig
    run: RunConfig

    def __init__(self, output_dir: str | Path | None = None, /, **settings: Unpack[Settings]) -> None:
        """Settings are given by field name, by section (a mapping or a section object) or by synonym.
        `GRPOConfig("runs/first")` sets `run.output_dir`.

        Raises `ConfigError`: a name is unknown or a value is wrong. The message has one line for each mistake.
        """
        if output_dir is not None:
            settings = {"output_dir": output_dir, **settings}
        super().__init__(**_build_sections(canonical_names(settings)))
        if problems := list(_across_sections(self)):
            raise ConfigError("\n".join(problems))
        for sentence in without_effect(self):
            warnings.warn(sentence, stacklevel=2)

    if not TYPE_CHECKING:  # who checks types reads `Flat`, where a misspelt name is an error

        def __getattr__(self, name: str) -> Any:
            """Read a field without naming its section."""
            section = self.__dict__.get(FIELDS.get(name, ""))
            if section is not None:
                return getattr(section, name)
            other = (MEANS | HINTS).get(name)
            close = [other] if other else get_close_matches(name, FIELDS, n=1)
            raise AttributeError(
                f"GRPOConfig has no setting {name!r}" + (f"; did you mean {close[0]}?" if close else "")
            )

    def __dir__(self) -> Iterable[str]:
        """With the flat names, which a notebook completes."""
        return [*super().__dir__(), *FIELDS]

    @property
    def max_steps_ahead(self) -> int:
        """How many steps may be sampled ahead of the one in training."""
        return self.schedule.max_staleness // self.algorithm.optimizer_steps

    @property
    def group_sizes(self) -> dict[str, int]:
        """Name of a setting -> completions per prompt: the run's setting and those of its phases."""
        sizes = {"sampling.num_generations": self.sampling.num_generations}
        for number, phase in enumerate(self.schedule.phases):
            if phase.num_generations is not None:
                sizes[f"schedule.phases[{number}].num_generations"] = phase.num_generations
        return sizes

    @property
    def largest_group(self) -> int:
        """The most completions that a prompt can have in a step."""
        return max([*self.group_sizes.values(), self.sampling.max_generations or 0])

    @classmethod
    def from_toml(cls, path: str | Path, overrides: Iterable[str] = ()) -> Self:
        """Read a TOML file whose tables are sections, then apply overrides such as `sampling.num_generations=8`.

        An override's value is read as TOML, else as text. `none` (in the file "none") unsets an optional field. The
        section may be left out (`beta=0.02`), and synonyms work too. `FILE.py:NAME` and data files are searched beside
        the TOML file, then in the working directory. Model and adapter folders, and paths in overrides, are searched in
        the working directory only. Paths are stored in full, so that a run can be resumed from anywhere. The default of
        `run.output_dir` is `runs/NAME`, where NAME is the name of the file, or of the folder that holds `recipe.toml`.

        Raises `ConfigError`: the file cannot be read or is not TOML, a name is unknown, or a value is wrong.
        """
        try:
            is_odd = os.path.exists(path) and not os.path.isfile(path)
            table = {} if is_odd else tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: is not valid TOML ({error}); correct it there") from error
        except (OSError, ValueError, TypeError, RecursionError) as error:  # no file, no text, no path, too deep
            fix = "give the path of a TOML file"
            if isinstance(error, FileNotFoundError) and "recipes" in Path(path).parts:
                fix += " (recipes are not in the package: copy a folder of recipes/ from Covey's repository)"
            elif isinstance(error, FileNotFoundError) and Path(path).with_name("config.toml").is_file():
                fix += f", such as {Path(path).with_name('config.toml')}"
            raise ConfigError(f"{path!s:.300}: cannot be read ({error}); {fix}") from error
        if is_odd:
            raise ConfigError(f"{path}: is not a file; give the path of a TOML file")
        named = {name: None if is_unset(name, value) else value for name, value in canonical_names(table).items()}
        written = _whole_paths(named, Path(path).parent, Path())
        changes = _whole_paths(canonical_names(parse_overrides(overrides), base=written), Path())
        file = Path(path).absolute()
        name = file.parent.name if file.name == "recipe.toml" else file.stem
        return cls(**({"output_dir": f"runs/{name}"} | written | changes))

    @classmethod
    def from_overrides(cls, overrides: Iterable[str]) -> Self:
        """The default settings with overrides such as `sampling.num_generations=8`, read as in `from_toml`.

        Raises `ConfigError`: a name is unknown or a value is wrong.
        """
        return cls(**_whole_paths(canonical_names(parse_overrides(overrides)), Path()))

    def with_overrides(self, overrides: Iterable[str]) -> Self:
        """A copy with overrides such as `sampling.num_generations=8`, read as in `from_toml`.

        A setting whose default depends on another one follows it, unless its value was changed.

        Raises `ConfigError`: a name is unknown or a value is wrong.
        """
        own = AlgorithmConfig(loss_type=self.algorithm.loss_type).epsilon  # follows the loss until somebody sets it
        written = {
            field: getattr(getattr(self, section), field)
            for field, section in FIELDS.items()
            if field != "epsilon" or self.algorithm.epsilon != own
        }
        changes = canonical_names(parse_overrides(overrides), base=written)
        return type(self)(**(written | _whole_paths(changes, Path())))

    def with_whole_paths(self) -> Self:
        """A copy with full paths of files and folders, as in `from_toml`."""
        named = {field: getattr(getattr(self, FIELDS[field]), field) for field in (*_CODE, *_DATA, *_WEIGHTS)}
        whole = _whole_paths(named, Path())
        changed = {field: value for field, value in whole.items() if value != named[field]}
        return self.replace(**changed) if changed else self

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Section -> field -> value, in types that JSON can hold. `GRPOConfig(**config.to_dict()) == config`."""
        return self.model_dump(mode="json")

    def to_toml(self) -> str:
        """All settings as TOML, defaults included. Settings that are None are left out and read back as None."""
        return tomli_w.dumps(_without_none(self.to_dict()))

    def replace(self, **settings: Unpack[Settings]) -> Self:
        """A validated copy with other settings, given in any form that the constructor accepts.

        A setting that was never set keeps its default, also if that depends on another setting.

        Raises `ConfigError`: a name is unknown or a value is wrong.
        """
        written: dict[str, Any] = {}
        for name in SECTIONS:
            section = getattr(self, name)
            written.update({field: getattr(section, field) for field in section.model_fields_set})
        current = {field: getattr(getattr(self, section), field) for field, section in FIELDS.items()}
        return type(self)(**(written | canonical_names(settings, base=current)))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _without_none(inner) for name, inner in value.items() if inner is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value


GRPOConfig.__signature__ = Signature(  # a notebook completes these names
    [Parameter(name, Parameter.KEYWORD_ONLY, default=...) for name in dict.fromkeys([*FIELDS, *SECTIONS])]
)

GRPOTrainingArgs = GRPOConfig

_PATHS = ("model", "adapter", "adv_estimator", "dataset", "eval_dataset", "functions", "adapter_folder", "output_dir")
"""Fields that name files, or may."""

_CODE: tuple[str, ...] = ("functions", "correctness", "task", "world", "loss_type", "adv_estimator", "down_sampling")
_CODE += ("inference_server_kind", "tools")
_DATA, _WEIGHTS = ("dataset", "eval_dataset"), ("model", "adapter")
"""Fields that may name something in a file of the user's, a file of data, and a folder or file of weights."""


def _whole_paths(values: Mapping[str, Any], *folders: Path) -> dict[str, Any]:
    """Fields -> values, where what names a file in one of the folders has its whole path: a folder of weights in the
    last one, since a recipe that is a run's has folders of weights beside it.
    """

    def whole(field: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(whole(field, item) for item in value)
        if not isinstance(value, str) or no_path(value):
            return value
        if field == "tools" and value.startswith("mcp:"):
            return _whole_command(value, folders)
        if field in _CODE:
            return whole_path(value, folders)
        places = folders if field in _DATA else folders[-1:] if field in _WEIGHTS else ()
        found = (folder / value for folder in places if os.path.exists(folder / value))
        return next(map(os.path.abspath, found), value)

    return {field: whole(field, value) for field, value in values.items()}


def _whole_command(value: str, folders: Sequence[Path]) -> str:
    """`mcp:COMMAND` with the whole path of each file in it that one of the folders has."""

    def whole(word: str) -> str:
        found = (folder / word for folder in folders if (folder / word).is_file())
        return next(map(os.path.abspath, found), word)

    try:
        words = shlex.split(value.removeprefix("mcp:"))
    except ValueError:  # a quotation mark alone: the server will not start
        return value
    return f"mcp:{shlex.join(map(whole, words))}"


def _build_sections(values: Mapping[str, Any]) -> dict[str, Section]:
    sections: dict[str, Section] = {}
    problems: list[str] = []
    for name, section in SECTIONS.items():
        given = {field: values[field] for field in section.model_fields if field in values}
        odd = {field: unusable(value) or (field in _PATHS and no_path(value)) for field, value in given.items()}
        if any(odd.values()):
            problems.extend(f"{name}.{field}={shown(given[field])}: {why}" for field, why in odd.items() if why)
            continue
        try:
            sections[name] = section(**given)
        except ValidationError as error:
            problems.extend(explain_error(name, error, given))
    if problems:
        raise ConfigError("\n".join(problems))
    return sections


def _across_sections(config: GRPOConfig) -> Iterator[str]:
    """Combinations over several sections. What a section can see by itself is checked there."""
    algorithm, sampling, model = config.algorithm, config.sampling, config.model
    if algorithm.keep_sampling_mask and not sampling.cuts:
        yield (
            "algorithm.keep_sampling_mask=True: no token is ever excluded from sampling; set sampling.top_k, top_p or "
            "min_p, or algorithm.keep_sampling_mask to false"
        )
    if config.rewards.soft_overlong_cache >= sampling.max_completion_length:
        yield (
            f"rewards.soft_overlong_cache={config.rewards.soft_overlong_cache}: must be smaller than "
            f"sampling.max_completion_length={sampling.max_completion_length}; lower it"
        )
    longest, skipped = sampling.max_completion_length, algorithm.teacher.skip_tokens if algorithm.teacher else 0
    if skipped >= longest:
        yield f"algorithm.teacher.skip_tokens={skipped}: must be below sampling.max_completion_length={longest}"
    metric = config.evaluation.metric_for_best_model
    if not says_which_is_best(metric):
        yield (
            f"evaluation.metric_for_best_model={metric!r}: not an evaluation metric where higher is better; use "
            "eval/accuracy, eval/reward, eval/rewards/<function>/mean, or a metric that a reward function logs with "
            "log_metric"
        )
    if model.dtype in ("bfloat16", "float16") and not model.use_peft:
        yield (
            f"model.dtype={model.dtype!r} (bf16 or fp16) and model.use_peft=False: half precision rounds most weight "
            'updates away; set model.dtype to "float32" and optim.autocast to "bfloat16", or model.use_peft to true'
        )
    if config.environment.world is not None and (config.data.task or config.data.dataset):
        yield (
            f"environment.world={shown(config.environment.world)} with data.task or data.dataset: a world brings its "
            "own tasks; remove one of the settings"
        )
    samplers = config.distributed.samplers
    if samplers and config.server.inference_server_url is not None:
        yield (
            f"distributed.samplers={samplers} and server.inference_server_url={config.server.inference_server_url!r}: "
            "use either actors or servers to sample; set distributed.samplers to 0, or remove inference_server_url"
        )
    yield from vllm_problems(config)
    to_covey = config.server.upload_adapters_to_server and config.server.inference_server_kind == "covey"
    if to_covey and not model.use_peft:
        yield (
            "server.inference_server_url and model.use_peft=False: only adapters can be uploaded; set model.use_peft "
            "to true"
        )
    if algorithm.adv_estimator in ADVANTAGE_ESTIMATORS:  # somebody's own is looked at when the run is put together
        estimator = algorithm.estimator
        yield from filter(None, [estimator.group_problem(config.group_sizes)])
        if algorithm.adv_parameters:
            estimator(small_step(conversing=True))
    most = sampling.max_generations
    setting, size = min(config.group_sizes.items(), key=lambda item: item[1])
    if most is not None and most <= size:
        yield (
            f"sampling.max_generations={most}: must be more than the {size} completions of a group ({setting}); raise "
            "it, or remove it"
        )
    rule, number, _ = read_down_sampling(algorithm.down_sampling)
    if rule != "none" and number >= config.largest_group:
        sizes = {**config.group_sizes, **({} if most is None else {"sampling.max_generations": most})}
        setting, size = max(sizes.items(), key=lambda item: item[1])
        yield (
            f"algorithm.down_sampling={algorithm.down_sampling!r}: groups have at most {size} completions ({setting}), "
            f"so selecting {number} leaves none out; write a smaller number after the rule, or make groups larger"
        )
    if config.schedule.max_staleness > 0 and config.max_steps_ahead == 0:
        yield (
            f"schedule.max_staleness={config.schedule.max_staleness}: a step takes {algorithm.optimizer_steps} "
            "optimiser steps (algorithm.num_iterations x num_minibatches), so samples of the step before are already "
            f"too old; set schedule.max_staleness to {algorithm.optimizer_steps} or more, or to 0"
        )
    frozen = model.use_peft and model.adapter is None and "embed" not in str(model.lora_target_modules)
    if config.optim.embedding_lr is not None and frozen:
        yield (
            f"optim.embedding_lr={config.optim.embedding_lr:g}: with LoRA the embedding is frozen; remove it, set "
            "model.use_peft to false, or name the embedding (embed_tokens) in model.lora_target_modules"
        )
