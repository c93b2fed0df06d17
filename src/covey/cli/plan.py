"""`covey plan`: what a run will cost, before it is started."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from covey.cli.weights import Overrides, recipe_file
from covey.config.whole import GRPOConfig
from covey.observe.console import print_table, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.training.device_memory import Fit, Recipe
    from covey.training.forecast import Forecast
    from covey.training.plan import Plan

out = Console()
err = Console(stderr=True)
_say = partial(say, out)


def plan(
    recipe: Annotated[Path, typer.Argument(help="A recipe: a TOML file, or a folder that holds recipe.toml.")],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    device_memory: Annotated[
        list[float] | None,
        typer.Option(
            metavar="GB",
            min=0.1,
            max=1e6,
            help="Tell by formula whether it fits into a GPU of so many GB (10^9 bytes), and what would; of the model "
            "only the configuration is read, and no GPU is needed. May be given several times.",
        ),
    ] = None,
) -> None:
    """Tell memory, seconds of a step and bytes of a sync, from formulas and from two real steps. Nothing is written.

    Says what dominates, and which setting would about halve it. With `[distributed]`: the layout and the memory of each
    kind of process; what is measured is one process.
    """
    from covey.distributed.start import layout
    from covey.training.forecast import alone, forecast
    from covey.training.plan import measure
    from covey.training.trainer import GRPOTrainer

    config = GRPOConfig.from_toml(recipe_file(recipe), overrides=overrides or [])
    if device_memory:
        tell_device_memory(config, device_memory, as_json=as_json)
        return
    trainer = GRPOTrainer(args=alone(config))
    known, where = forecast(trainer, config), layout(config)
    if not as_json:
        print_forecast(known, where)
    found = measure(trainer)
    if as_json:
        from dataclasses import asdict

        more = {"layout": where, "forecast": None if known is None else asdict(known)}
        out.print_json(data=found.to_dict() | more)
        return
    print_plan(found, alone=not where)


def print_forecast(known: Forecast | None, where: str) -> None:
    """What is known before the steps: layout, memory of each kind of process, bytes of a sync."""
    if where:
        _say(f"layout: {where}")
    if known is None:
        return
    table = Table("memory by formula", "GB", "when")
    for process in known.processes:
        name = process.name if process.count == 1 else f"each of {process.count} {process.name}s"
        table.add_row(name, f"{process.peak / 1e9:.2f}", f"at the most, of {process.room / 1e9:.1f}", style="bold")
        for when, parts in (("", process.held), ("sampling", process.sampling), ("learning", process.learning)):
            for part in parts:
                table.add_row(f"  {part.name}", f"{part.amount / 1e9:.2f}", when)
    print_table(out, table)
    for saved in known.savings:
        _say(saved)
    if known.receivers:
        total = known.sync_bytes * known.receivers
        _say(f"a sync: {known.sync_bytes / 1e6:.1f} MB to each of {known.receivers}, {total / 1e6:.1f} MB in all")
    for warning in known.warnings():
        say(err, f"warning: {warning}", "yellow")


def tell_device_memory(config: GRPOConfig, sizes: Sequence[float], *, as_json: bool = False) -> None:
    """Whether a recipe fits into GPUs of these sizes in GB."""
    from covey.training.device_memory import Recipe, fit
    from covey.training.setup import load_task, load_world, with_defaults

    recipe = Recipe.of(with_defaults(config, load_world(config) or load_task(config)))
    fits = [fit(recipe, size * 1e9) for size in sorted(sizes)]
    if as_json:
        from dataclasses import asdict

        found = [asdict(each) | {"fits": each.fits} for each in fits]
        out.print_json(data={"parts": recipe.phases(fits[-1].room), "devices": found})
        return
    print_fits(recipe, fits)


def print_fits(recipe: Recipe, fits: Sequence[Fit]) -> None:
    """The parts, and for each size whether they fit, how much would, and what to change."""
    shape, config, chosen = recipe.shape, recipe.config, recipe.choices()
    known = "" if config.data.max_prompt_length else " (taken to have so many: data.max_prompt_length says it)"
    _say(
        f"{config.model.model}: {shape.numbers / 1e9:.2f} billion weights, {shape.trained / 1e6:,.0f} million numbers "
        f"trained; prompts of {recipe.prompt} tokens{known}, {chosen.longest - recipe.prompt} tokens after them"
    )
    table = Table("by formula, not measured on a GPU", "GB", "when")
    for when, parts in recipe.phases(fits[-1].room).items():
        for name, amount in sorted(parts.items(), key=lambda part: -part[1]):
            table.add_row(name, f"{amount / 1e9:.2f}", "always" if when == "held" else when)
    print_table(out, table)
    if chosen.longest > shape.context:
        _say(f"longer than the {shape.context:,} tokens that the model was built for: it will not be trained so")
    for each in fits:
        verdict = "fits" if each.fits else "does not fit"
        tokens = f"{each.longest:,} tokens after the prompt" if each.longest else "no completion of any length"
        passes = f"optim.tokens_per_micro_batch up to {each.tokens:,}" if each.tokens else "no pass of any size"
        _say(
            f"{each.room / 1e9:g} GB: {verdict}, {each.peak / 1e9:.2f} GB at the most, in {each.when}; with these "
            f"settings: {tokens}, {passes}"
        )
        for text, peak in each.changes:
            _say(f"    with {text}: {peak / 1e9:.2f} GB")
        if not each.fits and not each.changes:
            _say("    no setting makes it fit; use a smaller model, shorter completions or another GPU")


def print_plan(found: Plan, *, alone: bool = True) -> None:
    """What two steps took; without `alone` the run has several processes, and what they took is not its time."""
    for title, parts, unit, digits, size in (
        ("one step" if alone else "one step of one process", found.seconds, "s", 1, 1.0),
        (f"peak memory of the {found.device}", found.memory, "GB", 2, 1e9),
    ):
        total = sum(part.amount for part in parts)
        table = Table(title, unit, "share", "to halve it")
        for part in sorted(parts, key=lambda part: -part.amount):
            share = part.amount / total if total else 0.0
            advice = part.advice if share >= 0.15 else ""
            table.add_row(part.name, f"{part.amount / size:.{digits}f}", f"{100 * share:.0f} %", advice)
        table.add_row("total", f"{total / size:.{digits}f}", "", "", style="bold")
        print_table(out, table)
    _say(
        f"completions of {found.mean_length:.0f} tokens on average; {100 * found.mixed_share:.0f} % of the groups have "
        "unequal rewards, the others need no update"
    )
    if found.run_seconds is not None and alone:
        evaluations = f" with {found.num_evaluations} evaluations" if found.num_evaluations else ""
        _say(
            f"the run: {found.steps} steps{evaluations}, about {found.run_seconds / 60:.1f} minutes if it stays so "
            f"(finding out took {found.probe_seconds:.0f} s)"
        )
