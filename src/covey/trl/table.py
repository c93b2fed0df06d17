"""The table of `docs/coming-from-trl.md`: `python -m covey.trl.table` prints it."""

from __future__ import annotations

from typing import Any

from covey.config.names import FIELDS, SECTIONS
from covey.trl.fields import DEFAULTS, FORMER, MEANINGS, Kind

_WORDS: dict[Kind, str] = {
    "same": "same",
    "translated": "translated",
    "machinery": "no effect",
    "warned": "no effect, said",
    "refused": "refused",
}


def _shown(value: Any) -> str:
    return f"`{getattr(value, 'value', value)!r}`"


def _ours(name: str) -> str:
    """Covey's default of the field of the same name."""
    if name not in FIELDS:
        return ""
    field = SECTIONS[FIELDS[name]].model_fields[name]
    derived = field.default_factory not in (None, dict)
    return _shown("by loss_type" if derived else field.get_default(call_default_factory=True))


def table(former: bool = False) -> str:
    """A line of Markdown for each of TRL's fields, or of those that it had before, in alphabetical order."""
    meanings = FORMER if former else MEANINGS
    lines = ["| TRL's field | its default | here | becomes, or why not | Covey's default |", "| - | - | - | - | - |"]
    for name in sorted(meanings):
        meaning = meanings[name]
        text = f"`{meaning.text}`" if meaning.kind == "same" else meaning.text
        lines.append(f"| `{name}` | {_shown(DEFAULTS[name])} | {_WORDS[meaning.kind]} | {text} | {_ours(name)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table())
    print(table(former=True), end="")
