"""What commands share: where they print, how they end, which recipe they are given and which weights they look at."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from covey.config.whole import GRPOConfig
from covey.errors import ConfigError
from covey.observe.console import say
from covey.observe.records import plain
from covey.overseer import overseen
from covey.signals import EndedError, ended_by_signals

out = Console(emoji=False)  # "house.py:House:rooms=3" is a name and no picture
err = Console(stderr=True, emoji=False)
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SECTION.FIELD=VALUE]...", help="Settings that replace the recipe's, e.g. optim.learning_rate=2e-5."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]


def print_json(console: Console, found: Any) -> None:
    """As JSON, for programs; numbers that are not finite are null."""
    if sys.stdout is None:
        raise ConfigError("--json: standard output is closed; open it")
    console.print_json(data=plain(found))


@contextmanager
def said_by_signals() -> Iterator[None]:
    """A signal that ends the command inside is said, and has its own exit status: typer gives all of them the same."""
    try:
        with ended_by_signals(), overseen():
            yield
    except EndedError as end:
        err.print(f"covey: {end}", style="red")
        raise typer.Exit(end.exit_status) from end


def recipe_file(recipe: Path) -> Path:
    """The file of a recipe that may be named by its folder."""
    return recipe / "recipe.toml" if os.path.isdir(recipe) else recipe


def config_for(model: str, adapter: str | None, overrides: list[str] | None) -> GRPOConfig:
    """Settings to look at a model with: its run's, a recipe's, or defaults; `ConfigError`: weights lost or damaged."""
    from covey.observe.run_folder import RunFolder
    from covey.training.export import kept_weights

    if not RunFolder.is_run(model):
        file = recipe_file(Path(model))
        if file.suffix == ".toml" and (str(file) == model or file.exists()):
            config = GRPOConfig.from_toml(file, overrides=overrides or []).replace(upload_adapters_to_server=False)
        else:
            config = GRPOConfig.from_overrides(overrides or []).replace(model=model)
        return config if adapter is None else config.replace(adapter=adapter)
    folder = RunFolder.read(model)
    config = GRPOConfig.from_toml(folder.whole_config(), overrides=overrides or [])
    config = config.replace(upload_adapters_to_server=False)  # looking does not need the server that trained it
    if adapter is not None:
        return config.replace(adapter=adapter)
    kept = kept_weights(folder, config)
    say(err, f"weights: {kept.said}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lora_r beside an adapter has no effect: it is the one that it was made with
        return config.replace(adapter=kept.path) if config.model.use_peft else config.replace(model=kept.path)


def form_of(model: str) -> tuple[bool | None, str | None]:
    """Whether a run's prompts were conversations, and the system message that all of them had; None = not known."""
    from covey.observe.completions import WHOLE, messages
    from covey.observe.run_folder import RunFolder

    folder = RunFolder.read(model) if RunFolder.is_run(model) else None
    steps = folder.completion_steps() if folder else []
    rows = folder.read_completions(steps[-1]) if folder and steps else []
    if not rows or "play" in rows[0]:
        return None, None
    first = [messages(row.get("prompt"), WHOLE)[0] for row in rows]  # plain text has no role
    system = {one["content"] if one["role"] == "system" else None for one in first}
    return all(one["role"] for one in first), system.pop() if len(system) == 1 else None
