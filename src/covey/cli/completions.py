"""Completions in the terminal: each group's prompt, then its answers with rewards, advantages and what was logged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.padding import Padding
from rich.text import Text

from covey.cli.weights import out
from covey.errors import several
from covey.observe.completions import WHOLE, messages, parts_and_others
from covey.observe.console import format_number, visible
from covey.observe.records import Record, differing
from covey.watch.tables import PLACE

_NOTE, _WRAPPED = 300, 50_000
"""Characters of what a verifier logged, and of a completion beyond which no line is wrapped."""


def show(rows: Sequence[Record], characters: int) -> None:
    """Print rows of a table, `characters` of each completion."""
    places = groupby(rows, lambda row: (row.get("step"), row.get("eval"), row.get("group")))
    groups = [list(found) for _, found in places]
    prompts = [messages(members[0].get("prompt"), WHOLE) for members in groups]
    last = differing([asked[-1]["content"] for asked in prompts])
    for number, (members, asked) in enumerate(zip(groups, prompts, strict=True)):
        if number:
            out.print()
        _show_group(members[0], [*asked[:-1], {**asked[-1], "content": last[number]}], characters)
        for row in members:
            _show_completion(row, characters)


def _show_group(row: Record, asked: list[Record], characters: int) -> None:
    where = f"step {row['step']}" if "step" in row else f"evaluation at step {row['eval']}"
    about = [where, f"group {in_line(row.get('group'))}", f"question {in_line(row.get('uid'))}"]
    kind = row.get("kind") or row.get("type")
    about += [in_line(kind)] if kind else []
    line = Text("  ".join(about), style="bold")
    numbers = f"   {several(row['group_size'], 'completion')}"
    if row["group_size"] > 1:
        numbers += f", reward {format_number(row['group_mean'])} ± {format_number(row['group_std'])}"
    line.append(numbers, style="not bold")
    if row["group_tied"]:
        line.append("   tied", style="yellow")
    out.print(line, soft_wrap=True)
    for message in asked:
        role = f"{in_line(message['role'])}: " if message["role"] else ""
        _body(Text.assemble((role, "cyan"), shown_text(message["content"], characters // 2)))


def _show_completion(row: Record, characters: int) -> None:
    line, reward = Text(f"[{in_line(row.get('sample', row['table_row']))}]", style="bold"), row.get("reward")
    line.append(f" reward {format_number(reward)}", style="green" if (reward or 0) > 0 else "")
    parts, logged = parts_and_others({name: row[name] for name in row if name not in (*PLACE, "group_size")})
    if parts:
        told = ", ".join(f"{in_line(name)} {format_number(value)}" for name, value in parts.items())
        line.append(f" ({told})", style="not bold")
    for name, told in (("advantage", "advantage"), ("logp", "log-probability")):
        if (value := row.get(name)) is not None:
            sign = "+" if name == "advantage" and isinstance(value, int | float) and value > 0 else ""
            line.append(f"  {told} {sign}{format_number(value)}", style="not bold")
    ended = row.get("finish_reason") or row.get("ended")
    line.append(f"  {in_line(row.get('length'))} tokens", style="not bold")
    if row.get("turns") is not None:
        idle = f", {in_line(row['no_actions'])} no action" if row.get("no_actions") else ""
        line.append(f" in {in_line(several(row['turns'], 'turn'))}{idle}", style="not bold")
    cut = ended in ("length", "turns", "context", "failed")
    line.append(f", {in_line(ended)}" if ended else "", style="yellow" if cut else "not bold")
    if isinstance(row.get("correct"), bool):
        line.append("  right" if row["correct"] else "  wrong", style="green" if row["correct"] else "red")
    if row.get("masked_by"):
        line.append(f"  masked by {in_line(row['masked_by'])}", style="magenta")
    out.print(line, soft_wrap=True)
    _body(shown_text(row.get("completion"), characters))
    if row.get("error"):
        _body(Text(f"error: {in_line(row['error'], _NOTE)}", style="red"))
    for name, value in logged.items():
        told = format_number(value) if isinstance(value, float) else str(value)
        _body(Text(f"{in_line(name)}: {in_line(told, _NOTE)}", style="dim"))


def _body(text: Text) -> None:
    """Indented, wrapped on a terminal; a plain listing keeps the lines as they are, as does a very long text."""
    if out.is_terminal and len(text) <= _WRAPPED:
        out.print(Padding(text, (0, 0, 0, 4), expand=False))
    else:
        for line in text.split("\n", allow_blank=True):
            out.print(Text("    ") + line, soft_wrap=True)


def in_line(value: Any, most: int = 100) -> str:
    """Untrusted text that stands in a line."""
    return visible(str(value if value is not None else "-"), most).replace("\n", " ")


def shown_text(value: Any, most: int) -> Text:
    """Untrusted text of several lines; tabs are kept as spaces."""
    text = str(value if value is not None else "")
    cut = text[:most].expandtabs(4)
    shown = Text(visible(cut, len(cut)))
    if len(text) > most:
        shown.append(f" [... cut after {most} characters; -o FILE.jsonl has all]", style="dim")
    return shown
