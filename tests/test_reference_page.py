"""docs/reference.md: every setting, command and metric, from the code; COVEY_WRITE_DOCS=1 writes it anew."""

import html
import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import typer

from covey.cli.app import app
from covey.config.names import SECTIONS
from covey.config.text import FieldHelp, explain, type_text
from covey.config.training import PhaseConfig
from covey.metric_names import METRICS

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"


def plain(text: str) -> str:
    """Text for a cell: a bar, a star or a tag in it is none of Markdown's; names of settings and the like are code."""
    text = " ".join(text.split()).replace("|", "\\|")
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else p.replace("<", "&lt;").replace("*", "\\*") for p in parts)


def code(text: str) -> str:
    """As code; a bar would end the cell on GitHub, and a backslash before it stands on the site."""
    if "|" in text:
        return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"
    return f"`{text}`" if text else ""


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    rows = [list(head), *map(list, rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], ["-"] * len(rows[0]), *rows[1:]])


def settings() -> Iterator[str]:
    head = ("setting", "default", "meaning")
    for section, found in groupby(explain(), lambda line: line.section):
        yield f"### {section}"
        yield plain(SECTIONS[section].__doc__ or "")
        yield table(head, (setting(line) for line in found))
        if section == "schedule":
            yield "Fields of an entry of `phases`:"
            told = (
                (code(n), plain(f"{f.description} Type: {type_text(f)}.")) for n, f in PhaseConfig.model_fields.items()
            )
            yield table(("field", "meaning"), told)


def setting(line: FieldHelp) -> Iterator[str]:
    yield f'<a id="{line.section}.{line.name}"></a>{code(line.name)}'
    yield code(line.default)
    others = f" Other names: {', '.join(map(code, line.also))}." if line.also else ""
    yield plain(f"{line.meaning} Type: {line.type}.") + others


def commands() -> Iterator[str]:
    yield from of_group("covey", typer.main.get_command(app))


def of_group(path: str, group: Any) -> Iterator[str]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from of_group(f"{path} {name}", command)
            continue
        yield f"### {path} {name}"
        arguments = " ".join(written(p) for p in command.params if p.param_type_name == "argument")
        yield f"```sh\n{path} {name} [OPTIONS] {arguments}\n```"
        yield from map(paragraph, re.split(r"\n\s*\n", (command.help or "").strip()))
        rows = [parameter(p) for p in command.params if not p.hidden]
        yield table(("argument or option", "default", "meaning"), rows)


def paragraph(text: str) -> str:
    return f"```sh\n{text}\n```" if text.startswith("covey ") else plain(text)


def written(argument: Any) -> str:
    name = argument.metavar or argument.name.upper() + ("..." if argument.nargs == -1 else "")
    return name if argument.required or name.startswith("[") else f"[{name}]"


def parameter(param: Any) -> Iterator[str]:
    if param.param_type_name == "argument":
        yield code(written(param))
    else:
        yield ", ".join(code(f"{name}{value_of(param)}") for name in [*param.opts, *param.secondary_opts])
    default = None if callable(param.default) else getattr(param.default, "value", param.default)
    yield "required" if param.required else code("" if default in (None, False, (), []) else str(default))
    yield plain(param.help or "")


def value_of(option: Any) -> str:
    """` N` of an option that takes a whole number; nothing of a switch."""
    annotation = option.type_descriptor.annotation
    kind = (get_args(annotation) or [annotation])[0]
    if get_origin(annotation) is Literal:
        return " " + "|".join(get_args(annotation))
    kinds = {bool: "", int: " N", float: " X", Path: " PATH"}
    return f" {option.metavar}" if option.metavar else kinds.get(kind, " TEXT")


def metrics() -> Iterator[str]:
    rows = ((code(name), plain(m.unit), plain(m.meaning)) for name, m in METRICS.items())
    yield table(("metric", "unit", "meaning"), rows)


@pytest.mark.parametrize("part", [settings, commands, metrics], ids=lambda part: part.__name__)
def test_the_page_says_what_is_so(part: Callable[[], Iterator[str]]) -> None:
    if not PAGE.is_file():
        pytest.skip("not run from a source tree")
    begin, end = f"<!-- {part.__name__}: written by tests/test_reference_page.py -->\n", "<!-- end -->"
    before, found, rest = PAGE.read_text().partition(begin)
    assert found, f"docs/reference.md has no place for the {part.__name__}"
    wanted = "\n\n".join([before + begin.rstrip(), *part(), end + rest.partition(end)[2]])
    if os.environ.get("COVEY_WRITE_DOCS"):
        PAGE.write_text(wanted)
    assert PAGE.read_text() == wanted, "write it anew: COVEY_WRITE_DOCS=1 pytest tests/test_reference_page.py"
