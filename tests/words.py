"""`python tests/words.py FILE.md...`, part of `make lint`: names the sentences of these pages that are too long.

Counted is running text. Tables, headings, code blocks and comments are left out; inline code is one word, and of a link
only its text counts. A list's items are paragraphs of their own.
"""

import re
import sys
from pathlib import Path

MEAN = 18
"""Words a sentence, on average over a page: less than this."""
LONGEST = 35


def sentences(text: str) -> list[str]:
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    text, found = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL), []
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", text):
        lines = (line for line in paragraph.splitlines() if not line.lstrip().startswith(("|", "#", "![")))
        words = re.sub(r"\]\([^)]*\)", "]", " ".join(lines))
        words = re.sub(r"`[^`]*`", "CODE", words)
        found += [part for part in re.split(r"(?<=[.!?:])\s+(?=[A-Z`\[*(])", words) if re.search(r"\w", part)]
    return found


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
    told = [f"{name}: {problem}" for name in sys.argv[1:] for problem in problems(Path(name).read_text())]
    sys.exit("\n".join(told) or 0)
