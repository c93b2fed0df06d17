"""Settings as text: TOML in and out, error messages, and the help of `covey config --explain`."""

from __future__ import annotations

import json
import math
import tomllib
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from covey.config.names import FIELDS, HINTS, MEANS, OPTIONS, SECTIONS, canonical_names, field_path, resolve
from covey.config.training import PhaseConfig
from covey.errors import ConfigError, shown

if TYPE_CHECKING:
    from rich.console import Console

_PLAIN = {int: "int", float: "float", str: "str", bool: "bool", types.NoneType: "none"}
_MOST = 10
"""Mistakes of a section that are named."""
_BOUNDS = ((Gt, "gt", ">"), (Ge, "ge", ">="), (Lt, "lt", "<"), (Le, "le", "<="))


# --- help


@dataclass(frozen=True, slots=True)
class FieldHelp:
    """One line of `covey config --explain`."""

    section: str
    name: str
    type: str
    default: str
    meaning: str
    also: tuple[str, ...] = ()
    """Other names that mean it, or a part of it."""


def explain(filter: str = "") -> list[FieldHelp]:
    """The settings by section: those with `filter` in their name, meaning, or another name that means them."""
    lines = []
    for section, model in SECTIONS.items():
        defaults = model()
        for name, field in model.model_fields.items():
            default = getattr(defaults, name)
            text = "none" if default is None else json.dumps(default)
            also = tuple(other for other, meant in MEANS.items() if meant == name)
            lines.append(FieldHelp(section, name, type_text(field), text, field.description or "", also))
    return [
        line
        for line in lines
        if filter.lower() in f"{line.section}.{line.name} {line.meaning} {line.type} {' '.join(line.also)}".lower()
        or HINTS.get(filter.lower(), "").partition(".")[0] == line.name
    ]


def render_explain(console: Console, filter: str | None = None) -> int:
    """Print those of `explain` as one table for each section."""
    from rich.markup import escape
    from rich.table import Table

    wanted = (filter or "").lower()
    by_section: dict[str, list[FieldHelp]] = defaultdict(list)
    for line in explain(wanted):
        by_section[line.section].append(line)
    for section, lines in by_section.items():
        table = Table(title=f"[{section}]".replace("[", r"\["), title_justify="left", title_style="bold", expand=True)
        table.add_column("setting", no_wrap=True)
        table.add_column("default", ratio=1, overflow="fold")
        table.add_column("meaning", ratio=4)
        for line in lines:
            meaning = f"{escape(line.meaning)} [dim]({escape(line.type)})[/dim]"
            if wanted and (said := [name for name in line.also if wanted in name]):
                meaning += f" [dim]{', '.join(said)}: {'means' if len(said) == 1 else 'mean'} this.[/dim]"
                meaning += escape("".join(f" {reading}." for name in said for reading in _readings(name)))
            table.add_row(line.name, escape(line.default), meaning)
        console.print(table)
    return sum(len(lines) for lines in by_section.values())


def _readings(name: str) -> Iterator[str]:
    """What the values of an option are read as; of a number's, an example."""
    for value in ((0.5,) if "threshold" in name else (True, False)) if name in OPTIONS else ():
        with suppress(ConfigError):
            told = [f"{field_path(n)}={_in_toml(v)}" for n, v in canonical_names({name: value}).items()]
            yield f"{name}={_in_toml(value)} is {', '.join(told)}"


def _in_toml(value: Any) -> str:
    return "none" if value is None else json.dumps(value)


def type_text(field: FieldInfo) -> str:
    """`float, > 0, <= 1` for a field declared so; the choices where there is a fixed set."""
    ranges = [
        f"{sign} {getattr(bound, attribute)}"
        for kind, attribute, sign in _BOUNDS
        for bound in field.metadata
        if isinstance(bound, kind)
    ]
    return ", ".join([_annotation_text(field.annotation), *ranges])


def _annotation_text(annotation: Any) -> str:
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(str(choice) for choice in arguments)
    if origin is Annotated:
        has_pattern = any(getattr(part, "pattern", None) or "pattern=" in repr(part) for part in arguments[1:])
        return "FILE.py:NAME" if has_pattern else _annotation_text(arguments[0])
    if origin in (Union, types.UnionType):
        return " | ".join(_annotation_text(argument) for argument in arguments)
    if origin is tuple:
        inner = _annotation_text(arguments[0])
        return f"list of ({inner})" if "|" in inner else f"list of {inner}"
    return "table"  # a dict, or a section-like model such as a phase


def _alternatives(annotation: Any) -> set[Any]:
    """The plain types and literal choices that an annotation allows."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return set(arguments)
    if origin is Annotated:
        return _alternatives(arguments[0])
    if origin in (Union, types.UnionType):
        return set().union(*(_alternatives(argument) for argument in arguments))
    return {origin or annotation}


# --- errors


def unusable(value: Any) -> str:
    """Why a value can be no setting whatever its field, since no file or system call takes it; "" for all others."""
    if isinstance(value, str):
        if len(value) > 100_000:
            return "is too long for a setting; use at most 100,000 characters"
        if "\0" in value:
            return "holds a NUL character, which no name or program takes; remove it"
        try:
            value.encode()
        except UnicodeEncodeError:
            return "is not valid Unicode (half a surrogate pair); write it again"
    if isinstance(value, float) and math.isfinite(value) and abs(value) > 1e30:
        return "is too large to compute with; use a smaller number"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "does not fit into 64 bits; use a number from -2**63 to 2**63 - 1"
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        if len(value) > 10_000:
            return f"has {len(value):,} entries; use at most 10,000"
        return next(filter(None, map(unusable, value)), "")
    return ""


def explain_error(section: str, error: ValidationError, given: Mapping[str, Any]) -> list[str]:
    """What is wrong with a section, one message for each setting: value, reason, fix."""
    by_place: dict[tuple[int | str, ...], list[ErrorDetails]] = defaultdict(list)
    for details in error.errors(include_url=False):
        if details["type"] == "default_factory_not_called":
            continue  # this default follows from another setting, which is the one at fault
        # Below a field come names of union members, which say nothing to a reader; phases and tables have keys.
        loc = details["loc"]
        table = len(loc) > 1 and type_text(SECTIONS[section].model_fields[str(loc[0])]).startswith("table")
        by_place[loc[: 3 if loc[:1] == ("phases",) else 1 + table]].append(details)
    found = [_explain_place(section, place, details, given) for place, details in list(by_place.items())[:_MOST]]
    more = len(by_place) - len(found)
    return [*found, f"{section}: {more} more mistakes of this kind"] if more else found


def _explain_key(path: str, key: Any, annotation: Any, details: ErrorDetails) -> str:
    """What is wrong with one key of a table."""
    of, *values = get_args(annotation)
    known = getattr(of, "model_fields", None)
    if len(details["loc"]) > 3:  # a table in it
        *places, name = map(str, details["loc"][1:])
        why = f"{details['msg']}; correct it"
        if details["type"] == "extra_forbidden":
            why = f"{name} is one for all; set {path}.{name}" if name in (known or ()) else "there is no such setting"
        return f"{path}.{'.'.join([*places, name])}={shown(details['input'])}: {why}"
    if details["type"] == "extra_forbidden" or details["loc"][-1] == "[key]":
        return f"{path}: has no {key!r}; choose {', '.join(known or get_args(of)) or 'a name that is text'}"
    wanted = type_text(known[key]) if known else _annotation_text(values[0])
    return f"{path}.{key}={shown(details['input'])}: must be {wanted}, and finite; correct it in the table"


def _explain_place(
    section: str, place: tuple[int | str, ...], details: Sequence[ErrorDetails], given: Mapping[str, Any]
) -> str:
    path = section + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    first = details[0]
    if first["type"] == "value_error" and len(place) != 1 and len(place) != 3:
        # Of a whole section or phase: the text begins with the values at fault.
        return f"{path}{': ' if place else '.'}{first['ctx']['error']}"
    fields = PhaseConfig.model_fields if len(place) == 3 else SECTIONS[section].model_fields
    if len(place) == 2 and place[0] != "phases":
        return _explain_key(f"{section}.{place[0]}", place[1], fields[str(place[0])].annotation, first)
    name = str(place[-1])
    if first["type"] == "extra_forbidden":
        close = get_close_matches(name, fields, n=1)
        return f"{path}: there is no such setting; " + (
            f"did you mean {close[0]}?" if close else f"a phase has {', '.join(fields)}"
        )
    value = first["input"] if len(place) > 1 else given.get(name)
    if first["type"] == "value_error":
        return f"{path}={shown(value)}: {first['ctx']['error']}"
    if len(place) == 2:
        return f"{path}={shown(value)}: a phase is a table of {', '.join(PhaseConfig.model_fields)}"
    return f"{path}={shown(value)}: {_requirement(path, fields[name], value)}"


def _requirement(path: str, field: FieldInfo, value: Any) -> str:
    meaning = (field.description or "").split(". ")[0].rstrip(".")
    if any(getattr(item, "pattern", None) for item in field.metadata):
        return f"must be one of {meaning}; set {path} to one of these"
    choices = [choice for choice in _alternatives(field.annotation) if isinstance(choice, str)]
    if choices:
        close = get_close_matches(str(value), choices, n=1)
        fix = f"did you mean {close[0]!r}?" if close else f"set {path} to one of these"
        return f"must be {type_text(field)}; {fix}"
    finite = "finite " if isinstance(value, float) and not math.isfinite(value) else ""
    return f"must be {finite}{type_text(field)} ({meaning}); set {path} to such a value"


# --- TOML


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """`["algorithm.beta=0.02"]` -> path -> value, the last of equal paths; `ConfigError`: no `=`, or unknown names."""
    settings: dict[str, Any] = {}
    problems = []
    for override in overrides:
        path, equals, text = override.partition("=")
        path = path.strip()
        if not equals or not path:
            problems.append(f"{override!r}: not an override; write section.name=value")
            continue
        try:
            settings[path] = parse_value(resolve(path), text.strip())
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return settings


def is_unset(name: str, value: Any) -> bool:
    """True for the word `none` where nothing may be set and it is no choice."""
    optional = name not in FIELDS or types.NoneType in _allowed(name)
    return optional and str(value).lower() in ("none", "null") and "none" not in _allowed(name)


def _allowed(name: str) -> set[Any]:
    return _alternatives(SECTIONS[FIELDS[name]].model_fields[name].annotation) if name in FIELDS else set()


def parse_value(name: str, text: str) -> Any:
    """Read the value of a field or TRL option: TOML, else plain text; `true` and `none` in any case."""
    allowed = _allowed(name)
    if is_unset(name, text):
        return None
    if text.lower() in ("true", "false"):
        text = text.lower()
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        with suppress(ValueError):
            return float(text) if float in allowed or name not in FIELDS else text  # .5 and 1.e-5 are no TOML
        return text
    value = parsed.get("value")
    plain = len(parsed) == 1 and isinstance(value, str | int | float | bool | list | dict)
    if not plain or (allowed and allowed <= {str, types.NoneType} and not isinstance(value, str)):
        return text  # a run called 7, or a date, is text all the same
    return value
