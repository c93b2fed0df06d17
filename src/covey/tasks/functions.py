"""Tiny Python functions to write, for models that cannot yet solve real problems: some hundred, each with tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from covey.tasks.dataset import Row


class _Family(NamedTuple):
    """Functions that differ by one value, `{n}` in the texts."""

    name: str
    argument: str
    description: str
    expression: str
    inputs: list[Any]
    values: Sequence[Any] = ("0",)


_NUMBERS = [0, 1, 5, -3, 12]
_NEAR = ["{n}", "{n} + 1", "{n} - 1", 0, 99]
_WORDS = ["hello", "Python", "abc", "a", "Level"]
_LISTS = [[3, 1, 2], [5], [4, -4, 0, 9], [7, 7, 2]]
_MANY, _FEW = list(range(2, 32)), list(range(1, 8))
_ENDINGS = ["!", "?", "s", "ed", "ing", ".txt", "y"]
_LETTERS = list("abehloty")

# fmt: off
_FAMILIES = [
    _Family("add", "x", "returns x plus {n}", "x + {n}", _NUMBERS, _MANY),
    _Family("subtract", "x", "returns x minus {n}", "x - {n}", _NUMBERS, _MANY),
    _Family("multiply", "x", "returns x times {n}", "x * {n}", _NUMBERS, _MANY),
    _Family("is_multiple", "x", "returns True if x is divisible by {n}, else False", "x % {n} == 0", _NEAR, _MANY),
    _Family("is_greater", "x", "returns True if x is greater than {n}, else False", "x > {n}", _NEAR, _MANY),
    _Family("remainder", "x", "returns the remainder of x divided by {n}", "x % {n}", [*_NEAR, 17], _MANY),
    _Family("larger", "x", "returns the larger of x and {n}", "max(x, {n})", _NEAR, _MANY),
    _Family("smaller", "x", "returns the smaller of x and {n}", "min(x, {n})", _NEAR, _MANY),
    _Family("repeat", "s", "returns the string s repeated {n} times", "s * {n}", _WORDS, _FEW),
    _Family("first", "s", "returns the first {n} characters of the string s", "s[:{n}]", _WORDS, _FEW),
    _Family("power", "x", "returns x to the power of {n}", "x ** {n}", [0, 1, 2, -3], _FEW),
    _Family("shift", "items", "returns a list with {n} added to each item of the list items", "[i + {n} for i in items]", _LISTS, _FEW),  # noqa: E501
    _Family("append_text", "s", 'returns the string s followed by "{n}"', "s + '{n}'", _WORDS, _ENDINGS),
    _Family("ends_with", "s", 'returns True if the string s ends with "{n}", else False', "s.endswith('{n}')", ["'a{n}'", "b", "'{n}'"], _ENDINGS),  # noqa: E501
    _Family("count_letter", "s", 'returns how often the letter "{n}" occurs in the string s', "s.count('{n}')", _WORDS, _LETTERS),  # noqa: E501
    _Family("has_letter", "s", 'returns True if the letter "{n}" is in the string s, else False', "'{n}' in s", _WORDS, _LETTERS),  # noqa: E501
    _Family("reverse", "s", "returns the string s reversed", "s[::-1]", _WORDS),
    _Family("upper", "s", "returns the string s in upper case", "s.upper()", _WORDS),
    _Family("lower", "s", "returns the string s in lower case", "s.lower()", _WORDS),
    _Family("length", "s", "returns the length of the string s", "len(s)", _WORDS),
    _Family("first_letter", "s", "returns the first character of the string s", "s[0]", _WORDS),
    _Family("last_letter", "s", "returns the last character of the string s", "s[-1]", _WORDS),
    _Family("total", "items", "returns the sum of the list items", "sum(items)", _LISTS),
    _Family("largest", "items", "returns the largest item of the list items", "max(items)", _LISTS),
    _Family("smallest", "items", "returns the smallest item of the list items", "min(items)", _LISTS),
    _Family("count", "items", "returns the number of items in the list items", "len(items)", _LISTS),
    _Family("ordered", "items", "returns the list items sorted in ascending order", "sorted(items)", _LISTS),
    _Family("last", "items", "returns the last item of the list items", "items[-1]", _LISTS),
    _Family("is_even", "x", "returns True if x is even, else False", "x % 2 == 0", [0, 1, 2, 7, 10]),
    _Family("is_odd", "x", "returns True if x is odd, else False", "x % 2 == 1", [0, 1, 2, 7, 10]),
    _Family("square", "x", "returns the square of x", "x * x", [0, 1, 5, -3]),
    _Family("negate", "x", "returns minus x", "-x", [0, 1, 5, -3]),
    _Family("absolute", "x", "returns the absolute value of x", "abs(x)", [0, 1, 5, -3]),
]
# fmt: on


def make_problems() -> list[Row]:
    """All of them, always the same: `{"prompt": ..., "tests": {...}, "solution": ..., "uid": ..., "family": ...}`."""
    rows = []
    for family in _FAMILIES:
        for value in family.values:
            expression = family.expression.replace("{n}", str(value))
            inputs = [_value(given, value) for given in family.inputs]
            cases = [[[given], eval(expression, {family.argument: given})] for given in inputs]
            signature = f"{family.name}({family.argument})"
            description = family.description.replace("{n}", str(value))
            rows.append(
                {
                    "prompt": f"Write a Python function {signature} that {description}.",
                    "tests": {"kind": "call", "entry_point": family.name, "cases": cases},
                    "solution": f"def {signature}:\n    return {expression}\n",
                    "uid": f"{family.name}-{value}",
                    "family": family.name,
                }
            )
    return rows


def _value(given: Any, value: Any) -> Any:
    return eval(given.replace("{n}", str(value))) if isinstance(given, str) and "{n}" in given else given
