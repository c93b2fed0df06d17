"""`covey imitate`: begin with what a world's own expert does."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from covey.cli.ending import said_by_signals
from covey.cli.weights import Overrides, recipe_file
from covey.config.names import canonical_names
from covey.config.text import parse_overrides
from covey.config.whole import GRPOConfig
from covey.observe.console import say, visible

out = Console()
err = Console(stderr=True)


def imitate(
    recipe: Annotated[Path, typer.Argument(help="A recipe with a world: a TOML file, or a folder with recipe.toml.")],
    overrides: Overrides = None,
    episodes: Annotated[int, typer.Option(min=1, help="That the expert plays, of training tasks.")] = 200,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over those in which it succeeded.")] = 2,
    episodes_per_step: Annotated[int, typer.Option(min=1, help="In each optimiser step.")] = 16,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Empty or new; default: the recipe's run.output_dir with -imitation.")
    ] = None,
    evaluate: Annotated[bool, typer.Option(help="Play the held-out tasks before and after.")] = True,
) -> None:
    """Learn from episodes of the world's own expert, so that training begins with a policy that sometimes succeeds.

    Leaves `adapter/`, the losses and what the expert did. Then: covey train RECIPE model.adapter=FOLDER/adapter
    """
    from covey.training.imitation import imitate as learn

    config = GRPOConfig.from_toml(recipe_file(recipe), overrides=overrides or [])
    target = Path(f"{config.run.output_dir}-imitation") if folder is None else folder
    with said_by_signals(), err.status("loading") as status:
        found = learn(
            config,
            target,
            episodes=episodes,
            epochs=epochs,
            episodes_per_step=episodes_per_step,
            evaluate=evaluate,
            told=lambda doing, done, of: status.update(f"{doing}: {done} of {of}" if done else f"{doing}: {of}"),
        )
    left_out = f", {found.failed} in which it failed left out" if found.failed else ""
    lines = [f"learnt from {found.episodes} {'episode' if found.episodes == 1 else 'episodes'} of the expert{left_out}"]
    lines += [f"left out: {ending}" for ending in found.why[:5]]
    lines += [f"-log p of a token: {found.losses[0]:.3f} nats at first, {found.losses[-1]:.3f} in the last step"]
    for name, when in (("before", found.before), ("after", found.after)):
        if when:
            low, high = when["eval/accuracy_low"], when["eval/accuracy_high"]
            lines += [f"held out, {name}: {when['eval/accuracy']:.1%} (95 %: {low:.1%} to {high:.1%})"]
    field = "adapter" if config.model.use_peft else "model"
    kept = [setting for setting in overrides or [] if field not in canonical_names(parse_overrides([setting]))]
    again = ["covey", "train", str(recipe), *kept, f"model.{field}={found.folder / 'adapter'}"]
    lines += [f"continue: {shlex.join(again)}"]
    for line in lines:
        say(out, visible(line, 2000))
