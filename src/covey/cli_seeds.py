"""Which runs of `covey curve` are seeds of one experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.errors import ConfigError

_OWN = tuple(f"run.{name}" for name in ("seed", "output_dir", "run_name", "progress", "num_completions_to_print"))
"""What seeds of one experiment may differ in."""


def run_labels(runs: Sequence[Path]) -> list[str]:
    """Names for a legend: of the folders where these differ, else the paths as they were given."""
    names = [run.name or str(run) for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def group_seeds(configs: Sequence[Mapping[str, Mapping[str, Any]]], labels: Sequence[str]) -> list[list[int]]:
    """Runs that differ in their seed only, as lists of their positions.

    Args:
        configs: of each run: section -> field -> value.
        labels: its name, for messages.

    Raises:
        ConfigError: a run is alone with its settings, or two runs of a group have one seed.
    """
    flat = [{f"{s}.{name}": value for s, fields in one.items() for name, value in fields.items()} for one in configs]
    groups: list[list[int]] = []
    for index, settings in enumerate(flat):
        equal = next((group for group in groups if not _differing(flat[group[0]], settings)), None)
        if equal is None:
            groups.append([index])
        else:
            equal.append(index)
    for group in groups:
        mine = flat[group[0]]
        others = [index for index in range(len(flat)) if index not in group]
        if len(group) == 1 and others:
            nearest = min(others, key=lambda index: len(_differing(flat[index], mine)))
            pairs = [(name, flat[nearest].get(name), mine.get(name)) for name in _differing(flat[nearest], mine)]
            raise ConfigError(
                f"--seeds: {labels[nearest]} and {labels[group[0]]} are no seeds of one experiment: "
                + "; ".join(f"{name} is {theirs!r:.60} and {own!r:.60}" for name, theirs, own in pairs[:8])
                + "; leave --seeds out to draw a line for each run"
            )
        seeds = [flat[index]["run.seed"] for index in group]
        twice = [labels[index] for index, seed in zip(group, seeds, strict=True) if seeds.count(seed) > 1]
        if twice:
            raise ConfigError(f"--seeds: {' and '.join(twice)} do not differ in run.seed; give each seed once")
    return groups


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [name for name in sorted({*a, *b}) if name not in _OWN and a.get(name) != b.get(name)]
