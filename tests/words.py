"""`python tests/words.py FILE.md...`, part of `make lint`: names the sentences of these pages that are too long.

A line `::: covey.tasks` in a page stands for the docstrings that the site shows there.

Counted is running text. Tables, headings, code blocks and comments are left out; inline code is one word, and of a link
only its text counts. A list's items are paragraphs of their own.
"""

import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

MEAN = 18
"""Words a sentence, on average over a page: less than this."""
LONGEST = 35
SOURCE, load = ("src",), functools.cache(griffe.load)


def sentences(text: str) -> list[str]:
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    text, found = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL), []
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", text):
        lines = (line for line in paragraph.splitlines() if not line.lstrip().startswith(("|", "#", "![")))
        words = re.sub(r"\]\([^)]*\)", "]", " ".join(lines))
        words = re.sub(r"`[^`]*`", "CODE", words)
        found += [part for part in re.split(r"(?<=[.!?:])\s+(?=[A-Z`\[*(])", words) if re.search(r"\w", part)]
    return found


def docstrings(shown: Any) -> Iterator[str]:
    """The docstrings of a module, class or function and of its public members, as Markdown without code."""
    text = shown.docstring.value if shown.docstring else ""
    parts = re.split(r"\n\s*\n|\n(?= {4}\*{0,2}\w+: )", text)  # each argument is a paragraph
    yield from (part for part in parts if not re.match(r"(?! {4}\*{0,2}\w+: ) {4}", part))
    exported = {str(name) for name in getattr(shown, "exports", None) or ()}
    for name, member in shown.members.items() if shown.is_module or shown.is_class else ():
        if not name.startswith("_") and (name in exported if member.is_alias else not member.is_module):
            yield from docstrings(member)


def page(file: str) -> str:
    """The text of a page in Markdown."""
    text = Path(file).read_text()
    names = re.findall(r"^::: covey\.(\S+)", text, re.MULTILINE)
    package = load("covey", search_paths=SOURCE)
    return "\n\n".join([text, *(part for name in names for part in docstrings(package[name]))])


def length(sentence: str) -> int:
    return len(re.findall(r"\w[\w'-]*", sentence))


def problems(text: str) -> list[str]:
    """What has to be shortened in a page."""
    found = sentences(text)
    mean = sum(map(length, found)) / max(1, len(found))
    told = [f"{length(each)} words in a sentence, at most {LONGEST}: {each.strip()}" for each in found]
    told = [line for line, each in zip(told, found, strict=True) if length(each) > LONGEST]
    return told + ([f"{mean:.1f} words a sentence on average, less than {MEAN} is wanted"] if mean >= MEAN else [])


if __name__ == "__main__":
    told = [f"{name}: {problem}" for name in sys.argv[1:] for problem in problems(page(name))]
    sys.exit("\n".join(told) or 0)
