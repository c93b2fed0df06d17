"""From what a model says to what it does.

| format | what counts as the action |
|---|---|
| `tags` | what stands between the last `<action>` and `</action>` |
| `text` | the first line that is not empty |
| `turn` | the whole completion |
| `call` | a call in JSON, `{"name": "go", "arguments": {"to": "north"}}`, also in a ```json block |
| `choice` | the whole completion: the sampler lets the model say nothing but an admissible action |

Where the admissible actions are known, case, white space, quotes and a full stop at the end make no difference, and a
text that names exactly one of them means that one. What is none of them is no action: it is told to the model, and may
cost `invalid_action_penalty`. Actions of `tags` and `text` have 1,000 characters at most.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from covey.rewards.extract import read_json, unfenced
from covey.types import ActionFormat

_LONGEST = 1000  # such an action of more characters is none: worlds need not cope with a whole essay


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


def _between_tags(text: str, tag: str = "action") -> str | None:
    """What stands before the last closing tag that has an opening one, from the nearest of these on. One pass."""
    found = start = None
    for mark in re.finditer(rf"<(/?){tag}>", text, re.IGNORECASE):
        if not mark[1]:
            start = mark.end()
        elif start is not None:
            found, start = text[start : mark.start()], None
    return found


def _first_line(text: str) -> str | None:
    return next((line for line in text.splitlines() if line.strip()), None)


def _call(text: str) -> str | None:
    """The call in a text, the last one of several, as `{"name": ..., "arguments": {...}}`; None = there is none."""
    tagged = _between_tags(text, "tool_call")
    try:
        call = read_json(unfenced(text) if tagged is None else tagged)
        if isinstance(call, list):  # some models list their calls; one is done at a time
            call = call[-1] if call else {}
        name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):  # some models quote them
            arguments = read_json(arguments)
    except (ValueError, AttributeError, TypeError, KeyError):
        return None
    good = isinstance(name, str) and isinstance(arguments, dict)
    return json.dumps({"name": name, "arguments": arguments}) if good else None


_READERS: dict[str, Callable[[str], str | None]]
_READERS = {"tags": _between_tags, "text": _first_line, "turn": str, "call": _call, "choice": str}
