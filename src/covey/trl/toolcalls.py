"""Calls in what a model wrote, in the three forms of the usual chat templates:

<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>                           Qwen 2.5, 3, Hermes
<tool_call><function=add><parameter=a>1</parameter><parameter=b>2</parameter></function></tool_call>       Qwen 3.5
{"name": "add", "parameters": {"a": 1, "b": 2}}                                         Llama 3, as the whole turn
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from covey.rewards.extract import read_json
from covey.trl.tools import Call

OPEN = "<tool_call>"
UNREADABLE = "unknown"
"""The name of a tool whose call cannot be read."""

_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?\Z", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>")


def calls_in(text: str, schemas: Sequence[Mapping[str, Any]], *, ended: bool, bare: bool) -> tuple[str, list[Call]]:
    """The text without the calls that can be read, and all calls."""
    calls: list[Call] = []
    rest: list[str] = []
    read = 0
    for block in _BLOCK.finditer(text):
        if not (block[2] or ended):
            break
        function = _FUNCTION.match(block[1])
        try:
            call = _tagged(function[1], function[2], schemas) if function else read_call(read_json(block[1]))
        except ValueError as error:
            call = Call(UNREADABLE, problem=f"The tool call cannot be read, it is no JSON: {error}")
        calls.append(call)
        if not call.problem:
            rest.append(text[read : block.start()])
            read = block.end()
    if bare and not calls:
        with suppress(ValueError):
            found = read_json(text)
            if isinstance(found, dict) and "parameters" in found:
                return "", [read_call({"name": found.get("name"), "arguments": found["parameters"]})]
    return "".join([*rest, text[read:]]).strip() if calls else text, calls


def read_call(function: Any) -> Call:
    """`{"name": ..., "arguments": {...}}`; arguments may be JSON of them, or be left out."""
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        return Call(UNREADABLE, problem='A tool call must look like {"name": "...", "arguments": {...}}.')
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        with suppress(ValueError):
            arguments = read_json(arguments)
    if arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        return Call(name, problem=f"The arguments of {name} must be a JSON object.")
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
    return Call(name, arguments)
