"""`covey play`: an episode of a world in the terminal, by a person or the world's own expert; `--imitate` learns from
the expert.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from covey.cli.weights import Overrides, err, out, recipe_file, said_by_signals
from covey.config.names import canonical_names
from covey.config.text import parse_overrides
from covey.config.whole import GRPOConfig
from covey.environments import EnvironmentPool, Observation, TaskInstance, World, parse_action
from covey.environments.base import get_world, world_names
from covey.errors import ConfigError, EpisodeError, several
from covey.observe.console import say, visible
from covey.rollout.agents import NO_ACTION


def play(
    world: Annotated[
        str,
        typer.Argument(metavar="WORLD|RECIPE", help="A world such as house or house:rooms=4, or a recipe with one."),
    ],
    overrides: Overrides = None,
    number: Annotated[int, typer.Option("-n", "--number", min=0, help="Number of the held-out task.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the world.")] = 0,
    expert: Annotated[bool, typer.Option("--expert", help="Let the world's expert play, if it has one.")] = False,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Most actions; default: the world's own limit.")] = None,
    imitate: Annotated[
        bool, typer.Option("--imitate", help="Train the recipe's model on episodes of the expert.")
    ] = False,
    episodes: Annotated[int, typer.Option(min=1, help="With --imitate: number of episodes.")] = 200,
    epochs: Annotated[int, typer.Option(min=1, help="With --imitate: passes over successful episodes.")] = 2,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out", help="With --imitate: empty or new folder; default: run.output_dir with -imitation added."
        ),
    ] = None,
) -> None:
    """Play an episode of a world in the terminal, with the text that a model would see.

    With --imitate a recipe's model learns from the world's expert, so that training begins with some successes. The
    folder gets `adapter/`, the losses and the expert's episodes. Then: covey train RECIPE model.adapter=FOLDER/adapter
    """
    if imitate:
        _imitate(Path(world), overrides or [], episodes, epochs, folder)
        return
    if (episodes, epochs, folder) != (200, 2, None):
        raise ConfigError("--episodes, --epochs and --out need --imitate; add it, or leave them out")
    config, file = GRPOConfig(), recipe_file(Path(world))
    is_path = file.suffix == ".toml" or "/" in world
    if is_path and (file.exists() or (":" not in world and world not in world_names())):
        config = GRPOConfig.from_toml(file, overrides=overrides or [])
        if config.environment.world is None:
            raise ConfigError(f"{world}: it has no environment.world to play; for its prompts use covey sample or eval")
    elif overrides:
        raise ConfigError(f"{overrides[0]}: settings need a recipe; a world's options are written {world}:NAME=...")
    if (name := config.environment.world or world).startswith("verifiers:"):
        raise ConfigError(f"{world}: verifiers drives its model itself, nobody else can play; use covey eval or train")
    chosen = get_world(name)
    tasks, most = chosen.eval_tasks(), max_turns or config.environment.max_turns or chosen.max_turns
    if number >= len(tasks):
        raise ConfigError(f"--number={number}: {world} has {len(tasks)} held-out tasks; use 0 to {len(tasks) - 1}")
    _play(chosen, tasks[number], config.data.system_prompt or chosen.system_prompt, most, seed=seed, expert=expert)


def _play(world: World, task: TaskInstance, words: str | None, max_turns: int, *, seed: int, expert: bool) -> None:
    """Show observations, read actions from the keyboard (or take the expert's), until the episode ends."""
    with EnvironmentPool(world, places=1) as pool:
        pool.reset(0, task, seed)
        seen, total = _answer(pool), 0.0
        if words:
            out.print(words, style="dim", markup=False, highlight=False)
        for tool in world.tools:
            out.print(visible(json.dumps(tool), 2000), style="dim", markup=False, highlight=False)
        for turn in range(1, max_turns + 1):
            _show(seen)
            action = pool.expert_action(0) if expert else _read(seen)
            if action is None and expert:
                raise EpisodeError("this world has no expert; play yourself, without --expert")
            if action is None:
                out.print("stopped", highlight=False)
                return
            if not action:
                out.print(NO_ACTION, highlight=False)
                continue
            if expert:
                out.print(f"> {visible(action, 200)}", markup=False, highlight=False)
            pool.step(0, action)
            outcome = _answer(pool)
            seen, total = outcome.observation, total + outcome.reward
            if not outcome.valid:
                out.print("(no valid action)", style="dim", highlight=False)
            if outcome.done:
                _show(seen)
                ending = "solved" if outcome.success else "over"
                out.print(f"{ending} after {several(turn, 'action')}, reward {total:g}", style="bold", highlight=False)
                return
        out.print(f"no actions left after {max_turns}, reward {total:g}", style="bold", highlight=False)


def _answer(pool: EnvironmentPool) -> Any:
    """What was seen after a reset, or the outcome of an action."""
    ((_, found),) = pool.wait()
    if isinstance(found, EpisodeError):
        raise found
    return found


def _show(seen: Observation) -> None:
    out.print(visible(seen.text, 5000), markup=False, highlight=False)
    if seen.actions:
        out.print("Actions: " + visible("; ".join(seen.actions), 2000), style="dim", markup=False, highlight=False)


def _read(seen: Observation) -> str | None:
    """An action from the keyboard, "" for what is none; None at the end of the input."""
    while True:
        try:
            said = out.input("> ", markup=False)
        except EOFError:
            return None
        if said.strip():
            return parse_action(said, "text", seen.actions) or ""


def _imitate(recipe: Path, overrides: list[str], episodes: int, epochs: int, folder: Path | None) -> None:
    from covey.training.imitation import imitate as learn

    config = GRPOConfig.from_toml(recipe_file(recipe), overrides=overrides)
    with said_by_signals(), err.status("loading") as status:
        found = learn(
            config,
            Path(f"{config.run.output_dir}-imitation") if folder is None else folder,
            episodes=episodes,
            epochs=epochs,
            told=lambda doing, done, of: status.update(f"{doing}: {done} of {of}" if done else f"{doing}: {of}"),
        )
    left_out = f", {found.failed} in which it failed left out" if found.failed else ""
    lines = [f"learnt from {several(found.episodes, 'episode')} of the expert{left_out}"]
    lines += [f"left out: {ending}" for ending in found.why[:5]]
    lines += [f"-log p of a token: {found.losses[0]:.3f} nats at first, {found.losses[-1]:.3f} in the last step"]
    for name, when in (("before", found.before), ("after", found.after)):
        if when:
            low, high = when["eval/accuracy_low"], when["eval/accuracy_high"]
            lines += [f"held out, {name}: {when['eval/accuracy']:.1%} (95 %: {low:.1%} to {high:.1%})"]
    field = "adapter" if config.model.use_peft else "model"
    kept = [setting for setting in overrides if field not in canonical_names(parse_overrides([setting]))]
    again = ["covey", "train", str(recipe), *kept, f"model.{field}={found.folder / 'adapter'}"]
    for line in [*lines, f"continue: {shlex.join(again)}"]:
        say(out, visible(line, 2000))
