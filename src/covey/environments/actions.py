"""From what a model says to what it does.

| format | what counts as the action |
|---|---|
| `tags` | what stands between the last `<action>` and `</action>` |
| `text` | the first line that is not empty |
| `turn` | the whole completion |
| `call` | the last call, as `{"name": "go", "arguments": {"to": "north"}}` |
| `choice` | the whole completion: the sampler lets the model say nothing but an admissible action |

Where the admissible actions are known, case, white space, quotes and a full stop at the end make no difference, and a
text that names exactly one of them means that one. What is none of them is no action: it is told to the model, and may
cost `invalid_action_penalty`. Actions of `tags` and `text` have 1,000 characters at most.

Calls, of worlds and of tools, are read in the three forms of the usual chat templates:

<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>                           Qwen 2.5, 3, Hermes
<tool_call><function=add><parameter=a>1</parameter><parameter=b>2</parameter></function></tool_call>       Qwen 3.5
{"name": "add", "parameters": {"a": 1, "b": 2}}             Llama 3, as the whole turn, also in a code block

Either JSON may be a list of calls. `arguments` and `parameters` are the same, and may be null or a text of JSON. Within
tags they may be left out. Other keys are not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from covey.rewards.extract import read_json, unfenced
from covey.types import ActionFormat

OPEN = "<tool_call>"
UNREADABLE = "unknown"  # the name of a tool whose call cannot be read

_LONGEST = 1000  # such an action of more characters is none: worlds need not cope with a whole essay
_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?\Z", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>")


@dataclass(frozen=True, slots=True)
class Call:
    """What the model asks for; `problem` says why it cannot be carried out."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


def parse_action(text: str, format: ActionFormat = "text", actions: Sequence[str] | None = None) -> str | None:
    """The action in the text of a completion, or None if there is none.

    `format` is one of the table above; `actions` are the admissible ones, if the world lists them.
    """
    said = _READERS[format](text)
    if said is None or not said.strip() or (format in ("tags", "text") and len(said) > _LONGEST):
        return None
    return said.strip() if actions is None or format == "call" else match_action(said, actions)


def write_action(action: str, format: ActionFormat = "text") -> str:
    """A completion that stands for an action: what `parse_action` reads it back from."""
    return f"<action>{action}</action>" if format == "tags" else action


def match_action(said: str, actions: Sequence[str]) -> str | None:
    """The admissible action that equals a text, else the only one that the text contains; None = no such action."""
    wanted = _normal(said)
    for action in actions:
        if _normal(action) == wanted:
            return action
    named = [action for action in actions if re.search(rf"\b{re.escape(_normal(action))}\b", wanted)]
    # "go to the red door" also names "go"; the longer one is meant
    longest = [a for a in named if not any(a != b and _normal(a) in _normal(b) for b in named)]
    return longest[0] if len(longest) == 1 else None


def _normal(text: str) -> str:
    return " ".join(text.casefold().split()).strip("\"'`*. !>")


def _between_tags(text: str) -> str | None:
    """What stands before the last closing tag that has an opening one, from the nearest of these on. One pass."""
    found = start = None
    for mark in re.finditer(r"<(/?)action>", text, re.IGNORECASE):
        if not mark[1]:
            start = mark.end()
        elif start is not None:
            found, start = text[start : mark.start()], None
    return found


def _first_line(text: str) -> str | None:
    return next((line for line in text.splitlines() if line.strip()), None)


def _last_call(text: str) -> str | None:
    """What a world is given; None = there is no call, or the last one cannot be read."""
    match calls_in(text, (), ended=True, bare=True)[1]:
        case [*_, Call(name, arguments, "")]:
            return json.dumps({"name": name, "arguments": arguments})
    return None


def calls_in(text: str, schemas: Sequence[Mapping[str, Any]], *, ended: bool, bare: bool) -> tuple[str, list[Call]]:
    """The text without the calls that can be read, and all calls.

    What is not closed is a call if the turn has `ended`; JSON that is the whole turn if calls may stand `bare`.
    """
    calls: list[Call] = []

    def left(block: re.Match[str]) -> str:
        """What stays of it in the text."""
        if not (block[2] or ended):
            return block[0]
        function = _FUNCTION.match(block[1])
        try:
            each = () if function else _listed(block[1])
            found = [_tagged(function[1], function[2], schemas)] if function else list(map(read_call, each))
        except ValueError as error:
            found = [Call(UNREADABLE, problem=f"The tool call cannot be read, it is not JSON: {error}")]
        calls.extend(found)
        return block[0] if any(call.problem for call in found) else ""

    rest = _BLOCK.sub(left, text)
    if bare and not calls:
        with suppress(ValueError):
            each = _listed(unfenced(text))
            if all(isinstance(a, dict) and "name" in a and ("arguments" in a or "parameters" in a) for a in each):
                return "", list(map(read_call, each))
    return rest.strip() if calls else text, calls


def _listed(text: str) -> list[Any]:
    value = read_json(text, allow_inf_nan=True)
    return value if isinstance(value, list) and value else [value]


def read_call(function: Any) -> Call:
    """`{"name": ..., "arguments": {...}}`; arguments may be JSON of them, or be left out."""
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        return Call(UNREADABLE, problem='A tool call must look like {"name": "...", "arguments": {...}}.')
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str) and arguments:
        with suppress(ValueError):
            arguments = read_json(arguments, allow_inf_nan=True)
    if arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        return Call(name, problem=f"The arguments of {name} must be a JSON object.")
    try:
        json.dumps(arguments, allow_nan=False)
    except ValueError:
        return Call(name, problem=f"The arguments of {name} have a number that is not finite.")
    return Call(name, dict(arguments))


def _tagged(name: str, inside: str, schemas: Sequence[Mapping[str, Any]]) -> Call:
    """The second form: what the schema calls a string is text, all else is JSON where it can be read so."""
    functions = {schema["function"]["name"]: schema["function"] for schema in schemas}
    kinds = functions.get(name, {}).get("parameters", {}).get("properties", {})
    arguments: dict[str, Any] = {}
    end = 0  # a pattern for both tags would look for the second one from every first one on
    while (opened := _PARAMETER.search(inside, end)) and (end := inside.find("</parameter>", opened.end())) >= 0:
        key, value = opened[1], inside[opened.end() : end].removeprefix("\n").removesuffix("\n")
        arguments[key] = value
        if kinds.get(key, {}).get("type") != "string":
            with suppress(ValueError):
                arguments[key] = read_json(value)
    return read_call({"name": name, "arguments": arguments})


_READERS: dict[str, Callable[[str], str | None]]
_READERS = {"tags": _between_tags, "text": _first_line, "turn": str, "call": _last_call, "choice": str}
