"""What can honestly be said about a model's answers to multiple-choice questions, and the report that says it.

Everything is computed from the questions (`question`, `options`, `answer`), the letters that were chosen, and the
likelihood of each letter; nothing here runs a model. The page is one file that asks nobody for anything.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.files import write_atomically
from covey.observe.records import plain
from covey.observe.statistics import paired_difference, share

Row = Mapping[str, Any]
Json = dict[str, Any]

_BINS, _PARTS, _TOPICS, _MIN_QUESTIONS = 10, 4, 12, 8
"""Of confidence and of length; words that are told; questions that a word must stand in to say anything."""


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    """What one model answered to n questions.

    Attributes:
        model: its name.
        texts: `[n]` completions.
        chosen: `[n]` letters found in them, None where there is none.
        rotated: for each rotation of the options, `[n]` letters chosen then, each named by where that option stands
            in the question as it is; and `[n]` those letters as they were written.
        probabilities: `[n, L]` likelihood of each of `letters` as the answer, not normalised; NaN for a letter that a
            question does not have. None = not measured.
        letters: `[L]` all letters.
    """

    model: str
    texts: Sequence[str]
    chosen: Sequence[str | None]
    letters: Sequence[str]
    rotated: Sequence[tuple[Sequence[str | None], Sequence[str | None]]] = ()
    probabilities: NDArray[np.float64] | None = None


def choice_report(rows: Sequence[Row], answered: Answered, baseline: Answered | None = None) -> Json:
    """All statistics as plain values, explained in `docs/use.md`; `ValueError`: not one answer for each question."""
    for other in (answered, baseline):
        if other is not None and len(other.chosen) != len(rows):
            raise ValueError(f"{len(other.chosen)} answers of {other.model} to {len(rows)} questions")
    report: Json = {"questions": len(rows), "model": _one_model(rows, answered)}
    right = right_answers(rows, answered.chosen)
    if baseline is not None:
        before = right_answers(rows, baseline.chosen)
        valid = [[letter is not None for letter in one.chosen] for one in (baseline, answered)]
        report["baseline"] = _one_model(rows, baseline)
        report["against_baseline"] = asdict(paired_difference(before.tolist(), right.tolist()))
        report["answered_against_baseline"] = asdict(paired_difference(*valid))
    report["by_length"] = accuracy_by_length(rows, right)
    report["by_topic"] = accuracy_by_topic(rows, right)
    report["errors"] = _errors(rows, answered, right)
    return report


def right_answers(rows: Sequence[Row], chosen: Sequence[str | None]) -> NDArray[np.bool_]:
    """`[n]` whether the chosen letter is the right one."""
    return np.array([letter == row["answer"] for row, letter in zip(rows, chosen, strict=True)], np.bool_)


def _one_model(rows: Sequence[Row], answered: Answered) -> Json:
    found: Json = {
        "name": answered.model,
        "accuracy": share(int(right_answers(rows, answered.chosen).sum()), len(rows)),
        "extraction_failures": share(sum(letter is None for letter in answered.chosen), len(rows)),
        "letters": letter_prior(rows, answered),
    }
    if answered.rotated:
        found["rotation"] = rotation_consistency(answered)
    if answered.probabilities is not None:
        found["likelihood"] = likelihood(rows, answered)
    return found


def measured(models: Sequence[Json]) -> Iterator[tuple[str, str, list[Any]]]:
    """Of reports on models what is told side by side: its name, what it is (a "share" with its interval, a "part" of
    one, or a "number"), and what was measured of each model; what was measured of none is left out.
    """
    for name, form, *path in (
        ("accuracy", "share", "accuracy"),
        ("no letter found", "share", "extraction_failures"),
        ("its letters at random", "part", "letters", "own_prior"),
        (f"always {models[0]['letters']['constant']['letter']}", "part", "letters", "constant", "accuracy"),
        ("a fair draw", "part", "letters", "uniform"),
        ("options rotated: the same option", "share", "rotation", "same_option"),
        ("options rotated: the same letter", "share", "rotation", "same_letter"),
        ("likeliest letter: accuracy", "share", "likelihood", "accuracy"),
        ("likeliest letter: calibration error", "number", "likelihood", "expected_calibration_error"),
        ("probability of beginning with a letter", "number", "likelihood", "letter_mass"),
    ):
        values: list[Any] = list(models)
        for key in path:
            values = [None if value is None else value.get(key) for value in values]
        if any(value is not None for value in values):
            yield name, form, values


def letter_prior(rows: Sequence[Row], answered: Answered) -> Json:
    """Which letters are chosen and which are right, and what a model would reach that knows no medicine.

    `own_prior` is the accuracy of the model's own letters dealt out to the questions at random; `constant` that of the
    best single letter, found with hindsight; `uniform` that of a fair draw among a question's options.
    """
    total = len(rows)
    chosen, right = Counter(answered.chosen), Counter(row["answer"] for row in rows)
    best = max(answered.letters, key=lambda letter: right[letter])
    return {
        "chosen": {letter: chosen[letter] / total for letter in answered.letters} | {"none": chosen[None] / total},
        "right": {letter: right[letter] / total for letter in answered.letters},
        "own_prior": sum(chosen[letter] * right[letter] for letter in answered.letters) / total**2,
        "constant": {"letter": best, "accuracy": right[best] / total},
        "uniform": float(np.mean([1 / len(row["options"]) for row in rows])),
    }


def rotation_consistency(answered: Answered) -> Json:
    """The same options in another order: is the same option chosen, or the same letter?

    A model that reads the options keeps the option; one that likes a letter keeps the letter. No answer counts as
    neither.
    """

    def same(which: int) -> Json:
        pairs = [pair for told in answered.rotated for pair in zip(answered.chosen, told[which], strict=True)]
        return share(sum(before is not None and before == after for before, after in pairs), len(pairs))

    return {"rotations": len(answered.rotated), "same_option": same(0), "same_letter": same(1)}


def likelihood(rows: Sequence[Row], answered: Answered) -> Json:
    """Accuracy of the likeliest letter, and whether the letters' probabilities mean what they say.

    `expected_calibration_error` is the mean distance between confidence and accuracy over bins of equal width, weighted
    by their questions (Guo et al. 2017, arXiv 1706.04599); `brier` the mean squared error of the probability of each
    letter, summed over letters. Both after normalising over the letters; `letter_mass` is the mean before.
    """
    assert answered.probabilities is not None
    raw = np.nan_to_num(answered.probabilities, nan=0.0)
    probability = raw / np.maximum(raw.sum(axis=1, keepdims=True), 1e-300)
    truth = np.zeros_like(probability)
    truth[np.arange(len(rows)), [answered.letters.index(row["answer"]) for row in rows]] = 1.0
    best, confidence = probability.argmax(axis=1), probability.max(axis=1)
    right = truth[np.arange(len(rows)), best] == 1.0
    place = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    bins = [
        {
            "from": number / _BINS,
            "to": (number + 1) / _BINS,
            "questions": int((place == number).sum()),
            "confidence": float(confidence[place == number].mean()),
            "accuracy": float(right[place == number].mean()),
        }
        for number in range(_BINS)
        if (place == number).any()
    ]
    gap = sum(b["questions"] * abs(b["confidence"] - b["accuracy"]) for b in bins) / len(rows)
    said = [answered.letters[column] == letter for column, letter in zip(best, answered.chosen, strict=True)]
    return {
        "accuracy": share(int(right.sum()), len(rows)),
        "agrees_with_text": share(sum(said), len(rows)),
        "letter_mass": float(raw.sum(axis=1).mean()),
        "expected_calibration_error": float(gap),
        "brier": float(((probability - truth) ** 2).sum(axis=1).mean()),
        "bins": bins,
    }


def accuracy_by_length(rows: Sequence[Row], right: NDArray[np.bool_]) -> list[Json]:
    """Accuracy in four parts of the questions, from short to long."""
    lengths = np.array([len(row["question"].split()) for row in rows])
    return [
        {"from": int(lengths[part].min()), "to": int(lengths[part].max()), **share(int(right[part].sum()), len(part))}
        for part in np.array_split(np.argsort(lengths, kind="stable"), _PARTS)
        if len(part)
    ]


def accuracy_by_topic(rows: Sequence[Row], right: NDArray[np.bool_]) -> list[Json]:
    """Accuracy for the questions that hold a word, for the words furthest from the mean, the worst first.

    Words of five letters or more that stand in at least 8 and at most half of the questions. `deviation` is in standard
    errors; among hundreds of words some reach 3 by chance, so this is a list of places to look at, not of findings.
    """
    holders: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        for word in set(re.findall(r"[a-z]{5,}", row["question"].lower())):
            holders.setdefault(word, []).append(index)
    mean = float(right.mean())
    spread = max(np.sqrt(mean * (1 - mean)), 1e-9)
    found = []
    for word, indices in holders.items():
        if _MIN_QUESTIONS <= len(indices) <= len(rows) / 2:
            entry = share(int(right[indices].sum()), len(indices))
            deviation = (entry["share"] - mean) / spread * np.sqrt(len(indices))
            found.append({"word": word, "deviation": float(deviation), **entry})
    found.sort(key=lambda entry: (entry["deviation"], entry["word"]))
    return found if len(found) <= 2 * _TOPICS else [*found[:_TOPICS], *found[-_TOPICS:]]


def _errors(rows: Sequence[Row], answered: Answered, right: NDArray[np.bool_]) -> list[Json]:
    """Every question that was answered wrongly or not at all, short ones first."""
    wrong = [(index, rows[index]) for index in np.flatnonzero(~right).tolist()]
    return [
        {"uid": row.get("uid", str(index)), "words": len(row["question"].split()), "question": row["question"]}
        | {"options": dict(row["options"]), "right": row["answer"]}
        | {"chosen": answered.chosen[index], "completion": answered.texts[index]}
        for index, row in sorted(wrong, key=lambda entry: len(entry[1]["question"]))
    ]


# ---------------------------------------------------------------------- the report

_MOST_ERRORS = 200
_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title><style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { text-align: left; padding: .25rem .8rem .25rem 0;
vertical-align: top; border-bottom: 1px solid #ddd; }
details { border-bottom: 1px solid #ddd; padding: .4rem 0; } summary { cursor: pointer; }
pre { white-space: pre-wrap; background: #f5f5f5; padding: .6rem; } .note { color: #666; }
.bar { display: inline-block; width: 6rem; height: .6em; margin-right: .5rem; background: #eee; }
.bar span { display: block; height: 100%; background: #1f5fa8; } .right { color: #2b7a3d; } .wrong { color: #b03a48; }
</style></head><body>
{% macro share(s) %}{{ "%.1f"|format(100 * s.share) }} % <span class="note">({{ "%.1f"|format(100 * s.low) }} to
{{ "%.1f"|format(100 * s.high) }})</span>{% endmacro %}
{% macro bar(part, told=none) %}<span class="bar"><span style="width:{{ "%.1f"|format(100 * part) }}%"></span></span>
{{- "%.1f %%"|format(100 * part) if told is none else told }}{% endmacro %}
<h1>{{ title }}</h1>
<p>{{ questions }} questions. Intervals are 95 %.</p>
<table><tr><th></th>{% for model in models %}<th>{{ model.name }}</th>{% endfor %}</tr>
{% for name, form, values in measured %}<tr><td>{{ name }}</td>{% for v in values %}<td>
{%- if v is none %}{% elif form == "share" %}{{ share(v) }}
{%- elif form == "part" %}{{ "%.1f"|format(100 * v) }} %{% else %}{{ "%.3f"|format(v) }}{% endif %}</td>
{%- endfor %}</tr>
{% endfor %}</table>
{% if against_baseline %}<p>Accuracy against {{ baseline.name }}, question by question:
{{ "%+.1f"|format(100 * against_baseline.difference) }} points ({{ "%+.1f"|format(100 * against_baseline.low) }} to
{{ "%+.1f"|format(100 * against_baseline.high) }}), p = {{ "%.2g"|format(against_baseline.p_value) }} (McNemar, exact);
{{ against_baseline.gained }} questions gained, {{ against_baseline.lost }} lost.</p>{% endif %}
{% set letters = models[0].letters %}
<h2>Letters</h2>
<table><tr><th>letter</th><th>right</th>
{%- for model in models|reverse %}<th>chosen: {{ model.name }}</th>{% endfor %}</tr>
{% for letter in letters.chosen %}<tr><td>{{ letter }}</td><td>{{ bar(letters.right.get(letter, 0)) }}</td>
{%- for model in models|reverse %}<td>{{ bar(model.letters.chosen[letter]) }}</td>{% endfor %}</tr>
{% endfor %}</table>
<h2>Probability of the likeliest letter</h2>
{% if models[0].likelihood %}<p class="note">Where it means what it says, both columns are alike.</p>
<table><tr><th>questions</th><th>probability</th><th>fraction right</th></tr>
{% for b in models[0].likelihood.bins %}<tr><td>{{ b.questions }}</td><td>{{ bar(b.confidence) }}</td>
<td>{{ bar(b.accuracy) }}</td></tr>
{% endfor %}</table>{% else %}<p class="note">not measured</p>{% endif %}
<h2>By words in a question</h2>
<table><tr><th>words</th><th>questions</th><th>accuracy</th></tr>
{% for part in by_length %}<tr><td>{{ part.from }}-{{ part.to }}</td><td>{{ part.of }}</td>
<td>{{ bar(part.share, "") }}{{ share(part) }}</td></tr>
{% endfor %}</table>
<h2>By a word in the question</h2>
<p class="note">The words furthest from the mean accuracy, in standard errors. Among many words some are far out by
chance: places to look at, not findings.</p>
<table><tr><th>word</th><th>questions</th><th>accuracy</th><th>deviation</th></tr>
{% for t in by_topic %}<tr><td>{{ t.word }}</td><td>{{ t.of }}</td><td>{{ bar(t.share, "") }}{{ share(t) }}</td>
<td>{{ "%+.1f"|format(t.deviation) }}</td></tr>
{% endfor %}</table>
<h2>Errors</h2>
<p class="note">{{ errors|length }} questions, short ones first
{%- if errors|length > most %}; the first {{ most }} are here, all are in the JSON file{% endif %}.</p>
{% for e in errors[:most] %}<details><summary>{{ e.words }} words: chose {{ e.chosen or "nothing" }}, right is
{{ e.right }}. {{ e.question[:90] }}</summary><p>{{ e.question }}</p><ul>
{% for letter, text in e.options.items() %}<li class="
{%- if letter == e.right %}right{% elif letter == e.chosen %}wrong{% endif %}">{{ letter }}. {{ text }}</li>
{% endfor %}</ul><pre>{{ e.completion }}</pre></details>
{% endfor %}</body></html>
"""


def write_choice_report(folder: Path, report: Mapping[str, Any], title: str) -> tuple[Path, Path]:
    """Write `report.json` and `report.html` into a folder, made if missing; `RunFolderError` if it cannot."""
    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_html = folder / "report.json", folder / "report.html"
    write_atomically(as_json, json.dumps(plain(report), indent=1, allow_nan=False) + "\n")
    write_atomically(as_html, choice_html(report, title))
    return as_json, as_html


def choice_html(report: Mapping[str, Any], title: str) -> str:
    """The report as a page. Questions and completions are escaped: they are untrusted text."""
    from jinja2 import Environment

    models = [report["model"]] + ([report["baseline"]] if "baseline" in report else [])
    known = dict(report) | {"title": title, "models": models, "measured": measured(models), "most": _MOST_ERRORS}
    return Environment(autoescape=True).from_string(_PAGE).render(known)
