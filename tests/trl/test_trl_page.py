"""docs/coming-from-trl.md: what becomes of TRL fields (`covey.trl.arguments`); COVEY_WRITE_DOCS=1 writes its lists."""

import os
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from covey.config.names import FIELDS, SECTIONS
from covey.trl.arguments import FORMER, MEANINGS, GRPOConfig, Meaning, defaults, meanings
from covey.trl.distilling import DistillationConfig, SDFTConfig, SDPOConfig

TAUGHT: list[tuple[Any, int]] = [(DistillationConfig, 150), (SDPOConfig, 176), (SDFTConfig, 158)]
PIPE = r"\|"  # in a table
PAGE = Path(__file__).parents[2] / "docs" / "coming-from-trl.md"


def shown(value: Any) -> str:
    return f"`{getattr(value, 'value', value)!r}`"


def ours(name: str) -> str:
    """Covey's default of the field of the same name."""
    if name not in FIELDS:
        return ""
    field = SECTIONS[FIELDS[name]].model_fields[name]
    derived = field.default_factory not in (None, dict)
    return shown("by loss_type" if derived else field.get_default(call_default_factory=True))


def of_kind(meanings: Mapping[str, Meaning], *kinds: str) -> list[tuple[str, Meaning]]:
    return sorted((name, meaning) for name, meaning in meanings.items() if meaning.kind in kinds)


def translated() -> Iterator[str]:
    yield "| TRL's field | its default | in Covey | Covey's default |\n| - | - | - | - |"
    for name, meaning in of_kind(MEANINGS, "same", "translated"):
        text = f"{meaning.text}.{name}" if meaning.kind == "same" else meaning.text
        yield f"| `{name}` | {shown(defaults(GRPOConfig)[name])} | {text} | {ours(name)} |"


def refused() -> Iterator[str]:
    yield "| TRL's field | instead |\n| - | - |"
    yield from (f"| `{name}` | {meaning.text} |" for name, meaning in of_kind(MEANINGS, "refused"))


def warned() -> Iterator[str]:
    yield "| TRL's field | why it has no effect |\n| - | - |"
    yield from (f"| `{name}` | {meaning.text} |" for name, meaning in of_kind(MEANINGS, "warned"))


def ignored() -> Iterator[str]:
    yield f"```text\n{textwrap.fill(' '.join(name for name, _ in of_kind(MEANINGS, 'machinery')), 118)}\n```"


def earlier() -> Iterator[str]:
    yield "| field | now |\n| - | - |"
    yield from (f"| `{name}` | {m.text} |" for name, m in sorted(FORMER.items()))


def taught() -> Iterator[str]:
    """Where they are not `GRPOConfig`'s."""
    yield "| config | TRL's field | its default | in Covey |\n| - | - | - | - |"
    said = {"refused": "refused: ", "warned": "no effect: ", "machinery": "ignored: "}
    for config, _ in TAUGHT:
        new = {name: m for name, m in meanings(config).items() if m is not meanings(GRPOConfig).get(name)}
        for name, m in sorted(new.items()):
            text = said.get(m.kind, "") + (f"{m.text}.{name}" if m.kind == "same" else m.text)
            cells = (config.__name__, f"`{name}`", shown(defaults(config)[name]), text)
            yield f"| {' | '.join(cell.replace('|', PIPE) for cell in cells)} |"


def test_every_field_has_a_meaning() -> None:
    """All 191 of TRL's, and those of earlier versions; the time limit of reward functions is Covey's own."""
    assert {field.name for field in fields(GRPOConfig)} == set(MEANINGS) | set(FORMER) | {"reward_timeout"}
    assert len(MEANINGS) == 191
    for config, count in TAUGHT:  # of TRL's
        assert len(meanings(config)) == len([field for field in fields(config) if field.init]) == count


@pytest.mark.parametrize(
    "part", [translated, refused, warned, ignored, earlier, taught], ids=lambda part: part.__name__
)
def test_the_page_says_what_is_so(part: Any) -> None:
    if not PAGE.is_file():
        pytest.skip("not run from a source tree")
    begin, end = f"<!-- {part.__name__}: written by tests/trl/test_trl_page.py -->\n", "<!-- end -->"
    before, found, rest = PAGE.read_text().partition(begin)
    assert found, f"docs/coming-from-trl.md has no place for the fields that are {part.__name__}"
    wanted = before + begin + "\n" + "\n".join(part()) + "\n\n" + end + rest.partition(end)[2]
    if os.environ.get("COVEY_WRITE_DOCS"):
        PAGE.write_text(wanted)
    assert PAGE.read_text() == wanted, "write it anew: COVEY_WRITE_DOCS=1 pytest tests/trl/test_trl_page.py"
