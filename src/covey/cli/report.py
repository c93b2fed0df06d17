"""`covey report`: runs in the terminal, side by side; their completions; the same as a page to send."""

from __future__ import annotations

import json
import logging
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from covey.cli.completions import in_line, show
from covey.cli.results import difference, percent
from covey.cli.weights import AsJson, err, out, print_json
from covey.config.whole import GRPOConfig
from covey.errors import ConfigError, DataError, RunFolderError, several
from covey.files import explained, open_regular, write_atomically
from covey.observe import comparison, curve
from covey.observe.comparison import Answers, ComparedRun, PairedAnswers
from covey.observe.console import format_number, print_table, say, visible
from covey.observe.records import Record, plain
from covey.observe.run_folder import RunFolder, TableKind
from covey.watch.run import WatchedRun, labels
from covey.watch.tables import TableReader

if TYPE_CHECKING:
    from covey.training.questions import Question

_MOST_CONFIG = 1 << 20
_MOST_ROWS, _READ, _RANKED, _SAMPLED = 60, 200, 10, 3
_TEXT, _EXCERPT = 2_000, 300
"""Characters of a completion that is read, and of one in the overview."""
_EVAL = "The evaluation to compare: a step, first or last. With --worst or --question: the evaluation to read."
_OUTPUT = "Write curves (.png), the report (.json), or whole completions (.jsonl); may be repeated."
_log = logging.getLogger("covey.observe")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; the others are compared with the first.")],
    step: Annotated[
        str | None, typer.Option(help="Read the completions of these steps: 12, 10:20, first, last or all.")
    ] = None,
    worst: Annotated[bool, typer.Option("--worst", help="Read completions, the lowest rewards first.")] = False,
    question: Annotated[str, typer.Option(metavar="UID", help="Read all answers to this question.")] = "",
    evaluation: Annotated[str, typer.Option("--eval", help=_EVAL)] = "",
    number: Annotated[
        int | None, typer.Option("-n", "--number", min=1, help="Most questions or completions to print.")
    ] = None,
    seeds: Annotated[
        bool, typer.Option("--seeds", help="Mean and range of runs that differ only in their seed; one line in a .png.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write the runs as one page that opens offline.")] = None,
    files: Annotated[list[Path] | None, typer.Option("-o", "--output", help=_OUTPUT)] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: different settings, curves, a paired test on the same held-out questions, hard questions.

    For a single run, the first evaluation is compared with the last. Only the run folders are read, also during
    training or from a copy. With --step, --worst or --question it shows completions.
    """
    files = list(files or ())
    for path in files:
        if path.suffix not in (".png", ".json", ".jsonl"):
            ends = ".png for curves, .json for the report, or .jsonl for completions"
            raise ConfigError(f"--output {path}: give a name that ends in {ends}; for a page use --html FILE")
    if html is not None:
        _write_page(runs, html, err if as_json else out)
        if not as_json and not files:
            return
    lines = [path for path in files if path.suffix == ".jsonl"]
    if step is not None or worst or question or lines:
        if others := [str(path) for path in files if path not in lines]:
            raise ConfigError(f"--output {', '.join(others)}: with completions only .jsonl is written; ask twice")
        _read(runs, step, evaluation, question, number, lines, worst, as_json)
        return
    with closing(TableReader(workers=1)) as reader:
        _compare(runs, evaluation, number, files, reader, seeds, as_json)


def _write_page(runs: Sequence[Path], path: Path, console: Console) -> None:
    from covey.watch.export import export_runs

    if path.suffix not in (".html", ".htm"):
        raise ConfigError(f"--html {path}: the file is a page; give it a name that ends in .html")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--html {path}: {'it is a folder' if path.is_dir() else 'its folder does not exist'}")
    with closing(TableReader()) as reader:
        left_out = export_runs([WatchedRun(run, reader) for run in runs], path)
    for sentence in (f"{path}: {path.stat().st_size / 1e6:.1f} MB", *left_out):
        say(console, sentence)


# ---------------------------------------------------------------------- runs side by side

Pair = tuple[str, Answers, Answers, PairedAnswers]


def _compare(
    runs: list[Path], which: str, number: int | None, files: list[Path], reader: TableReader, seeds: bool, as_json: bool
) -> None:
    from covey.training.questions import questions_of

    watched = [WatchedRun(run, reader) for run in runs]
    folders = [run.folder for run in watched]
    places = [folder.path.resolve() for folder in folders]
    twice = [str(run) for run, place in zip(runs, places, strict=True) if places.count(place) > 1]
    if twice:
        raise ConfigError(f"{' and '.join(twice)} are one folder; give each run once")
    notes: list[str] = []
    compared = [_compared(folder, label, notes) for folder, label in zip(folders, labels(watched), strict=True)]
    if not any(run.records or run.evaluations for run in compared):
        lost = any(path.name != "step_000000" for folder in folders for path in folder.checkpoints.glob("step_*"))
        why = "metrics.jsonl is gone or empty; restore it from a backup" if lost else folders[0].failure()
        raise DataError(f"{runs[0]}: there is nothing to tell: {why or 'nothing is recorded yet'}")
    asked = [questions_of(folder.read_answers()) for folder in folders]
    known = {name for run in compared for record in run.records for name in record}
    shown, point = [name for name in comparison.SHOWN if name in known], comparison.equal_step(compared)
    found: dict[str, Any] = {
        "runs": [run.label for run in compared],
        "paths": [str(place) for place in places],
        "equal_step": point,
        "metrics": {name: [comparison.metric_values(run, name, point) for run in compared] for name in shown},
        "questions": [
            [{name: getattr(one, name) for name in ("uid", "accuracy", "visits")} for one in of] for of in asked
        ],
    }
    if len(compared) > 1:
        found["settings"] = comparison.differing_settings(compared) if all(run.settings for run in compared) else {}
        versions = [plain(folder.versions()) for folder in folders]
        found["versions"] = comparison.differing(versions, ("run_id", "needs_python"))
    sides, pairs = _held_out(compared, which, notes, reader)
    found["held_out"] = [
        {"run": run, "step": side.step, "accuracy": comparison.accuracy_of(side)} for run, side in sides
    ]
    found["against_first"] = [{"run": label} | asdict(result) for label, _, _, result in pairs]
    found["notes"] = notes
    grouped = comparison.group_seeds(compared) if seeds else {}
    found["seeds"] = comparison.over_seeds(grouped)
    if as_json:
        print_json(out, found)
    else:
        _print(found, compared, sides, pairs)
        _print_rest(folders, found["runs"], asked, number, reader)
    for path in files:
        if path.suffix == ".json":
            write_atomically(path, json.dumps(plain(found), indent=1) + "\n")
        elif len(compared) == 1:
            curve.draw_learning_curve(compared[0].records, path, title=compared[0].label)
        else:
            curve.draw_comparison(grouped or {run.label: [run.records] for run in compared}, path)
        say(err if as_json else out, f"wrote {path}")


def _print_rest(
    folders: list[RunFolder], labels: list[str], asked: list[list[Question]], number: int | None, reader: TableReader
) -> None:
    """Hard questions, and of a single run its worst completions."""
    try:
        if any(asked):
            _print_questions(folders, labels, asked, number, reader)
        if len(folders) == 1 and (steps := folders[0].completion_steps()):
            rows = _rows(folders[0], "step", steps[-1:], "", _SAMPLED, reader, worst=True)
            say(out, f"worst completions of step {steps[-1]}; --worst and --step read more", style="bold")
            show(rows, _EXCERPT)
    except RunFolderError as error:  # a damaged table; the rest is told
        say(out, visible(str(error), 500))


def _compared(folder: RunFolder, label: str, notes: list[str]) -> ComparedRun:
    if folder.needs_python:
        notes.append(f"{label} was started from Python: parts of it that no file holds may differ too")
    tables = {step: folder.table(step, "eval") for step in folder.completion_steps("eval")}
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
        raise ConfigError(f"{folder.config_path}: is not TOML ({error}); restore it from a backup") from error
    sections = {name: plain(fields) for name, fields in GRPOConfig().to_dict().items()}
    for name, fields in written.items():
        sections[name] = sections.get(name, {}) | fields if isinstance(fields, Mapping) else {"": fields}
    return {f"{name}.{field}": value for name, fields in sections.items() for field, value in fields.items()}


def _held_out(
    runs: Sequence[ComparedRun], which: str, notes: list[str], reader: TableReader
) -> tuple[list[tuple[str, Answers]], list[Pair]]:
    """Each run's answers, and the comparisons with the first; of a single run its first evaluation with its last."""

    def answers(run: ComparedRun, step: int, rewards: bool) -> tuple[str, Answers]:
        told = reader.ask("answers", run.evaluations[step], rewards)
        by_uid = {uid: comparison.Answer(*answer) for uid, answer in told.pop("by_uid").items()}
        return run.label, Answers(step, run.evaluations[step], by_uid=by_uid, **told)

    having = [run for run in runs if run.evaluations]
    named = [(run, comparison.chosen_steps(which or "last", sorted(run.evaluations), "--eval")[-1]) for run in having]
    if len(runs) == 1 and having:
        steps = sorted({min(runs[0].evaluations), named[0][1]})
        named = [(replace(runs[0], label=f"{runs[0].label}, step {step}"), step) for step in steps]
    elif len(runs) > len(having) and len(runs) > 1:
        without = ", ".join(run.label for run in runs if not run.evaluations)
        notes.append(
            f"no table of an evaluation in {without}: answers are not compared; evaluations need held-out prompts, and "
            "run.log_completions=true keeps their answers"
        )
    sides = [answers(run, step, False) for run, step in named]
    if len(sides) < 2 or (len(runs) > 1 and runs[0] is not having[0]):
        return sides, []
    if not all(side.judged for _, side in sides) and any(side.judged for _, side in sides):
        notes.append("not all runs say which answers are right, so their rewards are compared")
        sides = [answers(run, step, True) for run, step in named]
    if len(sides) > 2:
        notes.append(f"{len(sides) - 1} comparisons: each p is of its own test, none is corrected for their number")
    first = sides[0][1]
    return sides, [(label, first, side, comparison.pair(first, side)) for label, side in sides[1:]]


def _print(
    found: Record, runs: Sequence[ComparedRun], sides: Sequence[tuple[str, Answers]], pairs: Sequence[Pair]
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
    _print_metrics(found, runs, labels)
    if sides:
        about = "right (95 %)" if sides[0][1].judged else "mean reward"
        table = Table("held out", "evaluation at step", about, "questions")
        for (label, side), entry in zip(sides, found["held_out"], strict=True):
            table.add_row(_cell(label), str(side.step), _score(side, entry["accuracy"]), str(len(side.by_uid)))
        print_table(out, table)
    for each in found["seeds"]:
        numbers = ", ".join(f"{name} {format_number(each[name])}" for name in ("mean", "smallest", "largest"))
        say(out, visible(f"{each['metric']} of {each['runs']} at step {each['step']}: {numbers}", 500), style="bold")
    for label, before, after, result in pairs:
        _print_pair(sides[0][0], label, before, after, result)
    for note in found["notes"]:
        say(out, visible(note, 500))


def _print_metrics(found: Mapping[str, Any], runs: Sequence[ComparedRun], labels: Sequence[str]) -> None:
    point = found["equal_step"]
    table = Table("metric", "", *labels)
    for name, values in found["metrics"].items():
        rows = {"final": [format_number(value["final"]) for value in values]}
        if any(value["best"] is not None for value in values):
            rows["best"] = [
                "-" if value["best"] is None else f"{format_number(value['best'])} (step {value['best_step']})"
                for value in values
            ]
        if point is not None and len(values) > 1:
            rows[f"at step {point}"] = [format_number(value["equal"]) for value in values]
        if out.encoding.startswith("utf"):
            rows["curve"] = [curve.sparkline(curve.series(run.records, name)) for run in runs]
        for position, (when, cells) in enumerate(rows.items()):
            table.add_row("" if position else _cell(name), when, *cells)
    if table.row_count:
        print_table(out, table)
        told = f"Of training, means over the last {comparison.MEAN_OF} steps; of evaluations, each as it was measured."
        out.print(told, style="dim", highlight=False)


def _print_pair(first: str, label: str, before: Answers, after: Answers, result: PairedAnswers) -> None:
    def tell(text: str) -> None:
        say(out, visible(text, 1000))

    if (d := result.difference) is None:
        why = "they were asked other questions"
        if before.left_out or after.left_out:
            why = "no question has an answer with a reward in both"
        tell(f"{label} against {first}: {why}, so their answers cannot be compared by question")
    else:
        reached = f"{difference(d)} (McNemar's exact test)"
        if not before.judged:
            reached = f"mean reward {d.difference:+.3f} ({d.low:+.3f} to {d.high:+.3f}), p = {d.p_value:.2g}, "
            reached += f"{d.gained} better, {d.lost} worse (bootstrap)"
        tell(f"{label} against {first} on {several(d.total, 'question')} that both were asked: {reached}")
    if result.only_before or result.only_after:
        only = f"answered only in {first}: {several(result.only_before, 'question')}, only in {label}: "
        tell(f"  left out, {only}{result.only_after}")
    if result.other_text:
        tell(f"  left out, one uid with different texts: {several(result.other_text, 'question')}")
    for side, name in ((before, first), (after, label)):
        if side.left_out:
            tell(f"  left out of {name}, as nothing can be said of the policy: {several(side.left_out, 'completion')}")


def _score(side: Answers, accuracy: Mapping[str, Any] | None) -> str:
    if accuracy is None:
        scores = [answer.score for answer in side.by_uid.values()]
        return format_number(sum(scores) / len(scores)) if scores else "-"
    if accuracy["low"] is None:
        return f"{100 * accuracy['share']:.1f} % (several answers to a question)"
    return percent(accuracy)


def _print_questions(
    folders: list[RunFolder], labels: list[str], asked: list[list[Question]], number: int | None, reader: TableReader
) -> None:
    """How the training questions were answered, and of a single run the hardest of them."""
    again = [any(len(question.visits) > 1 for question in questions) for questions in asked]
    heads = (": first visit -> last" if twice else ": only visit" for twice in again)
    table = Table("training questions", *(f"{_cell(label)}{head}" for label, head in zip(labels, heads, strict=True)))
    for name, low, high in (("never right", 0.0, 0.0), ("sometimes", 1e-9, 1 - 1e-9), ("always right", 1.0, 1.0)):
        visits = [([each.first for each in questions], [each.last for each in questions]) for questions in asked]
        counts = [[sum(low <= share <= high for share in shares) for shares in both] for both in visits]
        table.add_row(name, *(f"{a} -> {b}" if twice else str(a) for (a, b), twice in zip(counts, again, strict=True)))
    print_table(out, table)
    if len(folders) > 1:
        return
    shown, prompts = asked[0][: number or _RANKED], dict[str, str]()
    for step in reversed(folders[0].completion_steps()):
        if wanted := [question.uid for question in shown if question.uid not in prompts]:
            prompts |= reader.ask("prompts", folders[0].table(step), wanted)
    table = Table("hardest", "visits", "right", "first", "last", "question")
    for question in shown:
        shares = (f"{100 * value:.0f} %" for value in (question.accuracy, question.first, question.last))
        text = _cell(prompts.get(question.uid, ""), 120)
        table.add_row(_cell(question.uid), str(len(question.visits)), *shares, text)
    print_table(out, table)


def _cell(value: Any, most: int = 100) -> str:
    """Untrusted text in a table, which takes brackets for markup."""
    return escape(in_line(value, most))


# ---------------------------------------------------------------------- completions


def _read(
    runs: list[Path],
    step: str | None,
    evaluation: str,
    question: str,
    number: int | None,
    files: list[Path],
    worst: bool,
    as_json: bool,
) -> None:
    if len(runs) > 1:
        raise ConfigError("--step, --worst, --question: completions of one run are read; give one run")
    if step is not None and evaluation:
        raise ConfigError("--step, --eval: a completion is of one of them; give one option")
    folder = RunFolder.read(runs[0])
    kind: TableKind = "eval" if evaluation else "step"
    there = folder.completion_steps(kind)
    if not there:
        what = "evaluations" if evaluation else "completions of steps"
        raise DataError(f"{folder.path} has no {what} yet; run.log_completions must be true")
    chosen = comparison.chosen_steps(evaluation or step or ("all" if question else "last"), there, f"--{kind}")
    most = number or (None if files else _RANKED if worst else _READ)
    with closing(TableReader(workers=1)) as reader:
        rows = _rows(folder, kind, chosen, question, most, reader, worst=worst)
    if not rows:
        where = f"{kind} {chosen[0]}" if len(chosen) == 1 else f"{len(chosen)} tables"
        raise DataError(f"{runs[0]}: no such completion in {where}; see --step all")
    for path in files:
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
        say(err if as_json else out, f"wrote {path}")
    if as_json:
        print_json(out, rows)
    if files or as_json:
        return
    if paged := out.is_terminal and sys.stdin.isatty():
        os.environ.setdefault("LESS", "FRX")  # what fits on the screen needs no pager; colours; the text stays
    with out.pager(styles=True) if paged else nullcontext():
        show(rows, _TEXT)


def _rows(
    folder: RunFolder,
    kind: TableKind,
    steps: list[int],
    question: str,
    most: int | None,
    reader: TableReader,
    *,
    worst: bool,
) -> list[Record]:
    """Completions of one question or of all, step after step, or the lowest rewards of all steps first.

    A table that disappeared or is damaged is passed over with a warning, unless there is no other.
    """
    rows: list[Record] = []
    problems: list[RunFolderError] = []
    for step in steps:
        start, left = 0, 1
        try:
            while left and (worst or most is None or len(rows) < most):
                found = reader.ask("some", folder.table(step, kind), question, most, worst, start)
                rows += [{kind: step} | row for row in found["rows"]]
                start, left = start + len(found["rows"]), found["left"]
        except RunFolderError as error:
            problems.append(error)
    if len(problems) == len(steps):
        raise problems[0]
    for problem in problems:
        _log.warning("passed over: %s", problem)
    return (sorted(rows, key=lambda row: row["reward"]) if worst else rows)[:most]
