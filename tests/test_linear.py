"""Model output may be anything: every reader of it takes time in proportion to its length, or reads a bounded part."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from covey.algorithms.masks import has_choice_letter, is_repetitive
from covey.environments.actions import parse_action
from covey.recipes.arithmetic.arithmetic import read_answer
from covey.rewards.extract import boxed_content, final_number, last_number, parse_number
from covey.rewards.jail.programs import extract_code, same_output
from covey.rewards.text import has_tags, json_reward
from covey.tasks.usmle import extract_answer, extract_answer_literal
from covey.trl.toolchat import calls_in

ACTIONS = ["go", "go to the red door"]
UNIQUE = json_reward({"type": "array", "uniqueItems": True})
# fmt: off
READERS: dict[str, Callable[[str], Any]] = {
    "a choice, as printed": extract_answer_literal, "a USMLE answer": extract_answer,
    "whether there is a choice": has_choice_letter, "repetition": is_repetitive, "a final number": final_number,
    "the last number": last_number, "a number": parse_number, "a box": boxed_content, "a program": extract_code,
    "a number after =": lambda text: final_number(text, ("=", "answer", "boxed", "####")),
    "an answer to the bundled task": lambda text: read_answer(text, (3, 5)),
    "printed numbers": lambda text: same_output(text, text[:-1] + "0", 0.1),
    "tags": lambda text: has_tags(text, ("think", "answer")),
    "JSON": lambda text: UNIQUE([text]),
    "an action in tags": lambda text: parse_action(text, "tags", ACTIONS),
    "an action as a line": lambda text: parse_action(text, "text", ACTIONS),
    "an action as a call": lambda text: parse_action(text, "tool", ACTIONS),
    "an action as it is": lambda text: parse_action(text, "choice", ACTIONS),
    "calls of tools": lambda text: calls_in(text, (), ended=True, bare=True),
    "calls of tools in tags": lambda text: calls_in(f"<tool_call><function=f>{text}", (), ended=True, bare=True),
}
UNITS = [
    "a", "_", "a_", "*", "`", " ", "\n", "\t", "\x0c", "(", ")", " )", "  ) ", "[", "{", "}", ":", ": ", ". ", ",",
    "-", "−", "=", "%", "$", "@", "e", "0.", "1", "1,", "-1.", "1/2 ", "1 2\n", "B (", "A. ", "A or ", "A is the ",
    "so, ", "not ", "is ", "if :", "x=", "x = ", "def ", "f(", "from a.", "larger ", "answer ", "answer is ",
    "the best answer is ", "Therefore ", "option ", "####", "\\boxed{", "<think>", "</think>", "<action>",
    "</action>", "<tool_call>", "</tool_call>", '<tool_call>{"name": "f"}</tool_call>', "<function=f>", "<parameter=",
    "<parameter=a>", "</parameter>", "xA.", "```\n", "```python\n", "``` ", "~~~\n", "[[]],", '{"a":',
]
# fmt: on
SURROUNDINGS = (("", ""), ("A", " x"), ("```python\n", "a"), ("[", "1]"))
SIZE = 2_000
SLOW = ("a USMLE answer", "a number after =", "a final number", "an answer to the bundled task", "JSON")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in READERS])
def test_time_grows_no_faster_than_the_text(name: str) -> None:
    def seconds(unit: str, size: int) -> float:
        began = time.thread_time()
        for before, after in SURROUNDINGS:
            READERS[name](before + unit * (size // len(unit)) + after)
        return time.thread_time() - began

    for unit in UNITS:
        short, long = seconds(unit, SIZE), seconds(unit, 12 * SIZE)
        # a quadratic one takes 144 times as long; a pause of the machine does not come twice
        if long > 20 * short + 0.1:
            short, long = seconds(unit, SIZE), seconds(unit, 12 * SIZE)
        assert long <= 20 * short + 0.1, f"{name}: {unit!r} repeated: {short:.3f} s, 12 times as long: {long:.3f} s"
