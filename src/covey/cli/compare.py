"""`covey compare`: runs side by side."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from covey.cli.reports import difference, percent, run_labels
from covey.config.whole import GRPOConfig
from covey.errors import ConfigError, DataError
from covey.files import explained, open_regular, write_atomically
from covey.observe.comparison import (
    MEAN_OF,
    SHOWN,
    Answers,
    Axis,
    ComparedRun,
    PairedAnswers,
    accuracy_of,
    as_json,
    chosen_evaluation,
    differing_settings,
    equal_point,
    metric_values,
    pair,
    read_answers,
)
from covey.observe.completions import messages, read_rows
from covey.observe.console import format_number, print_table, say, visible
from covey.observe.records import plain
from covey.observe.run_folder import RunFolder, table_name

_AXES: dict[str, Axis] = {"step": "step", "steps": "step", "tokens": "tokens", "minutes": "minutes"}
_MOST_CONFIG = 1 << 20
_MOST_ROWS = 60
out = Console()


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; the others are compared with the first.")],
    at: Annotated[str, typer.Option(help="Metrics at equal step, tokens or minutes.")] = "step",
    metric: Annotated[list[str] | None, typer.Option(help="Show this metric; may be given again.")] = None,
    evaluation: Annotated[
        str, typer.Option("--eval", help="Answers of which evaluation: a step, first, last, best, or equal (--at).")
    ] = "last",
    questions: Annotated[
        int, typer.Option("--questions", min=0, help="List up to so many gained and lost questions.")
    ] = 0,
    by_uid: Annotated[
        bool, typer.Option("--by-uid", help="Questions of one uid are the same, however they are worded.")
    ] = False,
    rewards: Annotated[bool, typer.Option("--rewards", help="Compare rewards, also where right is known.")] = False,
    curve: Annotated[Path | None, typer.Option("-o", "--output", help="Draw the curves into this picture.")] = None,
    file: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
) -> None:
    """Compare runs: settings that differ, metrics, and a paired test on the same held-out questions.

    Of a single run the first evaluation is compared with the last.
    """
    if at not in _AXES:
        raise ConfigError(f"--at={at!r:.50}: metrics are compared at equal step, tokens or minutes")
    axis = _AXES[at]
    folders = [RunFolder.read(run) for run in runs]
    places = [folder.path.resolve() for folder in folders]
    twice = [str(run) for run, place in zip(runs, places, strict=True) if places.count(place) > 1]
    if twice:
        raise ConfigError(f"{' and '.join(twice)} are one folder; give each run once")
    notes: list[str] = []
    compared = [_read(folder, label, notes) for folder, label in zip(folders, run_labels(runs), strict=True)]
    if not any(run.records or run.evaluations for run in compared):
        lost = any(any(folder.checkpoints.glob("step_*")) for folder in folders)
        why = "metrics.jsonl is gone or empty; restore it from a backup" if lost else "nothing is recorded yet"
        raise DataError(f"{runs[0]}: {why}, so there is nothing to compare")
    found: dict[str, Any] = {"runs": [run.label for run in compared], "paths": [str(place) for place in places]}
    if len(compared) > 1:
        found["settings"] = differing_settings(compared) if all(run.settings for run in compared) else {}
        found["versions"] = _versions(folders)
    point = equal_point(compared, axis)
    found["equal"] = {"axis": axis, "point": point}
    found["metrics"] = {
        name: [metric_values(run, name, axis, point) for run in compared] for name in _metrics(compared, metric)
    }
    found["held_out"], found["against_first"] = [], []
    sides, pairs = _held_out(compared, evaluation, axis, point, notes, by_uid=by_uid, rewards=rewards)
    for label, side in sides:
        found["held_out"].append({"run": label, "step": side.step, "accuracy": accuracy_of(side)})
    for label, _, _, result in pairs:
        found["against_first"].append({"run": label} | as_json(result))
    found["notes"] = notes
    _print(found, compared, sides, pairs, questions)
    if curve is not None:
        from covey.observe.curve import draw_comparison

        draw_comparison({run.label: [run.records] for run in compared}, curve)
        say(out, f"wrote {curve}")
    if file is not None:
        write_atomically(file, json.dumps(plain(found), indent=1) + "\n")
        say(out, f"wrote {file}")


# ---------------------------------------------------------------------- reading


def _read(folder: RunFolder, label: str, notes: list[str]) -> ComparedRun:
    if folder.needs_python:
        notes.append(f"{label} was started from Python: parts of it that no file holds may differ too")
    tables = {step: folder.completions / table_name(step, "eval") for step in folder.evaluation_steps()}
    return ComparedRun(label, folder.read_metrics(), _settings(folder, label, notes), tables)


def _settings(folder: RunFolder, label: str, notes: list[str]) -> dict[str, Any]:
    """`section.field` -> value of a run's `config.toml`, as it stands: a copied run's files need not be here.

    Settings that it does not name have their default: `None` is left out when it is written, and a run of an earlier
    version does not know all.
    """
    if not folder.config_path.exists():
        notes.append(f"{label} has no config.toml, so its settings are not compared")
        return {}
    with explained(folder.config_path, "read"), open_regular(folder.config_path) as file:
        text = file.read(_MOST_CONFIG).decode("utf-8", "replace")
    try:
        written = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{folder.config_path}: is no TOML ({error}); restore it from a backup") from error
    sections = {name: plain(fields) for name, fields in GRPOConfig().to_dict().items()}
    for name, fields in written.items():
        sections[name] = sections.get(name, {}) | fields if isinstance(fields, Mapping) else {"": fields}
    return {f"{name}.{field}": value for name, fields in sections.items() for field, value in fields.items()}


def _versions(folders: Sequence[RunFolder]) -> dict[str, list[Any]]:
    """Programs and machines that differ."""
    every = [folder.versions() for folder in folders]
    names = sorted({name for versions in every for name in versions} - {"run_id", "needs_python"})
    values = {name: [plain(versions.get(name)) for versions in every] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def _metrics(runs: Sequence[ComparedRun], wanted: list[str] | None) -> list[str]:
    known = {name for run in runs for record in run.records for name in record}
    for name in wanted or ():
        if name not in known:
            near = sorted(known & {name.removesuffix("/mean"), f"{name}/mean", f"eval/{name}"})
            fix = f"did you mean {near[0]}?" if near else "see metrics.jsonl for those that there are"
            raise ConfigError(f"--metric={name!r:.100}: no run has it; {fix}")
    return list(dict.fromkeys(wanted)) if wanted else [name for name in SHOWN if name in known]


Pair = tuple[str, Answers, Answers, PairedAnswers]


def _held_out(
    runs: Sequence[ComparedRun],
    which: str,
    axis: Axis,
    point: float | None,
    notes: list[str],
    *,
    by_uid: bool,
    rewards: bool,
) -> tuple[list[tuple[str, Answers]], list[Pair]]:
    """Each run's answers, and the comparisons with the first; of a single run its first evaluation with its last."""
    if len(runs) == 1:
        steps = sorted(runs[0].evaluations)
        if len(steps) < 2:
            raise DataError(
                f"{runs[0].label} has {len(steps)} evaluations with a table, and a run alone is compared with itself, "
                "first evaluation against last; give a second run"
            )
        last = which if which not in ("first", "equal") else "last"
        chosen = [steps[0], chosen_evaluation(runs[0], last, axis, point)]
        named = [(replace(runs[0], label=f"{runs[0].label}, step {step}"), step) for step in chosen]
    else:
        without = [run.label for run in runs if not run.evaluations]
        if without:
            notes.append(
                f"no table of an evaluation in {', '.join(without)}: answers are not compared; evaluations need "
                "held-out prompts, and run.log_completions=true keeps their answers"
            )
        having = [run for run in runs if run.evaluations]
        named = [(run, chosen_evaluation(run, which, axis, point)) for run in having]
    sides = [(run.label, read_answers(step, run.evaluations[step], rewards=rewards)) for run, step in named]
    if len(runs) > 1 and which == "best":
        notes.append("the best evaluation was chosen by these very questions, so its accuracy is flattered")
    if len(sides) < 2 or (runs[0].label != sides[0][0] and len(runs) > 1):
        return sides, []
    if not all(side.judged for _, side in sides) and any(side.judged for _, side in sides):
        notes.append("not all runs say which answers are right, so their rewards are compared")
        sides = [(run.label, read_answers(step, run.evaluations[step], rewards=True)) for run, step in named]
    if len(sides) > 2:
        notes.append(f"{len(sides) - 1} comparisons: each p is of its own test, none is corrected for their number")
    first = sides[0][1]
    return sides, [(label, first, side, pair(first, side, by_uid=by_uid)) for label, side in sides[1:]]


# ---------------------------------------------------------------------- printing


def _print(
    found: Mapping[str, Any],
    runs: Sequence[ComparedRun],
    sides: Sequence[tuple[str, Answers]],
    pairs: Sequence[Pair],
    questions: int,
) -> None:
    labels = [_cell(run.label) for run in runs]
    if len(runs) > 1:
        differing = found["settings"] | {f"versions: {name}": values for name, values in found["versions"].items()}
        if differing:
            table = Table("settings that differ", *labels)
            for name, values in list(differing.items())[:_MOST_ROWS]:
                table.add_row(_cell(name), *(_cell("-" if value is None else value) for value in values))
            print_table(out, table)
        elif all(run.settings for run in runs):
            out.print("all settings and versions are equal", highlight=False)
    _print_metrics(found, labels)
    if sides:
        table = Table(
            "held out", "evaluation at step", "right (95 %)" if sides[0][1].judged else "mean reward", "questions"
        )
        for (label, side), entry in zip(sides, found["held_out"], strict=True):
            table.add_row(_cell(label), str(side.step), _score(side, entry["accuracy"]), str(len(side.by_uid)))
        print_table(out, table)
    for label, before, after, result in pairs:
        _print_pair(sides[0][0], label, before, after, result, questions)
    for note in found["notes"]:
        say(out, visible(note, 500))


def _print_metrics(found: Mapping[str, Any], labels: Sequence[str]) -> None:
    axis, point = found["equal"]["axis"], found["equal"]["point"]
    where = "" if point is None else f"at {_amount(point)} {axis}{'s' if axis == 'step' and point != 1 else ''}"
    table = Table("metric", "", *labels)
    for name, values in found["metrics"].items():
        rows = {"final": [format_number(value["final"]) for value in values]}
        if any(value["best"] is not None for value in values):
            rows["best"] = [
                "-" if value["best"] is None else f"{format_number(value['best'])} (step {value['best_step']})"
                for value in values
            ]
        if where and len(values) > 1:
            rows[where] = [format_number(value["equal"]) for value in values]
        for number, (when, cells) in enumerate(rows.items()):
            table.add_row("" if number else _cell(name), when, *cells)
    if table.row_count:
        print_table(out, table)
        out.print(
            f"Of training, means over the last {MEAN_OF} steps; of evaluations, each as it was measured.",
            style="dim",
            highlight=False,
        )


def _print_pair(first: str, label: str, before: Answers, after: Answers, result: PairedAnswers, questions: int) -> None:
    def tell(text: str) -> None:
        say(out, visible(text, 1000))

    total = len(result.gained) + len(result.lost)
    if result.difference is None:
        why = "they were asked other questions"
        if before.left_out or after.left_out:
            why = "no question has an answer with a reward in both"
        tell(f"{label} against {first}: {why}, so their answers cannot be compared by question")
    elif before.judged:
        of = f" on {result.difference.total} questions that both were asked"
        tell(f"{label} against {first}{of}: {difference(result.difference)} (McNemar's exact test)")
    else:
        d = result.difference
        tell(
            f"{label} against {first} on {d.total} questions that both were asked: mean reward {d.difference:+.3f} "
            f"({d.low:+.3f} to {d.high:+.3f}), p = {d.p_value:.2g}, {d.gained} better, {d.lost} worse (bootstrap)"
        )
    if result.only_before or result.only_after:
        tell(
            f"  {result.only_before} questions are answered only in {first}, {result.only_after} only in {label}; "
            "these are left out"
        )
    if result.other_text:
        tell(
            f"  {result.other_text} questions have one uid and different texts and are left out; --by-uid takes them "
            "as the same"
        )
    for side, name in ((before, first), (after, label)):
        if side.left_out:
            tell(f"  {name}: {side.left_out} completions say nothing of the policy and are left out")
    if questions and total:
        _print_questions((first, label), (before, after), result, questions)


def _print_questions(labels: tuple[str, str], sides: tuple[Answers, Answers], result: PairedAnswers, most: int) -> None:
    for what, uids in (("gained", result.gained[:most]), ("lost", result.lost[:most])):
        if not uids:
            continue
        texts = [
            dict(read_rows(side.path, {side.by_uid[uid].row for uid in uids}, ("prompt", "completion")))
            for side in sides
        ]
        table = Table(what, "question", *(_cell(label) for label in labels))
        for uid in uids:
            old, new = (text[side.by_uid[uid].row] for text, side in zip(texts, sides, strict=True))
            asked = messages(new.get("prompt"))[-1]["content"]
            shown = (asked, old.get("completion"), new.get("completion"))
            table.add_row(_cell(uid), *(_cell(text, 200) for text in shown))
        print_table(out, table)


def _score(side: Answers, accuracy: Mapping[str, Any] | None) -> str:
    if accuracy is None:
        scores = [answer.score for answer in side.by_uid.values()]
        return format_number(sum(scores) / len(scores)) if scores else "-"
    if accuracy["low"] is None:
        return f"{100 * accuracy['share']:.1f} % (several answers to a question)"
    return percent(accuracy)


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:.1f}"


def _cell(value: Any, most: int = 100) -> str:
    """Untrusted text in a table, which takes brackets for markup."""
    from rich.markup import escape

    return escape(visible(str(value), most).replace("\n", " "))
