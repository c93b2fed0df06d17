r"""Find the final answer in text that nobody vouches for.

Everything here is linear in the text (no pattern can backtrack over it twice), reads ASCII digits only, never
evaluates exponents, and refuses numbers of more than `MAX_NUMBER_LENGTH` characters: a megabyte of digits is
not an answer. What cannot be read is None, i.e. a wrong answer, never an exception.

Limits: an answer is looked for in the last `MAX_TAIL` characters; a comma between digit groups of three is a thousands
separator; fractions are read where they are the whole answer (`1/2`, `\frac{1}{2}`), not within running text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from numbers import Integral
from typing import Any, Literal

from pydantic_core import from_json

from covey.types import Message

Marker = Literal["####", "boxed", "answer", "="]
"""Where a final answer may stand: after `####`, in `\\boxed{}`, after `answer is` or `answer:`, after `=`."""

MAX_NUMBER_LENGTH = 64
MAX_JSON = 200_000
MAX_TAIL = 10_000
_MAX_BOXED = 256

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
_RATIO = re.compile(r"([-−+]?[0-9]+)\s*/\s*([0-9]+)|([-−+]?)\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")


def read_json(text: str) -> Any:
    """The value of a JSON text, in bounded time and depth.

    Raises:
        ValueError: it is no JSON (NaN, Infinity and half of a surrogate pair are none), has more than `MAX_JSON`
            characters or some hundred levels, or a number of thousands of digits.
    """
    if len(text) > MAX_JSON:
        raise ValueError(f"{len(text)} characters, more than the {MAX_JSON} that are read")
    return from_json(text.encode(), allow_inf_nan=False)


def completion_text(completion: str | list[Message]) -> str:
    """The text of a completion as reward functions receive it: a string, or the last of its messages."""
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


def parse_number(text: str) -> Fraction | None:
    r"""Read a text that is one number and nothing else, exactly: `-1,234.5`, `$18`, `18.00`, `1/2`, `\frac{1}{2}`.

    Surrounding white space, a dollar sign, a percent sign and a full stop at the end do not count. Returns
    None for anything else.
    """
    text = text.strip()
    if not text or len(text) > MAX_NUMBER_LENGTH:
        return None
    if ratio := _RATIO.fullmatch(text):
        whole = ratio[1] if ratio[1] else ratio[3] + ratio[4]
        below = int(ratio[2] or ratio[5])
        return Fraction(int(whole.replace("−", "-")), below) if below else None
    if not _WHOLE.fullmatch(text) or not any(character.isdigit() for character in text):
        return None
    plain = text.rstrip("%.").replace("−", "-").replace("$", "").replace(",", "")
    return Fraction(plain)


def as_number(value: Any) -> Fraction | None:
    """A reference answer from a dataset (int, float, or text) as an exact number, None if it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, Integral):  # NumPy's integers too
        return Fraction(int(value))
    try:
        # Through the shortest decimal that names the float: 0.1 is one tenth here, as in "0.1".
        return Fraction(repr(float(value))) if not isinstance(value, str) else parse_number(value)
    except (TypeError, ValueError, OverflowError):
        return None


def last_number(text: str) -> Fraction | None:
    """The last number in the text, None if there is none (or if it is absurdly long)."""
    cut = len(text) > MAX_TAIL
    tail = text[-MAX_TAIL:]
    found = None
    for found in _NUMBER_IN_TEXT.finditer(tail):  # noqa: B007 - the last match is what we want
        pass
    if found is None or (cut and found.start() == 0):  # may be the end of a longer number
        return None
    return parse_number(found.group())


def boxed_content(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, braces balanced; None if there is none that ends soon."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for position, character in enumerate(text[start : start + _MAX_BOXED], start):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:position]
    return None


def final_number(text: str, markers: Iterable[Marker] = ("####", "boxed", "answer")) -> Fraction | None:
    r"""The number that a text offers as its final answer.

    The first marker in `markers` that is followed by a number decides, at its last place in the text; without
    any, the last number in the text.

    Args:
        text: a completion.
        markers: `"####"` (GSM8K's), `"boxed"` (`\boxed{7}`), `"answer"` ("the answer is 7", "Answer: 7"), `"="`.

    Returns:
        The exact number, or None where there is none.
    """
    tail = text[-MAX_TAIL:]
    for marker in markers:
        number = _after_marker(tail, marker)
        if number is not None:
            return number
    return last_number(text)


def _after_marker(tail: str, marker: Marker) -> Fraction | None:
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
    last = None
    for last in pattern.finditer(tail):  # noqa: B007 - the last match is what we want
        pass
    return parse_number(last[1]) if last else None
