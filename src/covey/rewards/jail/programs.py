"""The program in a completion, and whether what it gave is what was expected. Linear in the text, and runs nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

_LANGUAGE = re.compile(r"(?:```|~~~)[ \t]*([\w+-]*)")
_LONGEST_NUMBER = 400
_STARTS = re.compile(
    r"^(?:def |class |import |from \w[\w.]* import |@|async def |(?:if|for|while|with) [^\n]*:[ \t]*$|try:|#|"
    r"[A-Za-z_][\w.]* ?[-+*/]?= ?\S|"
    r"[A-Za-z_][\w.]*\([^\n]*\)[ \t]*$)",
    re.MULTILINE,
)


def extract_code(text: str) -> str:
    """The program in a completion: its last fenced Python block that is not empty, else its last fenced block, else the
    text from the first line on that looks like Python, else the text.
    """
    blocks = list(_fenced(text))
    python = [body for language, body in blocks if language in ("python", "py", "python3")]
    if python or blocks:
        return python[-1] if python else blocks[-1][1]
    start = _STARTS.search(text)
    return text[start.start() :] if start else text


def _fenced(text: str) -> Iterator[tuple[str, str]]:
    """(language, body) of each fenced block that is not empty, the last one to the text's end if nothing closes it.

    One pass over the lines.
    """
    language: str | None = None
    body: list[str] = []
    lines = text.split("\n") if "```" in text or "~~~" in text else []
    for line in (*(line + "\n" for line in lines[:-1]), *lines[-1:], "```"):
        bare = line.strip(" \t\r\n")
        if language is not None and bare in ("```", "~~~"):
            if any(part.strip() for part in body):
                yield language, "".join(body)
            language, body = None, []
        elif language is not None:
            body.append(line)
        elif found := _LANGUAGE.match(bare):
            language = found[1].lower()


def same_output(found: str, expected: str, tolerance: float = 0.0) -> bool:
    """Are two printed texts the same, white space at line ends and empty lines at the end aside?"""
    lines, wanted = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (found, expected))
    if lines == wanted:
        return True
    if tolerance <= 0 or len(lines) != len(wanted):
        return False
    return all(a == b or _close_lines(a.split(), b.split(), tolerance) for a, b in zip(lines, wanted, strict=True))


def same_value(found: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Are two plain values equal, floats within a tolerance and lists as good as tuples?"""
    if isinstance(expected, list | tuple):
        return (
            isinstance(found, list | tuple)
            and len(found) == len(expected)
            and all(same_value(a, b, tolerance) for a, b in zip(found, expected, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(same_value(found[key], value, tolerance) for key, value in expected.items())
        )
    if isinstance(expected, float) and isinstance(found, int | float):
        if math.isnan(expected):
            return math.isnan(found)
        return bool(found == expected or math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance))
    return bool(found == expected)


def _close_lines(a: list[str], b: list[str], tolerance: float) -> bool:
    return len(a) == len(b) and all(_close_words(x, y, tolerance) for x, y in zip(a, b, strict=True))


def _close_words(a: str, b: str, tolerance: float) -> bool:
    if a == b:
        return True
    if len(a) > _LONGEST_NUMBER:
        return False
    try:
        return math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=tolerance)
    except ValueError:
        return False
