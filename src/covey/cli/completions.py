"""`covey completions`: what a run sampled, in the terminal."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from covey.errors import ConfigError, DataError
from covey.observe.completions import (
    WHOLE,
    Found,
    Kind,
    Order,
    Table,
    Wanted,
    find,
    listed,
    messages,
    parts_and_others,
    whole_rows,
)
from covey.observe.console import format_number, visible
from covey.observe.records import Record
from covey.observe.run_folder import RunFolder, table_name

_SHOWN = 2_000
_PROMPT = 1_000
_NOTE = 300
_RANKED = 10
_WRAPPED = 50_000


def completions(
    run: Annotated[Path, typer.Argument(help="The folder of a run; it may be running, or copied from elsewhere.")],
    step: Annotated[
        str | None,
        typer.Option(help="Training steps: 12, 10:20, first, last or all. Default: the last; with a search all."),
    ] = None,
    evaluation: Annotated[
        str | None, typer.Option("--eval", help="Evaluations in place of steps, named by step in the same way.")
    ] = None,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest rewards first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Highest rewards first.")] = False,
    tied: Annotated[bool, typer.Option("--tied", help="Only groups whose rewards are all equal.")] = False,
    masked: Annotated[bool, typer.Option("--masked", help="Only those of which a mask took something.")] = False,
    truncated: Annotated[bool, typer.Option("--truncated", help="Only those that a limit ended.")] = False,
    right: Annotated[bool, typer.Option("--right", help="Only right ones.")] = False,
    wrong: Annotated[bool, typer.Option("--wrong", help="Only wrong ones.")] = False,
    search: Annotated[str, typer.Option(help="Only those with this text in prompt or completion, in any case.")] = "",
    prompt: Annotated[str, typer.Option(metavar="ID", help="Only of the prompt with this uid.")] = "",
    number: Annotated[
        int | None, typer.Option("-n", "--number", min=1, help="At most so many; with --worst and --best 10.")
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Do not cut texts.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each completion and line.")] = False,
) -> None:
    """Read what a run sampled: prompts, completions, rewards, advantages, masks, and what verifiers logged.

    On a terminal it opens in $PAGER (less); elsewhere it is a plain listing.
    """
    for pair, values in (("--worst, --best", (worst, best)), ("--right, --wrong", (right, wrong))):
        if all(values):
            raise ConfigError(f"{pair}: they exclude each other; give one of them")
    if step is not None and evaluation is not None:
        raise ConfigError("--step, --eval: a completion is of one of them; give one option")
    folder = RunFolder.read(run)
    tables = _tables(folder, step, evaluation, searching=bool(search or prompt))
    wanted = Wanted(search, prompt, tied or None, masked, truncated, True if right else False if wrong else None)
    order: Order = "worst" if worst else "best" if best else "stored"
    most = number if number is not None or order == "stored" else _RANKED
    found = find(tables, wanted, order, most)
    rows = whole_rows(found)
    first = next(rows, None)
    if first is None:
        where = f"{tables[0].kind} {tables[0].step}" if len(tables) == 1 else f"{len(tables)} tables"
        raise DataError(f"{run}: no such completion in {where}; use fewer filters, or --step all")
    with closing(rows):  # a reader who leaves early leaves no file open
        if as_json:
            with _may_leave():
                for each, row in chain([first], rows):
                    sys.stdout.write(json.dumps(_as_json(each, row)) + "\n")
            return
        with paged() as out:
            _show(out, chain([first], rows), WHOLE if whole else _SHOWN)


# ---------------------------------------------------------------------- which tables


def _tables(folder: RunFolder, step: str | None, evaluation: str | None, *, searching: bool) -> list[Table]:
    kind: Kind = "step" if evaluation is None else "eval"
    there = folder.completion_steps() if kind == "step" else folder.evaluation_steps()
    if not there:
        what = "completions of steps" if kind == "step" else "evaluations"
        other = folder.evaluation_steps() if kind == "step" else folder.completion_steps()
        fix = f"look at --{'eval' if kind == 'step' else 'step'} all" if other else "run.log_completions must be true"
        raise DataError(f"{folder.path} has no {what} yet; {fix}")
    spec = (step if kind == "step" else evaluation) or ("all" if searching else "last")
    return [
        Table(kind, number, folder.completions / table_name(number, kind))
        for number in chosen_steps(spec, there, f"--{kind}")
    ]


def chosen_steps(spec: str, there: list[int], option: str) -> list[int]:
    """Of the steps that have a table, those that `12`, `10:20`, `10:`, `first`, `last` or `all` names.

    Raises:
        ConfigError: it names none, or is none of these.
    """
    if spec in ("all", "first", "last"):
        return there if spec == "all" else [there[0 if spec == "first" else -1]]
    low, colon, high = spec.partition(":")
    ends = [text.strip() for text in ((low, high) if colon else (low, low))]
    if not all((text.isdecimal() and len(text) < 13) or (colon and not text) for text in ends):
        raise ConfigError(f"{option}={spec!r:.50}: no step; give a number, a range such as 10:20, first, last or all")
    first, last = int(ends[0] or 0), int(ends[1] or 10**13)
    chosen = [number for number in there if first <= number <= last]
    if not chosen:
        near = sorted(there, key=lambda number: min(abs(number - first), abs(number - last)))[:3]
        raise ConfigError(
            f"{option}={spec}: the run has no table of it; there are {len(there)}, from {there[0]} to {there[-1]}, the "
            f"nearest {' and '.join(str(number) for number in sorted(near))}"
        )
    return chosen


# ---------------------------------------------------------------------- showing


class _Paper(Console):
    """A console whose reader may leave early, which is no failure of the command."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


@contextmanager
def paged() -> Iterator[Console]:
    """A console that writes into the user's pager where there is a terminal and a pager, else to standard output.

    What is not read any more is not computed: a reader who leaves ends the block.
    """
    command = shlex.split(os.environ.get("PAGER") or "less")
    program = shutil.which(command[0]) if command else None
    if not (sys.stdout.isatty() and sys.stdin.isatty()) or program is None or os.environ.get("TERM") == "dumb":
        with _may_leave():
            yield _Paper()
        return
    # F: what fits on the screen needs no pager; R: colours; X: the text stays on the screen afterwards.
    environment = {"LESS": "FRX", **os.environ}
    size = shutil.get_terminal_size()
    pager = subprocess.Popen(
        [program, *command[1:]], stdin=subprocess.PIPE, env=environment, text=True, encoding="utf-8", errors="replace"
    )
    assert pager.stdin is not None
    try:
        with suppress(BrokenPipeError, KeyboardInterrupt):
            yield _Paper(file=pager.stdin, force_terminal=True, width=size.columns)
    finally:
        with suppress(BrokenPipeError):
            pager.stdin.close()
        while True:
            with suppress(KeyboardInterrupt):  # the pager's, which goes on as long as the user reads
                pager.wait()
                break


@contextmanager
def _may_leave() -> Iterator[None]:
    """Ends the block when the reader of standard output has gone, as in `covey completions RUN | head`."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more


def _show(out: Console, rows: Iterable[tuple[Found, Record]], characters: int) -> None:
    before: tuple[Table, Any] | None = None
    for found, row in rows:
        if before != (found.table, found.group.number):
            if before is not None:
                out.print()
            _show_group(out, found, row, characters)
            before = found.table, found.group.number
        _show_completion(out, found, row, characters)


def _show_group(out: Console, found: Found, row: Record, characters: int) -> None:
    group, name = found.group, "step" if found.table.kind == "step" else "evaluation at step"
    about = [f"{name} {found.table.step}", f"group {_name(group.number)}", f"prompt {_name(row.get('uid'))}"]
    kind = row.get("kind") or row.get("type")
    about += [_name(kind)] if kind else []
    line = Text("  ".join(about), style="bold")
    numbers = f"   {group.size} completion{'s' if group.size != 1 else ''}"
    if group.size > 1:
        numbers += f", reward {format_number(group.mean)} ± {format_number(group.std)}"
    line.append(numbers, style="not bold")
    if group.tied:
        line.append("   tied", style="yellow")
    out.print(line, soft_wrap=True)
    for message in messages(row.get("prompt"), characters):
        role = f"{_name(message['role'])}: " if message["role"] else ""
        _body(
            out,
            Text.assemble(
                (role, "cyan"),
                shown_text(message["content"], min(characters, _PROMPT) if characters == _SHOWN else characters),
            ),
        )


def _show_completion(out: Console, found: Found, row: Record, characters: int) -> None:
    line = Text(f"[{_name(row.get('sample', found.row))}]", style="bold")
    reward = row.get("reward")
    line.append(f" reward {format_number(reward)}", style="green" if (reward or 0) > 0 else "")
    parts, logged = parts_and_others(row)
    if parts:
        told = ", ".join(f"{_name(name)} {format_number(value)}" for name, value in parts.items())
        line.append(f" ({told})", style="not bold")
    if row.get("advantage") is not None:
        line.append(f"  advantage {_signed(row['advantage'])}", style="not bold")
    if row.get("logp") is not None:
        line.append(f"  log-probability {format_number(row['logp'])}", style="not bold")
    ended = row.get("finish_reason") or row.get("ended")
    line.append(f"  {_name(row.get('length'))} tokens", style="not bold")
    if row.get("turns") is not None:
        idle = f", {_name(row['no_actions'])} no action" if row.get("no_actions") else ""
        line.append(f" in {_name(row['turns'])} turns{idle}", style="not bold")
    cut = ended in ("length", "turns", "context", "failed")
    line.append(f", {_name(ended)}" if ended else "", style="yellow" if cut else "not bold")
    if isinstance(row.get("correct"), bool):
        line.append("  right" if row["correct"] else "  wrong", style="green" if row["correct"] else "red")
    if row.get("masked_by"):
        line.append(f"  masked by {_name(row['masked_by'])}", style="magenta")
    out.print(line, soft_wrap=True)
    text = shown_text(row.get("completion"), characters)
    _body(out, text if row.get("turns") is None else _conversation(text, row))
    if row.get("error"):
        _body(out, Text(f"error: {_name(row['error'], _NOTE)}", style="red"))
    for name, value in logged.items():
        told = format_number(value) if isinstance(value, float) else str(value)
        _body(out, Text(f"{_name(name)}: {_name(told, _NOTE)}", style="dim"))


def _conversation(text: Text, row: Record) -> Text:
    """An agent's episode: its words stand out, and behind them what each turn earned and the credit that it got.

    Where what the agent saw has lines like its own, no line is surely a turn, and the turns' numbers come at the end.
    """
    notes = [
        f"  [reward {_signed(reward)}{'' if credit is None else f', advantage {_signed(credit)}'}]"
        for reward, credit in zip_longest(
            *(listed(row.get(name))[:1000] for name in ("turn_rewards", "turn_advantages"))
        )
    ]
    lines = list(text.split("\n", allow_blank=True))
    spoken = [line for line in lines if line.plain.startswith("> ")]
    for line in spoken:
        line.stylize("bold")
    if len(spoken) == len(notes):
        for line, note in zip(spoken, notes, strict=True):
            line.append(note, style="green")
    else:
        lines += [Text(f"turn {number}:{note}", style="green") for number, note in enumerate(notes, start=1)]
    return Text("\n").join(lines)


def _body(out: Console, text: Text) -> None:
    """Indented, wrapped on a terminal; a plain listing keeps the lines as they are, as does a very long text."""
    if out.is_terminal and len(text) <= _WRAPPED:
        out.print(Padding(text, (0, 0, 0, 4), expand=False))
    else:
        for line in text.split("\n", allow_blank=True):
            out.print(Text("    ") + line, soft_wrap=True)


def _signed(value: Any) -> str:
    return format_number(value) if not isinstance(value, int | float) or value <= 0 else f"+{format_number(value)}"


def _name(value: Any, most: int = 100) -> str:
    """Untrusted text that stands in a line."""
    return visible(str(value if value is not None else "-"), most).replace("\n", " ")


def shown_text(value: Any, most: int) -> Text:
    """Untrusted text of several lines; tabs are kept as spaces."""
    text = str(value if value is not None else "")
    cut = text[:most].expandtabs(4)
    shown = Text(visible(cut, len(cut)))
    if len(text) > most:
        fix = "; --whole shows all" if most < WHOLE else ""
        shown.append(f" [... cut after {most} characters{fix}]", style="dim")
    return shown


def _as_json(found: Found, row: Record) -> Record:
    """A row as it is stored, with where it stands and its group's numbers."""
    group = found.group
    return {
        found.table.kind: found.table.step,
        "table_row": found.row,
        **row,
        "group_size": group.size,
        "group_mean": group.mean,
        "group_std": group.std,
        "group_tied": group.tied,
    }
