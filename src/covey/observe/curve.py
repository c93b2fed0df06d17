"""Learning curves as pictures: small multiples of one run, or of several seeds with their mean and band.

Drawn with matplotlib's Agg canvas and without pyplot, so no global state, window or thread is involved.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from covey.files import write_atomically
from covey.observe.run_folder import RunFolder

Records = Sequence[Mapping[str, Any]]
Points = list[tuple[int, float]]

_BLUE, _GREY, _INK = "#1f5fa8", "#9aa3ad", "#333333"
_COLOURS = ("#1f5fa8", "#d9822b", "#2b8a57", "#8e4aa8", "#b03a48", "#5f6b76")
_PANELS = (
    ("reward", "Training reward", "reward"),
    ("eval/accuracy", "Held-out accuracy", "fraction right"),
    ("completions/mean_length", "Completion length", "tokens"),
    ("kl", "KL from the reference", "nats"),
)


def series(records: Records, name: str) -> Points:
    """(step, value) of a metric where it is a finite number; of two lines for one step the later counts."""
    known = [(record["step"], record.get(name)) for record in records if isinstance(record.get("step"), int)]
    points = {step: float(value) for step, value in known if isinstance(value, int | float) and math.isfinite(value)}
    return sorted(points.items())


def smoothing_half_width(points: Points) -> int:
    """Steps on either side that `smooth` averages over: a tenth of the run, at least 1, at most 10."""
    return max(1, min(10, len(points) // 10))


def smooth(points: Points, half_width: int | None = None) -> Points:
    """Centred moving average. Near the ends the window shrinks on both sides alike, so a straight line stays as it is.

    An exponential average would lag behind a rising curve and make every run look slower than it was. Values
    [0, 3, 0, 3, 6] with `half_width=1` give [0, 1, 2, 3, 6].
    """
    reach = smoothing_half_width(points) if half_width is None else half_width
    values = [value for _, value in points]
    smoothed = []
    for index, (step, _) in enumerate(points):
        width = min(reach, index, len(points) - 1 - index)
        smoothed.append((step, sum(values[index - width : index + width + 1]) / (2 * width + 1)))
    return smoothed


def sparkline(points: Points, width: int = 24) -> str:
    """A curve in a line of text: means of at most `width` equal parts, from the lowest to the highest."""
    if not points:
        return ""
    count = min(width, len(points))
    ends = [len(points) * number // count for number in range(count + 1)]
    means = [fmean(value for _, value in points[a:b]) for a, b in pairwise(ends)]
    low, high = min(means), max(means)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (mean - low) / ((high - low) or 1.0))] for mean in means)


def draw_learning_curve(records: Records, path: str | Path, *, title: str = "") -> Path:
    """Draw one run's lines of `metrics.jsonl` into a PNG file: reward, held-out accuracy with 95 % intervals, length of
    completions, KL; what was not recorded is left out.

    Raises `RunFolderError`: the file cannot be written.
    """
    figure, axes = _figure(records, title)
    for axis, name in axes:
        points = series(records, name)
        if name == "eval/accuracy":
            _draw_accuracy(axis, records, points)
            continue
        if name == "completions/mean_length":
            _draw_length_range(axis, records)
        marker = "o" if len(points) == 1 else ""
        axis.plot(*_columns(points), color=_GREY, linewidth=0.8, marker=marker, markersize=3, label="each step")
        label = f"mean of {2 * smoothing_half_width(points) + 1} steps"
        axis.plot(*_columns(smooth(points)), color=_BLUE, linewidth=1.8, label=label)
        if name == "reward":
            axis.legend(frameon=False, fontsize=8, loc="best")
    return _save(figure, path)


def draw_run(folder: RunFolder | str | Path) -> Path:
    """Draw a run's `learning_curve.png` and return its path; `RunFolderError`: no run, or not readable or writable."""
    run = folder if isinstance(folder, RunFolder) else RunFolder.read(folder)
    return draw_learning_curve(run.read_metrics(), run.curve_path, title=run.path.name)


def mean_and_range(seeds: Sequence[Points]) -> list[tuple[int, float, float, float]]:
    """(step, mean, lowest, highest) over seeds, at the steps that every seed has."""
    tables = [dict(points) for points in seeds if points]
    if not tables:
        return []
    shared = sorted(set(tables[0]).intersection(*tables[1:]))
    every = ((step, [table[step] for table in tables]) for step in shared)
    return [(step, sum(values) / len(values), min(values), max(values)) for step, values in every]


def draw_comparison(runs: Mapping[str, Sequence[Records]], path: str | Path, *, title: str = "") -> Path:
    """Draw several runs into one PNG file: for each label the mean over its seeds (one list of `metrics.jsonl` lines
    each), with a band from lowest to highest, both of the values as they were logged.

    A training metric of a single run is drawn thin as it was logged, and smoothed, as its label says; evaluations are
    not smoothed.

    Raises `RunFolderError`: the file cannot be written.
    """
    figure, axes = _figure([record for seeds in runs.values() for records in seeds for record in records], title)
    for position, (axis, name) in enumerate(axes):
        for number, (label, seeds) in enumerate(runs.items()):
            lines = [series(records, name) for records in seeds]
            rows = mean_and_range(lines)
            if not rows:
                continue
            colour = _COLOURS[number % len(_COLOURS)]
            steps, means, lows, highs = _columns(rows)
            if len(seeds) > 1:
                label = f"{label} (mean of {len(seeds)} seeds, band: lowest to highest)"
            elif not name.startswith("eval/") and len(rows) > 2:
                axis.plot(steps, means, color=colour, linewidth=0.6, alpha=0.4)
                label = f"{label} (thick: mean of {2 * smoothing_half_width(lines[0]) + 1} steps)"
                means = tuple(value for _, value in smooth(lines[0]))
            marker = "o" if name.startswith("eval/") or len(rows) == 1 else ""
            dashes = ("-", "--", ":")[number // len(_COLOURS) % 3]
            axis.plot(steps, means, dashes, color=colour, linewidth=1.8, marker=marker, markersize=4, label=label)
            axis.fill_between(steps, lows, highs, color=colour, alpha=0.18, linewidth=0)
        if name == "eval/accuracy":
            axis.set_ylim(bottom=0)
        if position == 0 and axis.get_legend_handles_labels()[0]:
            # Underscores hide a legend entry, dollars start a formula: labels are the user's text.
            named = axis.get_legend_handles_labels()
            legend = figure.legend(*named, loc="outside lower center", frameon=False, fontsize=8)
            for text in legend.get_texts():
                text.set_parse_math(False)
    return _save(figure, path)


def _columns(rows: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    return list(zip(*rows, strict=True))


def _figure(records: Records, title: str) -> tuple[Any, list[tuple[Any, str]]]:
    """A picture with a panel for each metric that was recorded; the panels' axes, each with its metric."""
    from matplotlib.figure import Figure

    shown = [panel for panel in _PANELS if series(records, panel[0])] or [("", "No steps recorded yet", "")]
    columns = min(2, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(5.2 * columns, 3.1 * rows + 0.3), dpi=120, layout="constrained")
    if title:
        figure.suptitle(title, fontsize=12, color=_INK, parse_math=False)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    axes = []
    for axis, (name, heading, unit) in zip(grid, shown, strict=False):
        axis.set_title(heading, fontsize=10, loc="left", color=_INK)
        axis.set_xlabel("step", fontsize=8, color=_INK)
        axis.set_ylabel(unit, fontsize=8, color=_INK)
        axis.tick_params(labelsize=8, colors=_INK)
        axis.grid(True, color="#e6e8eb", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.xaxis.get_major_locator().set_params(integer=True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        if name:
            axes.append((axis, name))
    for axis in grid[len(shown) :]:
        axis.set_visible(False)
    return figure, axes


def _draw_accuracy(axis: Any, records: Records, points: Points) -> None:
    lows, highs = dict(series(records, "eval/accuracy_low")), dict(series(records, "eval/accuracy_high"))
    steps, values = zip(*points, strict=True)
    below = [max(0.0, value - lows.get(step, value)) for step, value in points]
    above = [max(0.0, highs.get(step, value) - value) for step, value in points]
    bars = {"yerr": [below, above], "capsize": 3, "elinewidth": 1}
    axis.errorbar(steps, values, **bars, color=_BLUE, linewidth=1.8, marker="o", markersize=4)
    top = max(value + error for value, error in zip(values, above, strict=True))
    axis.set_ylim(0, min(1.05, top + 0.12))
    axis.margins(x=0.12)
    for index, word in ((0, "before"), (-1, "after")):
        if index == 0 or len(points) > 1:
            place, where = (steps[index], values[index] + above[index]), {"xytext": (0, 5), "ha": "center"}
            text = f"{word} {values[index]:.1%}"
            axis.annotate(text, place, textcoords="offset points", fontsize=8, color=_INK, **where)
    if lows and highs:
        axis.set_title("Held-out accuracy, 95 % interval", fontsize=10, loc="left", color=_INK)


def _draw_length_range(axis: Any, records: Records) -> None:
    lows, highs = (dict(series(records, f"completions/{end}_length")) for end in ("min", "max"))
    if steps := sorted(set(lows) & set(highs)):
        ends = [lows[step] for step in steps], [highs[step] for step in steps]
        axis.fill_between(steps, *ends, color=_BLUE, alpha=0.12, linewidth=0)
        axis.set_title("Completion length (mean, band: shortest to longest)", fontsize=10, loc="left", color=_INK)


def _save(figure: Any, path: str | Path) -> Path:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")  # a Figure made without pyplot draws itself with Agg
    write_atomically(Path(path), buffer.getvalue())
    return Path(path)
