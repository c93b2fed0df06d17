"""`covey doctor`: what is wrong with a run or one of its steps, with a recipe before it is run, or with a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from covey.cli.weights import AsJson, Overrides, err, out, recipe_file
from covey.config.whole import GRPOConfig
from covey.errors import ConfigError, several
from covey.observe.console import print_table, say, visible
from covey.observe.doctor import Diagnosis, Doctor, Finding
from covey.observe.records import plain
from covey.observe.run_folder import RunFolder

if TYPE_CHECKING:
    from covey.training.checkup import Plan
    from covey.types import Group

_say = partial(say, out)


def doctor(
    target: Annotated[Path, typer.Argument(help="The folder of a run, or a recipe.")],
    overrides: Overrides = None,
    step: Annotated[
        int | None,
        typer.Option(min=1, help="Compute this step of a run again, and compare the result with the recorded one."),
    ] = None,
    device_memory: Annotated[
        list[float] | None,
        typer.Option(
            metavar="GB",
            min=0.1,
            max=1e6,
            help="Calculate whether the recipe fits into a GPU of this many GB (10^9 bytes). It needs no GPU and reads "
            "only the model's configuration. May be given several times.",
        ),
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Only check the cluster that the recipe would run on.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find problems of a run (from its metrics, or by computing a step again), of a recipe (from two trial steps, with
    the time and memory of a step), or of a cluster.

    Exit status: 0 = no problem (for a run: at its end), 1 = a problem, 2 = it could not be checked, or the cluster is
    refused.
    """
    if RunFolder.is_run(target):
        if cluster or device_memory or (overrides and step is None):
            raise ConfigError(
                f"{target}: is a run; --cluster, --device-memory and settings need a recipe, such as "
                f"{target}/config.toml"
            )
        found = _of_run(target, as_json) if step is None else _of_step(target, step, overrides or [], as_json)
    else:
        file = recipe_file(target)
        if not target.exists():
            raise ConfigError(f"{target}: no such file or folder; give the folder of a run, or a recipe")
        if not file.exists():
            raise ConfigError(f"{target}: is neither the folder of a run (with versions.json) nor a recipe")
        if step is not None:
            raise ConfigError(f"--step {step}: needs the folder of a run, but {target} is a recipe")
        config = GRPOConfig.from_toml(file, overrides=overrides or [])
        if cluster:
            from covey.distributed.start import look_at_cluster

            for line in look_at_cluster(config):
                _say(line)
            return
        found = _of_device_memory(config, device_memory, as_json) if device_memory else _of_recipe(config, as_json)
    if found:
        raise typer.Exit(1)


def _of_run(path: Path, as_json: bool) -> bool:
    folder = RunFolder.read(path)
    records = folder.read_metrics()
    steps = [record["step"] for record in records if any(not name.startswith(("eval/", "step")) for name in record)]
    if not steps and (kept := sorted(folder.checkpoints.glob("step_*"))) and kept[-1].name != "step_000000":
        what = f"there is a checkpoint {kept[-1].name}, but metrics.jsonl has no step"
        raise ConfigError(f"{path}: {what}; restore metrics.jsonl from a backup")
    found, last_step = Doctor(history=records).findings(), max(steps, default=0)
    if failure := folder.failure():
        why, _, fix = failure.rpartition("\n")
        found.append(Finding(Diagnosis("run_failed", why, fix), last_step, last_step, True))
    present = [one for one in found if one.present]
    if as_json:
        told = [asdict(one.diagnosis) | {k: getattr(one, k) for k in ("since", "until", "present")} for one in found]
        out.print_json(data={"steps": len(steps), "findings": told})
        return bool(present)
    last = f", the last one {steps[-1]}" if steps else "; nothing to check yet"
    _say(f"{path}: {several(len(steps), 'step')}{last}")
    for one in sorted(found, key=lambda one: not one.present):
        if one.present:
            _tell(one.diagnosis, f", since step {one.since}")
        else:
            _say(f"earlier: {one.diagnosis.code}, steps {one.since} to {one.until}: {one.diagnosis.message}")
    if steps and not present:
        _say("no problems found" if len(steps) >= 5 else "no problems found in these few steps")
    return bool(present)


def _of_step(run: Path, step: int, moved: Sequence[str], as_json: bool) -> bool:
    """Compute a step again, with the run's things where `moved` says they are."""
    from covey.training.replay import replay

    with err.status("reading") as status:
        report = replay(run, step, moved, progress=lambda doing: status.update(visible(doing, 200)))
    if as_json:
        out.print_json(data=plain(report.to_dict()))
        return not report.agrees
    table = Table("compared", "values", "unequal bits", "largest difference", "tolerance", "")
    for check in report.checks:
        verdict = "DIFFERS" if check.wrong else "agrees" if check.unequal else "equal"
        row = (str(check.compared), str(check.unequal), f"{check.largest:.2g}", f"{check.tolerance:g}", verdict)
        table.add_row(visible(check.name, 100), *row, style="red" if check.wrong else None)
    print_table(out, table)
    for check in report.checks:
        for text in check.wrong[:5]:
            _say(visible(f"{check.name}: {text}", 2000), "red")
        if len(check.wrong) > 5:
            _say(f"{check.name}: {len(check.wrong) - 5} more", "red")
    for note in report.notes:
        _say(visible(note, 2000), "dim")
    how = ", bit for bit" if report.exact else " within the tolerances"
    wrong = ", ".join(check.name for check in report.checks if check.wrong)
    told = f"equals the recorded step{how}" if report.agrees else f"differs from the recorded step: {wrong}"
    _say(f"step {report.step} {told}", "bold green" if report.agrees else "bold red")
    return not report.agrees


def _of_recipe(config: GRPOConfig, as_json: bool) -> bool:
    """Take two steps, in one process whatever the layout is."""
    from covey.distributed.start import layout
    from covey.training.checkup import checkup, measure
    from covey.training.trainer import GRPOTrainer

    groups: list[Group] = []
    where, chosen = layout(config), config.distributed
    many = chosen.samplers is not None or chosen.learners > 1
    trainer = GRPOTrainer(args=config.replace(learners=1, learner_kind="auto", samplers=0) if many else config)
    plan = measure(trainer, groups)
    found = checkup(trainer, plan)
    if as_json:
        out.print_json(data=plan.to_dict() | {"layout": where, "findings": [asdict(one) for one in found]})
        return bool(found)
    lengths, held_out = [len(prompt.token_ids) for prompt in trainer.prompts], len(trainer.eval_prompts)
    if where:
        _say(f"layout: {where}")
    if trainer.world is not None:
        _say(f"world: {several(len(lengths), 'task')}, {held_out or 'no'} held out")
    else:
        room = trainer.engine.context_length - config.sampling.max_completion_length
        _say(
            f"data: {several(len(lengths), 'prompt')} from {several(len(trainer.data.train), 'row')}, "
            f"{sum(lengths) / len(lengths):.0f} tokens on average, {max(lengths)} at most (limit: {room}, context - "
            f"max_completion_length); {several(held_out, 'held-out prompt')}"
        )
    for group in groups[:3]:
        _say(f"  reward {group.rewards[0]:g}: {visible(group.episodes[0].text, 300)!r}")
    shown = ("eval/num_completions", "eval/accuracy", "eval/reward", "eval/completions/clipped_ratio")
    if told := [f"{name} {plan.untrained[name]:.3g}" for name in shown if name in plan.untrained]:
        _say(f"untrained, at temperature {config.evaluation.eval_temperature:g}: {'; '.join(told)}")
    _print_plan(plan, alone=not where)
    names = ("reward", "reward_std", "frac_reward_zero_std", "frac_reward_none", "completions/clipped_ratio")
    _say("; ".join(f"{name} {plan.metrics[name]:.3g}" for name in names))
    for diagnosis in found:
        _tell(diagnosis)
    if not found:
        _say("no problems found in two steps")
    return bool(found)


def _print_plan(found: Plan, *, alone: bool) -> None:
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
        "unequal rewards (only these are trained on)"
    )
    if found.run_seconds is not None and alone:
        evaluations = f" with {several(found.num_evaluations, 'evaluation')}" if found.num_evaluations else ""
        _say(
            f"the run: {several(found.steps or 0, 'step')}{evaluations}, about {found.run_seconds / 60:.1f} minutes "
            f"at this speed (this check took {found.probe_seconds:.0f} s)"
        )


def _of_device_memory(config: GRPOConfig, sizes: Sequence[float], as_json: bool) -> bool:
    """By formula: the parts, and for GPUs of these sizes in GB whether they fit and how much would."""
    from covey.training.checkup import Recipe
    from covey.training.setup import load_task, load_world, with_defaults

    recipe = Recipe.of(with_defaults(config, load_world(config) or load_task(config)))
    shape, chosen, rooms = recipe.shape, recipe.choices(), [size * 1e9 for size in sorted(sizes)]
    parts = recipe.phases(rooms[-1])
    fits = [
        {"room": room, "peak": recipe.peak(room), "longest": recipe.longest(room), "tokens": recipe.tokens(room)}
        for room in rooms
    ]
    if as_json:
        devices = [each | {"fits": each["peak"] <= each["room"]} for each in fits]
        out.print_json(data={"parts": parts, "devices": devices})
        return fits[-1]["peak"] > rooms[-1]
    known = "" if config.data.max_prompt_length else " (an assumption; set data.max_prompt_length)"
    _say(
        f"{config.model.model}: {(shape.embedding + shape.head + shape.inside) / 1e9:.2f} billion weights, "
        f"{shape.trained / 1e6:,.0f} million weights trained; prompts of {recipe.prompt} tokens{known}, "
        f"{chosen.longest - recipe.prompt} tokens after them"
    )
    table = Table("by formula, not measured on a GPU", "GB", "when")
    for when, own in parts.items():
        for name, amount in sorted(own.items(), key=lambda part: -part[1]):
            table.add_row(name, f"{amount / 1e9:.2f}", "always" if when == "held" else when)
    print_table(out, table)
    if chosen.longest > shape.context:
        _say(f"this is longer than the model's context of {shape.context:,} tokens, so training will refuse it")
    for each in fits:
        verdict = "fits" if each["peak"] <= each["room"] else "does not fit"
        tokens = f"{each['longest']:,} tokens after the prompt" if each["longest"] else "no completion of any length"
        passes = f"optim.tokens_per_micro_batch up to {each['tokens']:,}" if each["tokens"] else "no pass of any size"
        _say(
            f"{each['room'] / 1e9:g} GB: {verdict}, {each['peak'] / 1e9:.2f} GB at the most; with these settings: "
            f"{tokens}, {passes}"
        )
    return fits[-1]["peak"] > rooms[-1]


def _tell(diagnosis: Diagnosis, since: str = "") -> None:
    out.print(f"{diagnosis.code}{since}", style="bold yellow", markup=False, highlight=False)
    _say(f"  {diagnosis.message}\n  {diagnosis.fix}.")
