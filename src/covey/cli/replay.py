"""`covey replay`: a step of a run once more, from its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from covey.errors import ConfigError, CoveyError
from covey.observe.console import print_table, say, visible
from covey.observe.records import plain

if TYPE_CHECKING:
    from covey.training.replay import Report

out = Console()
err = Console(stderr=True)


def replay(
    run: Annotated[Path, typer.Argument(help="The folder of a run; it may be running, or copied from elsewhere.")],
    step: Annotated[int | None, typer.Option(min=1, help="Which step; default: the newest that was kept.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.FIELD=VALUE",
            help="Do the step with this setting too, such as algorithm.loss_type=my_loss.py:mine. May be repeated.",
        ),
    ] = None,
    start: Annotated[
        int | None,
        typer.Option(
            "--from", min=0, help="Begin at this step's checkpoint, 0 = the start; default: the newest before."
        ),
    ] = None,
    batch_only: Annotated[
        bool, typer.Option("--batch-only", help="Rewards, advantages and masks only; needs neither weights nor model.")
    ] = False,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Largest difference that counts as agreement; 0 = bit for bit.")
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all that was found as JSON; - = print it.")
    ] = None,
) -> None:
    """Compute a step again from the run folder alone, and compare it with what was recorded.

    Rewards, advantages, masks, and with the weights log-probabilities, loss, gradient and its norm. Exit status 0 when
    all agrees, 1 when something differs.
    """
    from covey.files import write_atomically
    from covey.training.replay import replay as compute

    printed = as_json is not None and str(as_json) == "-"
    if as_json is not None and not printed:
        if as_json.absolute().resolve().is_relative_to(run.absolute().resolve()):
            raise ConfigError(f"--json {as_json}: it is in the run folder, which a replay leaves alone; choose another")
        if not as_json.absolute().parent.is_dir():
            raise ConfigError(f"--json {as_json}: there is no folder {as_json.absolute().parent}; make it first")
    with err.status("reading") as status:
        report = compute(
            run,
            step,
            changes or (),
            start=start,
            batch_only=batch_only,
            tolerance=tolerance,
            progress=lambda doing: status.update(visible(doing, 200)),
        )
    if as_json is not None:
        text = json.dumps(plain(report.to_dict()), allow_nan=False, indent=1)
        if printed:
            typer.echo(text)
        else:
            try:
                write_atomically(as_json, text + "\n")
            except CoveyError as error:
                raise ConfigError(f"--json {as_json}: cannot be written ({error.__cause__ or error})") from error
    if not printed:
        _print(report)
    if not report.agrees:
        raise typer.Exit(1)


def _print(report: Report) -> None:
    table = Table("compared", "values", "unequal bits", "largest difference", "tolerance", "")
    for check in report.checks:
        verdict = "equal" if check.unequal == 0 else "agrees"
        style = None if check.agrees else "red"
        row = (str(check.compared), str(check.unequal), f"{check.largest:.2g}", f"{check.tolerance:g}")
        if check.compared or not check.agrees:
            table.add_row(visible(check.name, 100), *row, verdict if check.agrees else "DIFFERS", style=style)
    print_table(out, table)
    for check in report.checks:
        for found in check.examples:
            text = f"{check.name}: {found['where']}: recorded {found['recorded']}, replayed {found['replayed']}"
            _say(text, "red")
        more = check.different - len(check.examples)
        if more > 0:
            _say(f"{check.name}: {more} more", "red")
    for note in report.notes:
        _say(note, "dim")
    if report.changed is not None:
        _print_changes(report)
    wrong = [check.name for check in report.checks if not check.agrees]
    if wrong:
        _say(f"step {report.step} differs from what was recorded: {', '.join(wrong)}", "bold red")
    else:
        how = ", bit for bit" if report.exact else " within the tolerances"
        _say(f"step {report.step} is what was recorded{how}", "bold green")


def _print_changes(report: Report) -> None:
    changed = report.changed
    assert changed is not None
    table = Table(f"step {report.step}", "as it was", visible(", ".join(changed.settings), 200))
    for name, (before, after) in changed.metrics.items():
        if before != after:
            table.add_row(visible(name, 100), _number(before), _number(after))
    tokens = changed.tokens
    pairs = (
        ("mean |advantage|", "advantage_mean_abs"),
        ("smallest token weight", "weight_min"),
        ("largest token weight", "weight_max"),
    )
    for title, name in pairs:
        table.add_row(title, _number(tokens[f"{name}_before"]), _number(tokens[f"{name}_after"]))
    for title, found in (("gradient's norm", changed.gradient), ("norm of the optimiser's step", changed.step)):
        if found:
            table.add_row(title, _number(found["norm_before"]), _number(found["norm_after"]))
    print_table(out, table)
    whole = int(tokens["tokens"])
    for title, name in (
        ("advantages", "advantages_changed"),
        ("advantages' signs", "advantages_of_other_sign"),
        ("masks", "masks_changed"),
        ("weights in the loss", "weights_changed"),
    ):
        _say(f"{title} changed for {int(tokens[name])} of {whole} tokens")
    for title, found in (("gradients", changed.gradient), ("optimiser's steps", changed.step)):
        if found:
            cosine = found["cosine"]
            _say(f"cosine of the {title}: {'none, one is 0' if cosine is None else f'{cosine:.6f}'}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _say(text: str, style: str | None = None) -> None:
    say(out, visible(text, 2000), style)
