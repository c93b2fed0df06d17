"""Several datasets as one, as TRL's own training script reads them from its settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from covey.errors import ConfigError


@dataclass
class DatasetConfig:
    """One dataset of a mixture: arguments of `datasets.load_dataset`.

    Attributes:
        path: hub id or folder.
        name: configuration.
        data_dir: folder in it.
        data_files: files in it.
        split: which part.
        columns: those to keep; None = all.
        fraction: share of the mixture; None = all of it. Given for all datasets or for none.
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
    """The datasets of a run, and whether some rows are held out."""

    datasets: list[DatasetConfig] = field(default_factory=list, metadata={"help": "Datasets, in a YAML file."})
    streaming: bool = field(default=False, metadata={"help": "Stream them."})
    test_split_size: float | None = field(default=None, metadata={"help": "Share of the rows that is held out."})

    def __post_init__(self) -> None:
        """Take datasets that come from a YAML file."""
        self.datasets = [DatasetConfig(**given) if isinstance(given, dict) else given for given in self.datasets]


def get_dataset(mixture_config: DatasetMixtureConfig) -> Any:
    """The mixture, as a `datasets.DatasetDict` with `train`, and `test` where rows are held out.

    Where fractions are given, the mixture is the largest that they allow without repeating a row, of the first rows of
    each dataset.

    Raises:
        ConfigError: no dataset, or fractions for some of them only, or of streams.
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
