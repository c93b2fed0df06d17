"""What `log_completions` shows: a generation's completions as a table, on the screen and at trackers that are on."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

from covey.observe.completions import messages
from covey.observe.console import accept_any_text

Row = Mapping[str, Any]

_SHOWN_ELSEWHERE = (
    *("group", "sample", "uid", "reward", "length", "finish_reason", "policy_version", "masked_by", "row", "logp"),
    *("group_mean", "group_std", "group_tied", "turn_rewards", "turn_advantages"),
)
_PLACED = ("prompt", "completion", "advantage")


def columns(rows: Sequence[Row], step: int, *, unique_prompts: bool = False) -> dict[str, list[Any]]:
    """TRL's columns of a generation: step, prompt, completion, each reward, what rewards logged, advantage."""
    if unique_prompts:
        rows = list({row["prompt"]: row for row in reversed(rows)}.values())[::-1]
    names = [name for name in (rows[0] if rows else {}) if name not in (*_SHOWN_ELSEWHERE, *_PLACED)]
    found = {name.removeprefix("rewards/"): [row.get(name) for row in rows] for name in names}
    texts = {name: [str(row.get(name, "")) for row in rows] for name in ("prompt", "completion")}
    return {"step": [step] * len(rows), **texts, **found, "advantage": [row.get("advantage") for row in rows]}


def show(table: Mapping[str, Sequence[Any]], number: int | None = None, console: Console | None = None) -> None:
    """Print a table."""
    names = [name for name in table if name != "step"]
    rows = list(zip(*(table[name] for name in names), strict=True))
    if number is not None and number < len(rows):
        rows = [rows[at] for at in sorted(random.Random(0).sample(range(len(rows)), max(number, 0)))]
    shown = Table(title=f"Step {table['step'][0]}" if table["step"] else None, show_lines=True, expand=True)
    for name in names:
        shown.add_column(name, overflow="fold")
    for row in rows:
        shown.add_row(*(Text(_cell(value)) for value in row))
    accept_any_text(sys.stdout)
    (console or Console()).print(shown)


def _cell(value: Any) -> str:
    said = messages(f"{value:.2f}" if isinstance(value, float) else str(value), 1_000_000)
    return "\n".join(f"{each['role'].upper()}\n{each['content']}".removeprefix("\n") for each in said)


def send(table: Mapping[str, Sequence[Any]], report_to: Sequence[str], callbacks: Sequence[Any]) -> None:
    """Send a table to wandb, trackio and TensorBoard, as far as they are on; under the name `completions`."""
    step = table["step"][0]
    rows = [list(row) for row in zip(*table.values(), strict=True)]
    wandb, trackio = sys.modules.get("wandb"), sys.modules.get("trackio")
    if "wandb" in report_to and wandb is not None and wandb.run is not None:
        wandb.log({"completions": wandb.Table(columns=list(table), data=rows)})
    if "trackio" in report_to and trackio is not None:
        import pandas  # type: ignore[import-untyped]  # trackio needs it itself

        trackio.log({"completions": trackio.Table(dataframe=pandas.DataFrame(dict(table)))})
    for writer in filter(None, (getattr(callback, "tb_writer", None) for callback in callbacks)):
        lines = [list(table), ["-"] * len(table), *rows]
        cells = [[str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in lines]
        writer.add_text("completions", "\n".join(f"| {' | '.join(line)} |" for line in cells), step)


class RichProgressCallback(TrainerCallback):
    """Prints each record of the log as a table; the bar beside it is the trainer's own."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        shown = Table(title=f"Step {state.global_step}/{state.max_steps}")
        shown.add_column("metric")
        shown.add_column("value", justify="right")
        for name, value in (logs or {}).items():
            shown.add_row(Text(name), Text(f"{value:.4g}" if isinstance(value, float) else str(value)))
        accept_any_text(sys.stdout)
        Console().print(shown)
