"""From what a model says to what it does."""

from __future__ import annotations

import pytest

from covey.environments import match_action, parse_action

ACTIONS = ("go", "go north", "go to the red door", "take key", "look")


@pytest.mark.parametrize(
    ("text", "format", "action"),
    [
        ("<action>go north</action>", "tags", "go north"),
        ("I think. <action>look</action> no: <ACTION> take key </ACTION>", "tags", "take key"),
        ("go north", "tags", None),
        ("<action></action>", "tags", None),
        ("<action>fly</action>", "tags", None),
        ("\n\n  Go North. \nbecause", "text", "go north"),
        ("I will take key now", "text", "take key"),
        ("I go to the red door", "text", "go to the red door"),
        ("take key or look", "text", None),  # two of them: no decision
        ("gonorth", "text", None),
        ("", "text", None),
        ("   \n ", "text", None),
        ('{"name": "act", "arguments": {"action": "look"}}', "tool", "look"),
        ('<tool_call>{"name": "go", "arguments": {"direction": "north"}}</tool_call>', "tool", "go north"),
        ('{"name": "act", "arguments": "{\\"action\\": \\"take key\\"}"}', "tool", "take key"),
        ('{"name": "look", "parameters": {}}', "tool", "look"),
        ('{"name": "look"', "tool", None),
        ('[{"name": "look", "arguments": {}}, {"name": "go", "arguments": {"to": "north"}}]', "tool", "go north"),
        ("[]", "tool", None),
        ("[1, 2]", "tool", None),
        ('{"arguments": 3}', "tool", None),
        ("[" * 100_000, "tool", None),
        ("go", "choice", "go"),
    ],
)
def test_formats(text: str, format: str, action: str | None) -> None:
    assert parse_action(text, format, ACTIONS) == action  # type: ignore[arg-type]


def test_without_a_list_anything_may_be_tried() -> None:
    assert parse_action("<action> open the box </action>", "tags") == "open the box"
    assert parse_action("x" * 1001, "text") is None


def test_the_longest_name_is_meant() -> None:
    assert match_action("go north!", ACTIONS) == "go north"
    assert match_action("GO", ACTIONS) == "go"
    assert match_action("going nowhere", ACTIONS) is None
    assert match_action("x", ()) is None
