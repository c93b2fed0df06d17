"""Progress on the screen: a live bar on a terminal, one plain line every few steps elsewhere."""

from __future__ import annotations

import io
import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from covey.errors import several
from covey.observe.observers import BaseObserver, Metrics

_SHOWN = (("reward", "reward"), ("kl", "KL"), ("completions/mean_length", "length"))
"""Of the step; what was held out is shown with the step at which it was measured."""
_MOST_SKIPPED = 3  # steps without an update that are each told of


def visible(text: str, limit: int = 400) -> str:
    """Completions are untrusted: keep newlines, show other control characters as `?`, cut after `limit` characters.

    An escape sequence in a completion could otherwise rewrite the user's terminal.
    """
    kept = "".join(char if char.isprintable() or char == "\n" else "?" for char in text[: limit + 1])
    return kept if len(text) <= limit else kept[:limit] + " [...]"


def accept_any_text(stream: object) -> None:
    """Let a stream write `?` for what its encoding does not have (an ASCII console), in place of an error."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")


def say(console: Console, text: object, style: str | None = None) -> None:
    """Print a text as it is, in lines as long as they come."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_table(console: Console, table: Table) -> None:
    """Print a table of which a narrow screen cuts nothing off, and breaks words only where whole ones do not fit."""
    sizes = [[Measurement.get(console, console.options, x) for x in (c.header, *c.cells)] for c in table.columns]
    widths, most = ([max(getattr(size, end) for size in column) for column in sizes] for end in Measurement._fields)
    lines = len(widths) + 1
    table.padding = (0, int(sum(widths) + 2 * len(widths) + lines <= console.width))
    free = console.width - sum(widths) - 2 * len(widths) * table.padding[1] - lines
    whole = free >= 0
    for n in sorted(range(len(widths)), key=lambda n: most[n] - widths[n]):  # who lacks least is whole first
        more = max(min(free, most[n] - widths[n]), 0)
        widths[n], free = widths[n] + more, free - more
    for column, width in zip(table.columns, widths, strict=True):
        column.overflow, column.width = "fold", width if whole else None
    console.print(table)


def format_number(value: Any) -> str:
    """A number for people: 3 significant digits; `-` for None, NaN and what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "-"
    return f"{value:d}" if isinstance(value, int) else f"{value:#.3g}".rstrip(".")


def counted(settings: Mapping[str, Any], step: int) -> int:
    """A step of a run in optimiser steps, where those limit the run (as in `covey.trl`); else as it is."""
    most, algorithm = settings.get("schedule", {}).get("max_optimizer_steps"), settings.get("algorithm", {})
    each: int = algorithm.get("num_iterations", 1) * algorithm.get("num_minibatches", 1)
    return step if most is None else min(step * each, int(most))


@contextmanager
def progress_bar(console: Console, activity: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that `(done, total)` calls move; without a terminal nothing is shown."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(visible(activity, 60), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class ConsoleProgress(BaseObserver):
    """Shows reward and KL of the step, held-out accuracy with the step that it was measured at, and the time left."""

    def __init__(
        self,
        console: Console | None = None,
        *,
        logging_steps: int = 1,
        num_completions_to_print: int | None = None,
        live: bool | None = None,
    ) -> None:
        """Set up; nothing is shown before the run starts."""
        self._console = Console(stderr=True, emoji=False) if console is None else console
        self._every = max(1, logging_steps)
        self._num_completions = num_completions_to_print or 0
        self._live = self._console.is_terminal if live is None else live
        self._display: Any = None  # the one output of a notebook: what was said, and a line of what goes on
        self._lines, self._line, self._shown_at = deque[str](maxlen=100), "", 0.0
        self._held_out, self._skipped = "", 0
        self._counted = partial(counted, {})
        self._total: int | None = None
        self._started = time.monotonic()
        self._step_times: list[float] = []
        self._bar: Progress | None = None

    def on_run_start(self, config: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        """Say what runs and begin the bar. `info`: `total_steps`, `start_step`, `name`, `last_eval` (of a resume)."""
        self._counted = partial(counted, config)
        self._total, start = info.get("total_steps"), self._counted(int(info.get("start_step") or 0))
        total = self._total and self._counted(self._total)
        self._started = time.monotonic()
        name = visible(str(info.get("name") or "run"), 80)
        length = several(total, "step") if total else "no fixed number of steps"
        resumed = f", from step {start}" if start else ""
        self._say(f"{name}: {length}{resumed}")
        if info.get("last_eval"):
            self._note_held_out(info["last_eval"]["step"], info["last_eval"])
        if self._live:
            numbers = TextColumn("{task.fields[numbers]}", markup=False)
            activity = TextColumn("{task.fields[activity]}", style="dim", markup=False)
            progress = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), numbers, activity)
            self._bar = Progress(*progress, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console)
            begun: dict[str, Any] = {"total": total, "completed": start}
            self._task = self._bar.add_task("train", **begun, numbers="", activity="")
            self._bar.start()

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Move the bar, or print a line."""
        numbers = "  ".join(f"{label} {format_number(metrics[name])}" for name, label in _SHOWN if name in metrics)
        numbers += self._held_out
        self._step_times.append(float(metrics.get("step_time", 0.0)))
        if self._bar is not None:
            self._bar.update(self._task, completed=self._counted(step), numbers=numbers, activity="")
        elif self._console.is_jupyter or step % self._every == 0 or step == self._total:
            of_total = f"/{self._counted(self._total)}" if self._total else ""
            left = ""
            if self._total and self._step_times:  # evaluations are not counted
                left = f"  left {_duration(fmean(self._step_times) * max(0, self._total - step))}"
            self._line = f"step {self._counted(step)}{of_total}  {numbers}{left}"
            self._show(self._line) if self._console.is_jupyter else self._say(self._line)

    def on_eval(self, step: int, metrics: Metrics) -> None:
        """Print the accuracy with its interval."""
        self._note_held_out(step, metrics)
        low, high = metrics.get("eval/accuracy_low"), metrics.get("eval/accuracy_high")
        interval = "" if low is None or high is None else f" (95 %: {format_number(low)} to {format_number(high)})"
        kinds = [(name[14:], value) for name, value in metrics.items() if name.startswith("eval/accuracy/")]
        interval += "".join(f", {visible(kind, 40)} {format_number(value)}" for kind, value in kinds)
        about = (("eval/accuracy", "accuracy", interval), ("eval/reward", "reward", ""))
        values = [f"{label} {format_number(metrics[name])}{more}" for name, label, more in about if name in metrics]
        self._say(f"evaluation at step {self._counted(step)}: {', '.join(values) or 'done'}")

    def _note_held_out(self, step: int, metrics: Metrics) -> None:
        for name in ("eval/reward", "eval/accuracy"):  # the second, where there is one
            if name in metrics:
                what = "held-out" if name == "eval/accuracy" else "held-out reward"
                self._held_out = f"  {what} {format_number(metrics[name])} (step {self._counted(step)})"

    def on_completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if step % self._every:
            return
        for row in rows[: self._num_completions]:
            reward = format_number(row.get("reward", row.get("total_reward")))
            self._say(f"  reward {reward}: {visible(str(row.get('completion', '')))}")

    def on_progress(self, activity: str, done: int, total: int) -> None:
        """Show it beside the bar or the line of a notebook; elsewhere nothing is printed."""
        said = f"{activity} {done}/{total}" if done < total else ""
        if self._bar is not None:
            self._bar.update(self._task, activity=said)
        elif self._console.is_jupyter and time.monotonic() - self._shown_at > 0.5:
            self._show(f"{self._line}  {said}")

    def on_event(self, kind: str, message: str) -> None:
        if kind == "failed":  # the error itself is printed by whoever catches it
            message = message.rpartition("\n")[2]
        message = re.sub(r"\bstep (\d+)", lambda found: f"step {self._counted(int(found[1]))}", message)
        self._skipped += kind == "skipped"
        if kind != "skipped" or self._skipped <= _MOST_SKIPPED:
            self._say(f"{kind}: {visible(message, 2000)}")

    def on_run_end(self, status: str) -> None:
        """Stop the bar and say how it ended."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._lines.append(self._line)
        self._line = ""
        if self._skipped > _MOST_SKIPPED:
            self._say(f"skipped: {self._skipped} steps in all, see log.txt")
        self._say(f"{status} after {_duration(time.monotonic() - self._started)}")

    def _say(self, text: str) -> None:
        if self._console.is_jupyter:
            self._lines.append(text)
            return self._show(self._line)
        # A live bar belongs to its console, so printing there keeps the bar below the text.
        self._console.print(Text(text), soft_wrap=True)

    def _show(self, line: str) -> None:
        self._shown_at = time.monotonic()
        shown = {"text/plain": "\n".join([*self._lines, line]).strip()}
        if self._display is None:
            self._display = import_module("IPython.display").display(shown, raw=True, display_id=True)
        else:
            self._display.update(shown, raw=True)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
