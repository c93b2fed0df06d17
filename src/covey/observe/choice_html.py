"""The report on multiple-choice answers as one HTML file without anything outside it."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from covey.files import write_atomically
from covey.observe.records import plain

_BLUE, _GREY, _INK = "#1f5fa8", "#9aa3ad", "#333333"
_MOST_ERRORS = 200

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title><style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { text-align: left; padding: .25rem .8rem .25rem 0;
vertical-align: top; border-bottom: 1px solid #ddd; } td.n { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 100%; } details { border-bottom: 1px solid #ddd; padding: .4rem 0; } summary { cursor: pointer; }
pre { white-space: pre-wrap; background: #f5f5f5; padding: .6rem; } .note { color: #666; }
.right { color: #2b7a3d; } .wrong { color: #b03a48; }
</style></head><body>
<h1>{{ title }}</h1>
<p>{{ report.questions }} questions. Intervals are 95 %.</p>
{% macro percent(s) %}{{ "%.1f" | format(100 * s.share) }} %
<span class="note">({{ "%.1f" | format(100 * s.low) }} to {{ "%.1f" | format(100 * s.high) }})</span>{% endmacro %}
<table><tr><th></th>{% for m in models %}<th>{{ m.name }}</th>{% endfor %}</tr>
<tr><td>accuracy</td>{% for m in models %}<td>{{ percent(m.accuracy) }}</td>{% endfor %}</tr>
<tr><td>no letter found</td>{% for m in models %}<td>{{ percent(m.extraction_failures) }}</td>{% endfor %}</tr>
<tr><td>its letters dealt out at random</td>{% for m in models %}
<td>{{ "%.1f" | format(100 * m.letters.own_prior) }} %</td>{% endfor %}</tr>
<tr><td>always {{ models[0].letters.constant.letter }}</td>{% for m in models %}
<td>{{ "%.1f" | format(100 * m.letters.constant.accuracy) }} %</td>{% endfor %}</tr>
<tr><td>a fair draw</td>{% for m in models %}<td>{{ "%.1f" | format(100 * m.letters.uniform) }} %</td>{% endfor %}</tr>
{% if models[0].rotation %}<tr><td>options rotated: the same option</td>{% for m in models %}
<td>{% if m.rotation %}{{ percent(m.rotation.same_option) }}{% endif %}</td>{% endfor %}</tr>
<tr><td>options rotated: the same letter</td>{% for m in models %}
<td>{% if m.rotation %}{{ percent(m.rotation.same_letter) }}{% endif %}</td>{% endfor %}</tr>{% endif %}
{% if models[0].likelihood %}<tr><td>likeliest letter: accuracy</td>{% for m in models %}
<td>{{ percent(m.likelihood.accuracy) }}</td>{% endfor %}</tr>
<tr><td>likeliest letter: calibration error</td>{% for m in models %}
<td>{{ "%.3f" | format(m.likelihood.expected_calibration_error) }}</td>{% endfor %}</tr>
<tr><td>probability that the answer begins with a letter</td>{% for m in models %}
<td>{{ "%.3f" | format(m.likelihood.letter_mass) }}</td>{% endfor %}</tr>{% endif %}
</table>
{% if report.against_baseline %}{% set d = report.against_baseline %}
<p>Accuracy against {{ report.baseline.name }}, question by question: {{ "%+.1f" | format(100 * d.difference) }} points
({{ "%+.1f" | format(100 * d.low) }} to {{ "%+.1f" | format(100 * d.high) }}), p = {{ "%.2g" | format(d.p_value) }}
(McNemar, exact); {{ d.gained }} questions gained, {{ d.lost }} lost.</p>{% endif %}
<p><img alt="letters, calibration, accuracy by length" src="data:image/png;base64,{{ picture }}"></p>
<h2>By words in the question</h2>
<p class="note">The words furthest from the mean accuracy, in standard errors. Among many words some are far out by
chance: places to look at, not findings.</p>
<table><tr><th>word</th><th>questions</th><th>accuracy</th><th>deviation</th></tr>
{% for t in report.by_topic %}<tr><td>{{ t.word }}</td><td class="n">{{ t.of }}</td><td>{{ percent(t) }}</td>
<td class="n">{{ "%+.1f" | format(t.deviation) }}</td></tr>{% endfor %}</table>
<h2>Errors</h2>
<p class="note">{{ report.errors | length }} questions, short ones first{% if report.errors | length > most %};
the first {{ most }} are here, all are in the JSON file{% endif %}.</p>
{% for e in report.errors[:most] %}<details><summary>{{ e.words }} words: chose {{ e.chosen or "nothing" }}, right is
{{ e.right }}. {{ e.question[:90] }}</summary><p>{{ e.question }}</p><ul>
{% for letter, text in e.options.items() %}
<li class="{{ "right" if letter == e.right else ("wrong" if letter == e.chosen) }}">{{ letter }}. {{ text }}</li>
{% endfor %}</ul><pre>{{ e.completion }}</pre></details>{% endfor %}
</body></html>
"""


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
    template = Environment(autoescape=True).from_string(_PAGE)
    picture = base64.b64encode(_picture(report)).decode()
    return template.render(report=report, models=models, title=title, picture=picture, most=_MOST_ERRORS)


def _picture(report: Mapping[str, Any]) -> bytes:
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    letters, calibration, length = figure.subplots(1, 3)
    _draw_letters(letters, report)
    _draw_calibration(calibration, report)
    _draw_length(length, report)
    for axes in (letters, calibration, length):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_color(_INK)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


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
