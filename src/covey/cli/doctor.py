"""`covey doctor`: what is wrong with a run, with a recipe before it is run, or with a cluster."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from covey.cli.plan import print_forecast, print_plan
from covey.cli.weights import Overrides, recipe_file
from covey.config.whole import GRPOConfig
from covey.errors import ConfigError
from covey.observe.console import say, visible
from covey.observe.doctor import Diagnosis, findings
from covey.observe.run_folder import RunFolder

if TYPE_CHECKING:
    from covey.types import Group

out = Console()
_say = partial(say, out)
_SHOWN = 3
"""Completions of a recipe that are printed."""


def doctor(
    target: Annotated[Path, typer.Argument(help="The folder of a run, or a recipe that is to be run.")],
    overrides: Overrides = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Only look at the cluster that the recipe would run on. Trains nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A run's findings as JSON.")] = False,
) -> None:
    """Say what is wrong: with a run, from its metrics; with a recipe, from two steps of it; with a cluster.

    Exit status: 0 = nothing is wrong (of a run: at its end), 1 = something is, 2 = it could not be looked at, or the
    cluster is refused.
    """
    if RunFolder.is_run(target):
        if cluster or overrides:
            raise ConfigError(
                f"{target}: is a run; --cluster and settings go with a recipe, such as {target}/config.toml"
            )
        found = _of_run(target, as_json=as_json)
    else:
        file = recipe_file(target)
        if not file.exists():
            raise ConfigError(f"{target}: is neither the folder of a run (with versions.json) nor a recipe")
        if as_json:
            raise ConfigError("--json: goes with the folder of a run; for a recipe use covey plan --json")
        config = GRPOConfig.from_toml(file, overrides=overrides or [])
        found = _of_cluster(config) if cluster else _of_recipe(config)
    if found:
        raise typer.Exit(1)


def _of_run(path: Path, *, as_json: bool) -> bool:
    folder = RunFolder.read(path)
    records = folder.read_metrics()
    steps = [record["step"] for record in records if any(not name.startswith(("eval/", "step")) for name in record)]
    if not steps and (kept := sorted(folder.checkpoints.glob("step_*"))):
        raise ConfigError(
            f"{path}: there is a checkpoint {kept[-1].name}, but no line of a step in its metrics.jsonl: restore that "
            "from a backup"
        )
    found = findings(records)
    present = [one for one in found if one.present]
    if as_json:
        told = [
            asdict(one.diagnosis) | {"since": one.since, "until": one.until, "present": one.present} for one in found
        ]
        out.print_json(data={"steps": len(steps), "findings": told})
        return bool(present)
    _say(
        f"{path}: {len(steps)} steps" + (f", the last one {steps[-1]}" if steps else "; there is nothing to judge yet")
    )
    for one in present:
        _tell(one.diagnosis, f", since step {one.since}")
    for one in found:
        if not one.present:
            _say(f"earlier: {one.diagnosis.code}, steps {one.since} to {one.until}: {one.diagnosis.message}")
    if steps and not present:
        _say("nothing is wrong" if len(steps) >= 5 else "nothing is wrong, as far as so few steps say")
    return bool(present)


def _of_recipe(config: GRPOConfig) -> bool:
    from covey.distributed.start import layout
    from covey.training.checkup import checkup, prompts_of
    from covey.training.forecast import alone, forecast
    from covey.training.plan import measure
    from covey.training.trainer import GRPOTrainer

    groups: list[Group] = []
    trainer = GRPOTrainer(args=alone(config))
    prompts = prompts_of(trainer)
    if trainer.world is not None:
        _say(f"world: {prompts.rows} tasks, {prompts.held_out or 'no'} held out")
    else:
        _say(
            f"data: {prompts.kept} of {prompts.rows} rows are prompts of {prompts.mean:.0f} tokens on average, at most "
            f"{prompts.longest}; the context has room for {prompts.room} beside the longest completion; "
            f"{prompts.held_out or 'no'} held-out prompts"
        )
    known, where = forecast(trainer, config), layout(config)
    print_forecast(known, where)
    plan = measure(trainer, groups)
    for group in groups[:_SHOWN]:
        reward, text = group.rewards[0], group.episodes[0].text
        _say(f"  reward {reward:g}: {visible(text, 300)!r}")
    print_plan(plan, alone=not where)
    names = ("reward", "reward_std", "frac_reward_zero_std", "frac_reward_none", "completions/clipped_ratio")
    _say("; ".join(f"{name} {plan.metrics[name]:.3g}" for name in names))
    found = checkup(prompts, plan, list(known.warnings()) if known is not None else ())
    for diagnosis in found:
        _tell(diagnosis)
    if not found:
        _say("nothing is wrong that two steps could show")
    return bool(found)


def _of_cluster(config: GRPOConfig) -> bool:
    from covey.distributed.start import look_at_cluster

    for line in look_at_cluster(config):
        _say(line)
    return False


def _tell(diagnosis: Diagnosis, since: str = "") -> None:
    out.print(f"{diagnosis.code}{since}", style="bold yellow", markup=False, highlight=False)
    _say(f"  {diagnosis.message}\n  {diagnosis.fix}.")
