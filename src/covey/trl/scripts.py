"""What TRL's scripts import beside trainer and config: arguments, a parser that reads YAML, LoRA from arguments, and
several datasets as one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from peft import LoraConfig
from transformers import BitsAndBytesConfig, HfArgumentParser

from covey.errors import ConfigError


@dataclass
class ScriptArguments:
    """Which data a script trains on."""

    dataset_name: str | None = field(default=None, metadata={"help": "Hub id or path of the dataset."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the dataset."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split to evaluate on."})
    dataset_streaming: bool = field(default=False, metadata={"help": "Stream the dataset."})
    ignore_bias_buffers: bool = field(default=False, metadata={"help": "Of distributed training; no effect."})


@dataclass
class ModelConfig:
    """Which model a script trains, and its adapter."""

    trust_remote_code = False  # no option of its own: it is one of `GRPOConfig`

    model_name_or_path: str | None = field(default=None, metadata={"help": "Hub id or folder of the model."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of the model."})
    dtype: str | None = field(default="float32", metadata={"help": "Number type of the weights."})
    torch_dtype: str | None = field(default=None, metadata={"help": "Former name of dtype."})
    attn_implementation: str | None = field(default=None, metadata={"help": "Attention; Covey brings its own."})
    use_peft: bool = field(default=False, metadata={"help": "Train a LoRA adapter."})
    lora_r: int = field(default=16, metadata={"help": "Rank."})
    lora_alpha: int = field(default=32, metadata={"help": "The adapter is scaled by alpha / r."})
    lora_dropout: float = field(default=0.05, metadata={"help": "Dropout on the adapter's input."})
    lora_target_modules: list[str] | None = field(default=None, metadata={"help": "Names of modules."})
    lora_target_parameters: list[str] | None = field(default=None, metadata={"help": "Names of parameters."})
    lora_modules_to_save: list[str] | None = field(default=None, metadata={"help": "Modules trained whole."})
    lora_task_type: str = field(default="CAUSAL_LM", metadata={"help": "PEFT's task."})
    use_rslora: bool = field(default=False, metadata={"help": "Scale by alpha / sqrt(r)."})
    use_dora: bool = field(default=False, metadata={"help": "DoRA."})
    load_in_8bit: bool = field(default=False, metadata={"help": "8-bit weights."})
    load_in_4bit: bool = field(default=False, metadata={"help": "4-bit weights."})
    bnb_4bit_quant_type: str = field(default="nf4", metadata={"help": "Of 4-bit weights."})
    use_bnb_nested_quant: bool = field(default=False, metadata={"help": "Of 4-bit weights."})
    bnb_4bit_quant_storage: str | None = field(default=None, metadata={"help": "Of 4-bit weights."})

    def __post_init__(self) -> None:
        """Take the former name, and one target module as its name."""
        self.dtype = self.torch_dtype or self.dtype
        if isinstance(self.lora_target_modules, list):  # TRL's own command lines have commas between them
            names = [name.rstrip(",") for name in self.lora_target_modules]
            self.lora_target_modules = names[0] if len(names) == 1 else names  # type: ignore[assignment]


def get_peft_config(model_args: ModelConfig) -> LoraConfig | None:
    """The adapter that a script's arguments ask for, None without `use_peft`."""
    if not model_args.use_peft:
        return None
    prefixed = ("task_type", "r", "target_modules", "modules_to_save", "target_parameters")
    given = {name: getattr(model_args, f"lora_{name}") for name in prefixed}
    given |= {name: getattr(model_args, name) for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")}
    return LoraConfig(bias="none", **given)


def get_quantization_config(model_args: ModelConfig) -> BitsAndBytesConfig | None:
    """The 4 or 8 bits that a script's arguments ask for, None where they do not."""
    if model_args.load_in_4bit:
        how = {name: getattr(model_args, name) for name in ("bnb_4bit_quant_type", "bnb_4bit_quant_storage")}
        how["bnb_4bit_use_double_quant"] = model_args.use_bnb_nested_quant
        return BitsAndBytesConfig(load_in_4bit=True, **how)  # type: ignore[no-untyped-call]
    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]
    return None


def get_kbit_device_map() -> None:
    """None: the trainer places the model."""


class TrlParser(HfArgumentParser):
    """An argument parser for dataclasses that also reads defaults from a YAML file given with `--config`."""

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """Parse the command line; `--config FILE` gives defaults, and environment variables under `env`.

        Args:
            args: the command line; None = that of this process.
            return_remaining_strings: return what no dataclass knows in place of an error.
            fail_with_unknown_args: False = names in the file that no dataclass has are passed over.
            separate_remaining_strings: return those of the file and those of the command line apart.

        Raises `ConfigError`: the file cannot be read, or holds a name that no dataclass has.
        """
        words = list(sys.argv[1:] if args is None else args)
        unknown: list[str] = []
        if "--config" in words:
            at = words.index("--config")
            path = words[at + 1] if at + 1 < len(words) else ""
            del words[at : at + 2]
            unknown = self._take_defaults(path)
            if unknown and not return_remaining_strings and fail_with_unknown_args:
                raise ConfigError(f"{path}: {', '.join(unknown[::2])}: no such option; remove it from the file")
        found = self.parse_args_into_dataclasses(args=words, return_remaining_strings=return_remaining_strings)
        if not return_remaining_strings:
            return found
        return (*found[:-1], unknown, found[-1]) if separate_remaining_strings else (*found[:-1], unknown + found[-1])

    def _take_defaults(self, path: str) -> list[str]:
        import yaml

        try:
            with open(path, encoding="utf-8") as file:
                settings = yaml.safe_load(file)
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"--config {path!r}: cannot be read ({error}); give the path of a YAML file") from error
        if not isinstance(settings, dict):
            raise ConfigError(f"--config {path!r}: holds no table of options; write NAME: VALUE lines")
        for name, value in dict(settings.pop("env", None) or {}).items():
            os.environ[str(name)] = str(value)
        known = {action.dest: action for action in self._actions}
        unknown: list[str] = []
        for name, value in settings.items():
            if name in known:
                known[name].default, known[name].required = value, False
            else:
                unknown += [f"--{name}", str(value)]
        return unknown


@dataclass
class DatasetConfig:
    """One dataset of a mixture: arguments of `datasets.load_dataset`.

    Attributes:
        path: hub id or folder.
        name: configuration.
        data_dir: folder in the dataset.
        data_files: files in the dataset.
        split: name of the split.
        columns: columns to keep; None = all.
        fraction: share of the mixture; set it for all datasets or for none.
    """

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@dataclass
class DatasetMixtureConfig:
    """The datasets of a run, and the share of rows to hold out."""

    datasets: list[DatasetConfig] = field(default_factory=list, metadata={"help": "Datasets, in a YAML file."})
    streaming: bool = field(default=False, metadata={"help": "Stream them."})
    test_split_size: float | None = field(default=None, metadata={"help": "Share of the rows that is held out."})

    def __post_init__(self) -> None:
        """Take datasets that come from a YAML file."""
        self.datasets = [DatasetConfig(**given) if isinstance(given, dict) else given for given in self.datasets]


def get_dataset(mixture_config: DatasetMixtureConfig) -> Any:
    """The mixture as a `datasets.DatasetDict` with `train`, and with `test` if rows are held out.

    With fractions, it is the largest mixture without a repeated row, made of the first rows of each dataset.

    Raises `ConfigError`: there is no dataset, only some have a fraction, or a streamed one has a fraction.
    """
    import datasets

    given = mixture_config.datasets
    if not given:
        raise ConfigError("datasets=[]: there is nothing to mix; give one dataset or more")
    parts = []
    for one in given:
        options = {"name": one.name, "data_dir": one.data_dir, "data_files": one.data_files, "split": one.split}
        part: Any = datasets.load_dataset(one.path, **options, streaming=mixture_config.streaming)
        parts.append(part if one.columns is None else part.select_columns(one.columns))
    fractions = [one.fraction for one in given]
    if any(fraction is not None for fraction in fractions):
        if None in fractions or mixture_config.streaming:
            raise ConfigError(f"fraction={fractions}: give it for every dataset or for none, and not with streaming")
        weights = [(fraction or 0.0) / sum(f or 0.0 for f in fractions) for fraction in fractions]
        total = min(len(part) / weight for part, weight in zip(parts, weights, strict=True) if weight > 0)
        parts = [part.select(range(round(weight * total))) for part, weight in zip(parts, weights, strict=True)]
    whole = datasets.concatenate_datasets(parts)
    if mixture_config.test_split_size is not None:
        return whole.train_test_split(test_size=mixture_config.test_split_size)
    return datasets.DatasetDict(train=whole)
