"""The report on multiple-choice answers as one HTML file without anything outside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from covey.files import write_atomically
from covey.observe.answer_statistics import measured
from covey.observe.html import bar, folded, page, picture, table, tag
from covey.observe.records import plain

_BLUE, _GREY, _INK = "#1f5fa8", "#9aa3ad", "#333333"
_MOST_ERRORS = 200


def write_choice_report(folder: Path, report: Mapping[str, Any], title: str) -> tuple[Path, Path]:
    """Write `report.json` and `report.html` into a folder, which is made if missing.

    Raises:
        RunFolderError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_html = folder / "report.json", folder / "report.html"
    write_atomically(as_json, json.dumps(plain(report), indent=1, allow_nan=False) + "\n")
    write_atomically(as_html, choice_html(report, title))
    return as_json, as_html


def choice_html(report: Mapping[str, Any], title: str) -> str:
    """The report as a page. Questions and completions are escaped: they are untrusted text."""
    models = [report["model"]] + ([report["baseline"]] if "baseline" in report else [])
    parts = [
        tag("p", f"{report['questions']} questions. Intervals are 95 %."),
        table(
            ["", *(model["name"] for model in models)],
            (
                [name, *("" if v is None else _FORMS[form](v) for v in values)]
                for name, form, values in measured(models)
            ),
        ),
    ]
    if "against_baseline" in report:
        d = report["against_baseline"]
        parts.append(
            tag(
                "p",
                f"Accuracy against {report['baseline']['name']}, question by question: {100 * d['difference']:+.1f} "
                f"points ({100 * d['low']:+.1f} to {100 * d['high']:+.1f}), p = {d['p_value']:.2g} (McNemar, exact); "
                f"{d['gained']} questions gained, {d['lost']} lost.",
            )
        )
    words = [[t["word"], t["of"], bar(t["share"]) + _share(t), f"{t['deviation']:+.1f}"] for t in report["by_topic"]]
    errors = report["errors"]
    left = f"; the first {_MOST_ERRORS} are here, all are in the JSON file" if len(errors) > _MOST_ERRORS else ""
    return page(
        title,
        *parts,
        tag("p", picture(_figure(report), "letters, calibration, accuracy by length")),
        tag("h2", "By words in the question"),
        tag(
            "p",
            "The words furthest from the mean accuracy, in standard errors. Among many words some are far out by "
            "chance: places to look at, not findings.",
            kind="note",
        ),
        table(["word", "questions", "accuracy", "deviation"], words),
        tag("h2", "Errors"),
        tag("p", f"{len(errors)} questions, short ones first{left}.", kind="note"),
        *map(_error, errors[:_MOST_ERRORS]),
    )


def _error(error: Mapping[str, Any]) -> str:
    right, chosen = error["right"], error["chosen"]
    marks = {chosen: "wrong"} | {right: "right"}
    options = [tag("li", f"{letter}. {text}", kind=marks.get(letter, "")) for letter, text in error["options"].items()]
    summary = f"{error['words']} words: chose {chosen or 'nothing'}, right is {right}. {error['question'][:90]}"
    return folded(summary, tag("p", error["question"]), tag("ul", *options), tag("pre", error["completion"]))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _share(s: Mapping[str, float]) -> Markup:
    interval = tag("span", f"({100 * s['low']:.1f} to {100 * s['high']:.1f})", kind="note")
    return Markup(_percent(s["share"])) + " " + interval


_FORMS: dict[str, Callable[[Any], str]] = {"share": _share, "part": _percent, "number": "{:.3f}".format}


def _figure(report: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    letters, calibration, length = figure.subplots(1, 3)
    _draw_letters(letters, report)
    _draw_calibration(calibration, report)
    _draw_length(length, report)
    for axes in (letters, calibration, length):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_color(_INK)
    return figure


def _draw_letters(axes: Axes, report: Mapping[str, Any]) -> None:
    shown = report["model"]["letters"]
    names = list(shown["chosen"])
    bars = [("right", [shown["right"].get(name, 0.0) for name in names], _GREY)]
    if "baseline" in report:
        bars.append(("chosen before", [report["baseline"]["letters"]["chosen"][name] for name in names], "#d9822b"))
    bars.append(("chosen", list(shown["chosen"].values()), _BLUE))
    width = 0.8 / len(bars)
    for number, (label, values, colour) in enumerate(bars):
        places = [place + (number - (len(bars) - 1) / 2) * width for place in range(len(names))]
        axes.bar(places, values, width, label=label, color=colour)
    axes.set_xticks(range(len(names)), names)
    axes.set(title="Letters", ylabel="share of the questions")
    axes.legend(frameon=False, fontsize="small")


def _draw_calibration(axes: Axes, report: Mapping[str, Any]) -> None:
    axes.set(title="Likeliest letter", xlabel="its probability", ylabel="fraction right", xlim=(0, 1), ylim=(0, 1))
    axes.plot([0, 1], [0, 1], color=_GREY, linewidth=1)
    bins = report["model"].get("likelihood", {}).get("bins", [])
    if bins:
        sizes = [12 + 200 * b["questions"] / report["questions"] for b in bins]
        axes.scatter([b["confidence"] for b in bins], [b["accuracy"] for b in bins], sizes, color=_BLUE)
    else:
        axes.text(0.5, 0.5, "not measured", ha="center", color=_GREY)


def _draw_length(axes: Axes, report: Mapping[str, Any]) -> None:
    parts = report["by_length"]
    errors = [[p["share"] - p["low"] for p in parts], [p["high"] - p["share"] for p in parts]]
    axes.bar(range(len(parts)), [p["share"] for p in parts], 0.6, yerr=errors, color=_BLUE, ecolor=_INK, capsize=3)
    axes.set_xticks(range(len(parts)), [f"{p['from']}-{p['to']}" for p in parts])
    axes.set(title="Accuracy by length", xlabel="words in the question", ylabel="fraction right", ylim=(0, 1))
