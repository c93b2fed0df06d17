r"""Find the final answer in text that nobody vouches for.

Everything here is linear in the text (no pattern can backtrack over it twice), reads ASCII digits only, never
evaluates exponents, and refuses numbers of more than `MAX_NUMBER_LENGTH` characters: a megabyte of digits is
not an answer. What cannot be read is None, i.e. a wrong answer, never an exception.

Limits: an answer is looked for in the last `MAX_TAIL` characters; a comma between digit groups of three is a thousands
separator; fractions are read where they are the whole answer (`1/2`, `\frac{1}{2}`), not within running text.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Rational
from typing import Any, Literal

import numpy as np
from pydantic_core import from_json

from covey.types import Message

Marker = Literal["####", "boxed", "answer", "="]
"""Where a final answer may stand: after `####`, in `\\boxed{}`, after `answer is` or `answer:`, after `=`."""

MAX_NUMBER_LENGTH = 64
MAX_JSON = 200_000
MAX_TAIL = 10_000
_MAX_DIGITS = 400  # of a reference; the largest float has 309
_OPENED = re.compile(r"(<[A-Za-z][\w-]*>)\s*\Z")

# A number in running text. A sign counts only where no operand precedes it ("10-3" ends in 3); "1e9" and "x2"
# are no numbers. The atomic group (?>...) keeps the match from giving digits back, so a rejected number is
# rejected as a whole.
_NUMBER = (
    r"(?<![A-Za-z0-9_])(?:(?<![)\]}])[-−](?=[$.0-9]))?\$?"
    r"(?>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?<![0-9.])(?=\.[0-9]))(?>\.[0-9]+)?(?![0-9_]|[eE][-+]?[0-9])"
)
_NUMBER_IN_TEXT = re.compile(_NUMBER)
# Up to a few decorating characters between a marker and its number: "**$18**", ": \(18".
_DECORATION = r"[\s*$:=(\\{\[`]{0,8}?"
# In "the answer is 5 + 3 = 8" the 5 is an operand, not the answer.
_RESULT = rf"{_DECORATION}({_NUMBER})(?!\s{{0,4}}[-−+*/×÷x^]\s{{0,4}}[0-9$(])"
_AFTER_MARKER = re.compile(_RESULT)
_AFTER_ANSWER = re.compile(rf"\banswers?(?:[^\n.0-9]{{0,60}}?(?:\b(?:is|are|was)\b|[:=]))?{_RESULT}", re.IGNORECASE)
_AFTER_EQUALS = re.compile(f"={_RESULT}")
_WHOLE = re.compile(r"[-−+]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?%?\.?")
_SCIENTIFIC = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]{1,4}")
_BRACES = re.compile(r"(\\(?:boxed|fbox)(?![A-Za-z])\s*\{?)|\\.|[{}]", re.DOTALL)  # an escaped brace is a character
_RATIO = re.compile(r"([-−+]?[0-9]+)\s*/\s*([0-9]+)|([-−+]?)\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")


def read_json(text: str, *, allow_inf_nan: bool = False) -> Any:
    """The value of a JSON text, in bounded time and depth; 1e999 is infinite.

    Raises `ValueError`: it is no JSON (NaN, Infinity and half of a surrogate pair are none), has more than `MAX_JSON`
    characters or some hundred levels, or a number of thousands of digits.
    """
    if len(text) > MAX_JSON:
        raise ValueError(f"{len(text)} characters, more than the {MAX_JSON} that are read")
    return from_json(text.encode(), allow_inf_nan=allow_inf_nan)


def unfenced(text: str) -> str:
    """What is inside of a text that is one code block of Markdown, of JSON or unnamed; other texts as they are."""
    block = re.fullmatch(r"\s*```(?:json)?(.*)```\s*", text, re.DOTALL | re.IGNORECASE)
    return block[1] if block else text


def completion_text(completion: str | list[Message]) -> str:
    """The text of a completion: the string itself, or the content of its last message."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else None
    return content if isinstance(content, str) else ""


def prompt_text(prompt: str | list[Message]) -> str:
    """The text of a prompt: the string itself, or the last user message of a conversation."""
    if isinstance(prompt, str):
        return prompt
    for message in reversed(prompt):
        if message.get("role") == "user" and isinstance(message.get("content"), str):
            return str(message["content"])
    return completion_text(prompt)


def opened_tags(columns: Mapping[str, Any]) -> list[str]:
    """The tag with which each prompt ends, such as `<think>`, or ""; from a reward's `prompt_ends`, else `prompts`."""
    ends = columns.get("prompt_ends") or map(completion_text, columns.get("prompts") or ())
    return [found[1] if (found := _OPENED.search(end[-100:])) else "" for end in ends]


def opened_texts(completions: Sequence[str | list[Message]], columns: Mapping[str, Any], tag: str = "") -> list[str]:
    """The texts of completions, with the tag (or any) before those whose prompt already opened it."""
    tags = opened_tags(columns) or [""] * len(completions)
    return [own * (own == (tag or own)) + completion_text(text) for text, own in zip(completions, tags, strict=True)]


def parse_number(text: str) -> Fraction | None:
    r"""Read a text that is one number and nothing else, exactly: `-1,234.5`, `$18`, `18.00`, `1/2`, `\frac{1}{2}`.

    Surrounding white space, a dollar sign, a percent sign and a full stop at the end are ignored. The result is None
    for any other text.
    """
    text = text.strip()
    if not text or len(text) > MAX_NUMBER_LENGTH:
        return None
    if ratio := _RATIO.fullmatch(text):
        whole, below = ratio[1] or ratio[3] + ratio[4], int(ratio[2] or ratio[5])
        return Fraction(int(whole.replace("−", "-")), below) if below else None
    if not _WHOLE.fullmatch(text) or not any(character.isdigit() for character in text):
        return None
    return Fraction(text.rstrip("%.").replace("−", "-").replace("$", "").replace(",", ""))


def number_text(value: Any) -> str | None:
    """A reference that is a number, in digits: 5e-05 and "5e-05" as "0.00005", 5.0 as "5", Fraction(1, 3) as "1/3".

    A float is the shortest decimal that names it: 0.1 is one tenth. None for other text, a bool, NaN, infinity, more
    than 400 digits and what is no number.
    """
    if isinstance(value, str) and _SCIENTIFIC.fullmatch(value.strip()):
        value = Decimal(value.strip())
    if isinstance(value, Rational | Integral) and not isinstance(value, bool):  # Integral: NumPy's integers
        parts = (int(value.numerator), int(value.denominator))
        return str(Fraction(*parts)) if max(map(abs, parts)) < 10**_MAX_DIGITS else None
    if isinstance(value, float | np.floating) and math.isfinite(value):
        return np.format_float_positional(value + 0, trim="-")  # -0.0 is 0
    if isinstance(value, Decimal) and value.is_finite() and abs(value.adjusted()) < _MAX_DIGITS:
        text = format(value, "f")
        return text.rstrip("0").rstrip(".") if "." in text else text
    return None


def as_number(value: Any) -> Fraction | None:
    """A reference from a dataset (a number, or text that is one) as an exact number; None if no text can equal it."""
    text = number_text(value) or value
    return parse_number(text) if isinstance(text, str) else None


def last_number(text: str) -> Fraction | None:
    """The last number in the text, None if there is none (or if it is absurdly long)."""
    return parse_number(last_number_text(text))


def last_number_text(text: str) -> str:
    """The last number as it is written, with `$` and commas; "" if there is none."""
    found = _last(_NUMBER_IN_TEXT, text[-MAX_TAIL:])
    if found is None or (len(text) > MAX_TAIL and found.start() == 0):  # may be the end of a longer number
        return ""
    return found.group()


def boxed_content(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` with balanced braces; None if there is none or it does not end."""
    found = boxes(text)
    return text[slice(*found[-1])] if found and found[-1][1] >= 0 else None


def boxes(text: str) -> list[tuple[int, int]]:
    r"""Where the content of each `\boxed{}` begins and ends, or -1; in order of the beginnings, in one pass."""
    found: list[tuple[int, int]] = []
    inside: list[int] = []  # for each open brace the place of its box in `found`, -1 for other braces
    for mark in _BRACES.finditer(text):
        if mark[1]:
            if mark[1].endswith("{"):
                inside.append(len(found))
            found.append((mark.end(), -1))
        elif mark[0] == "{":
            inside.append(-1)
        elif mark[0] == "}" and inside and (box := inside.pop()) >= 0:
            found[box] = (found[box][0], mark.start())
    return found


def final_number(text: str, markers: Iterable[Marker] = ("####", "boxed", "answer")) -> Fraction | None:
    r"""The number that a text offers as its final answer.

    This is the number after the last occurrence of the first marker in `markers` that is followed by a number. Without
    such a marker it is the last number in the text. None: there is no number, or the box cannot be read.

    Args:
        text: a completion.
        markers: `"####"` (GSM8K's), `"boxed"` (`\boxed{7}`), `"answer"` ("the answer is 7", "Answer: 7"), `"="`.
    """
    tail = text[-MAX_TAIL:]
    for marker in markers:
        number = after_marker(tail, marker)
        if number is not None or (marker == "boxed" and boxes(tail)):
            return number
    return last_number(text)


def after_marker(tail: str, marker: Marker) -> Fraction | None:
    """The number after the last `marker`; None: no marker, or no number after it."""
    if marker == "boxed":
        content = boxed_content(tail)
        if content is None:
            return None
        for latex, plain in (("{,}", ","), ("\\,", ""), ("\\!", "")):  # ways to typeset 1,080
            content = content.replace(latex, plain)
        number = parse_number(content)
        return last_number(content) if number is None else number
    if marker == "####":
        start = tail.rfind("####")
        found = _AFTER_MARKER.match(tail, start + 4) if start >= 0 else None
        return parse_number(found[1]) if found else None
    pattern = _AFTER_ANSWER if marker == "answer" else _AFTER_EQUALS
    last = _last(pattern, tail)
    return parse_number(last[1]) if last else None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)
