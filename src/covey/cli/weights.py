"""Which recipe a command is given, and which weights `covey eval` and `covey sample` look at."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from covey.config.whole import GRPOConfig
from covey.observe.console import say

err = Console(stderr=True)
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SECTION.FIELD=VALUE]...",
        help="Settings that replace the recipe's, e.g. optim.learning_rate=2e-5.",
    ),
]


def recipe_file(recipe: Path) -> Path:
    """The file of a recipe that may be named by its folder."""
    return recipe / "recipe.toml" if os.path.isdir(recipe) else recipe


def config_for(model: str, adapter: str | None, overrides: list[str] | None) -> GRPOConfig:
    """Settings for looking at a model: a run's own with its weights, of which it is said which, or the defaults.

    Raises:
        ConfigError: the run has no weights yet, or they are gone or damaged.
    """
    from covey.observe.run_folder import RunFolder
    from covey.training.export import kept_weights

    if not RunFolder.is_run(model):
        config = GRPOConfig.from_overrides(overrides or [])
        return config.replace(model=model) if adapter is None else config.replace(model=model, adapter=adapter)
    folder = RunFolder.read(model)
    config = GRPOConfig.from_toml(folder.whole_config(), overrides=overrides or [])
    config = config.replace(upload_adapters_to_server=False)  # looking does not need the server that trained it
    if adapter is not None:
        return config.replace(adapter=adapter)
    kept = kept_weights(folder, config)
    say(err, f"weights: {kept.said}")
    path = str(kept.path)
    return config.replace(adapter=path) if config.model.use_peft else config.replace(model=path)
