"""Every reader of what a model wrote has an answer for every text, a wrong one at worst, and in linear time."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest
from jinja2 import Environment
from transformers.utils.chat_parsing import parse_response

from covey.algorithms.masks import create_sampling_mask, has_choice_letter, is_repetitive
from covey.cli.completions import shown_text
from covey.environments.actions import UNREADABLE, Call, calls_in, parse_action, read_call
from covey.functions import load_function
from covey.observe.choices import Answered, choice_html, choice_report
from covey.observe.completions import messages
from covey.observe.console import visible
from covey.recipes.arithmetic.arithmetic import CHOICES, Arithmetic, read_answer
from covey.rewards import exact_match, extract, format_reward, json_reward, numeric_match, prompt_text, tags_reward
from covey.rewards.extract import MAX_JSON, completion_text, read_json
from covey.rewards.jail.programs import extract_code, same_output
from covey.rewards.judge import JudgeReward
from covey.rewards.maths import MathReward
from covey.rewards.option_letter import extract_choice
from covey.rewards.text import has_tags, json_text
from covey.rollout.calls import AsyncRunner
from covey.rollout.drawing import StopMatcher
from covey.rollout.toolchat import ToolChat
from covey.rollout.tools import Calls, Order
from covey.serving.requests import chat_prompt
from covey.tasks.gsm8k import GSM8K, is_correct_answer, reference_answer
from covey.tasks.usmle import USMLERewardModel, compute_reward, extract_answer, extract_answer_literal
from covey.training.tools import tool_schema
from covey.trl import rewards
from covey.watch.tables import _turns
from fakes import raises, slow

LEVELS = (1_000, 200_000)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
CLOSING = {"[": "]", "{": "}", "(": ")", "<think>": "</think>", "\\boxed{": "}", "$": "$", "\\frac{1}{": "}"}
TEXTS: dict[str, str] = {
    **{f"{level} x {opened}": opened * level for level in LEVELS for opened in (*CLOSING, '{"a":', '[{"a":', "<a>")},
    **{f"{level} x {a} and {b}": a * level + b * level for level in LEVELS for a, b in CLOSING.items()},
    "objects in objects": '{"a":' * 1_000 + "1" + "}" * 1_000,
    "a megabyte of one letter": "a" * 1_000_000,
    "a megabyte of spaces": " " * 1_000_000,
    "a megabyte of digits": "1" * 1_000_000,
    "empty": "",
    "half a pair": "\ud800",
    "half a pair within": 'answer: 4\udfff <think>\ud83d</think> {"name": "\ud800"} A',
    "NUL": "\x00",
    "NUL within": "the answer\x00 is 4\x00 \\boxed{\x004}",
    "control characters": "".join(map(chr, range(32))) + "\x7f\x85\u2028\u2029",
    "bidi": "\u202e4 si rewsna eht\u202c \u2066A\u2069",
    "BOM": '\ufeff{"name": "add", "arguments": {}}',
    "a BOM in the middle": '{"name": \ufeff"add"}',
    "a huge integer": "9" * 5_000,
    "a huge answer": "the answer is " + "9" * 5_000,
    "too large a float": "1e999",
    "an answer of digits that are no ASCII": "#### \u0663\u0664 \\boxed{\u00b2}",
    "regular expression's bomb": "(a+)+$ " + "a" * 5_000 + "!",
    "cut": '{"name": "add", "arguments": {"a": 1, "b',
    "quotes": '"' * 100_000,
    "backslashes": "\\" * 100_000,
    "empty lines": "\n" * 100_000,
    "opened parameters": "<tool_call><function=add>" + "<parameter=a>" * 100_000,
    "unnamed parameters": "<tool_call><function=add>" + "<parameter=" * 100_000,
    "100,000 calls": CALL * 100_000,
    "calls within calls": "<tool_call>" * 100_000,
}
VALUES = ("null", "[]", "3", '"x"', "true", "NaN", "-Infinity", "1e999", "9" * 5_000, '"\\ud800"', '{"a": 1, "a": 2}')
TEXTS |= {f"bare {value[:10]}": value for value in VALUES}
for number, value in enumerate((*VALUES, "[" * 1_000, "[" * 1_000 + "]" * 1_000, '{"a":' * 300 + "1" + "}" * 300)):
    TEXTS |= {
        f"arguments {number}": f'<tool_call>{{"name": "add", "arguments": {value}}}</tool_call>',
        f"quoted arguments {number}": f'{{"name": "add", "arguments": {json.dumps(value)}}}',
        f"parameters {number}": f'{{"name": "add", "parameters": {value}}}',
        f"a name {number}": f'<tool_call>{{"name": {value}, "arguments": {{}}}}</tool_call>',
        f"an action {number}": f'{{"name": "act", "arguments": {{"action": {value}}}}}',
        f"a parameter {number}": f"<tool_call><function=add><parameter=a>{value}</parameter></function></tool_call>",
        f"an answer {number}": f"<think>\n{value}\n</think>\nThe answer is \\boxed{{{value}}}.\n#### {value}",
        f"a block {number}": f"```json\n{value}\n```",
    }


def add(a: int) -> int:
    """Add one.

    Args:
        a: A number.
    """
    return a + 1


SCHEMAS = [tool_schema(add)]
PARSED = {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"}
CALLED = {"name": "{content.name}", "arguments": "{content.arguments}"}
HERMES = {
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {"close_pattern": r"(?=<tool_call>)|$", "content": "text"},
        "tool_calls": PARSED | {"transform": {"type": "function", "function": CALLED}},
    },
}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}"
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}"
    "{% endfor %}|{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


class Characters:
    """A tokenizer with a token for each character, and with transformers' own chat templates and response parsing."""

    special_tokens_map: Mapping[str, str] = MappingProxyType({})
    chat_template = TEMPLATE

    def __init__(self, response_template: Any = None) -> None:
        self.response_template = response_template

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        text.encode()  # as real ones, it takes no halves of pairs
        return {"input_ids": list(map(ord, text))}

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return "".join(map(chr, ids))

    def get_chat_template(self) -> str:
        return TEMPLATE

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        return Environment().from_string(TEMPLATE).render(**options, messages=messages)

    def parse_response(self, ids: Sequence[int], prefix: Sequence[int], tools: Any) -> Any:
        return parse_response(self.decode(ids), self.response_template, prefix=self.decode(prefix), tools=tools)


FORMS, ACTIONS = ("tags", "text", "turn", "call", "choice"), (None, ["go", "go north"])
LARGER = {"answer": "4", "kind": "larger"}
APPOINTMENTS = Path(__file__).parents[1] / "recipes/appointments/appointments.py"


def a_turn(chat: ToolChat, runner: AsyncRunner) -> Callable[[str], Any]:
    """What becomes of a turn: calls are read and carried out, and what they gave is written down."""

    def read(text: str) -> Any:
        message, calls = chat.read(list(map(ord, text)), [], SCHEMAS, ended=True)
        assert isinstance(message["content"], str)
        results = Calls(runner).run([Order(0, each, {"add": add}) for each in calls[:1_000]])
        told = [{"role": "tool", "name": "add", "content": each.text} for each in results]
        assert not told or len(chat.results(told, ended=True))
        return json.dumps(message.get("tool_calls"))

    return read


def chat(text: str) -> Any:
    return chat_prompt(Characters(), [{"role": "user", "content": text}], {}, 1 << 30)[0]


def a_choice(text: str) -> tuple[Any, Any]:
    return [{"question": text, "options": {"A": text}, "answer": "A"}], Answered(text, [text], [None], ["A"])


def scored(reward: Callable[..., Any], **columns: Any) -> Callable[[str], Any]:
    def score(text: str) -> Any:
        given = {name: [value, value] for name, value in columns.items()}
        completions: list[Any] = [text, [{"role": "assistant", "content": text}]]
        plain, spoken = reward(completions=completions, prompts=["1+1", "1+1"], **given)
        assert plain == spoken
        assert plain is None or 0 <= plain <= 1
        return plain

    return score


@pytest.fixture(scope="module")
def readers() -> Iterator[Mapping[str, Callable[[str], Any]]]:
    runner, options, sums = AsyncRunner(), {"A": "one", "B": "two"}, Arithmetic(num_train=1, num_eval=1)
    judge, reply = JudgeReward("http://judge", "m", retries=0), {"content": ""}

    def answer(request: httpx.Request) -> httpx.Response:
        json.loads(request.content)
        return httpx.Response(200, content=reply["content"].encode("utf-8", "replace"))

    judge._client = httpx.Client(base_url="http://judge/", transport=httpx.MockTransport(answer))

    def judged(text: str) -> Any:
        reply["content"] = text
        raw = judge(["q"], [text])
        reply["content"] = json.dumps({"choices": [{"message": {"content": text}}]})
        return raw, judge(["q"], [text])

    found: dict[str, Callable[[str], Any]] = {
        "calls": lambda text: [calls_in(text, SCHEMAS, ended=e, bare=b) for e in (True, False) for b in (True, False)],
        "a call": lambda text: read_call({"name": "add", "arguments": text}),
        "a turn with tools": a_turn(ToolChat(Characters(), [ord("|")], {}), runner),
        "a turn that transformers reads": a_turn(ToolChat(Characters(HERMES), [ord("|")], {}), runner),
        "an action": lambda text: [parse_action(text, form, known) for form in FORMS for known in ACTIONS],
        "a number": extract.parse_number,
        "a reference": extract.as_number,
        "the last number": extract.last_number,
        "a final number": lambda text: extract.final_number(text, ("####", "boxed", "answer", "=")),
        "a box": extract.boxed_content,
        "text of a completion": lambda text: completion_text([{"role": "assistant", "content": text}]),
        "text of a prompt": lambda text: prompt_text([{"role": "user", "content": text}]),
        "JSON": json_text,
        "exact": scored(exact_match(ignore_case=True), answer="4"),
        "numeric": scored(numeric_match(), answer=4),
        "strictly numeric": scored(numeric_match(strict=True), answer=4),
        "format": scored(format_reward(r"<think>.*</think>\s*\S+")),
        "tags": scored(tags_reward("think", "answer")),
        "any JSON": scored(json_reward()),
        "judge": judged,
        "thought": scored(rewards.think_format_reward),
        "choice": extract_choice,
        "USMLE's answer": lambda text: (extract_answer(text), extract_answer_literal(text)),
        "USMLE": lambda text: compute_reward({"answer": "A", "options": options}, text),
        "USMLE's reward": scored(USMLERewardModel(), answer="A", options=options),
        "arithmetic": lambda text: [read_answer(text, kind) for kind in ("sum", *CHOICES)],
        "arithmetic's grader": lambda text: [grade(text, LARGER) for grade in (sums.is_correct, sums.has_answer)],
        "GSM8K": lambda text: (GSM8K().is_correct(text, {"answer": "4"}), is_correct_answer(text, "4")),
        "GSM8K's reference": reference_answer,
        "a program": extract_code,
        "what was printed": lambda text: same_output(text, text[:-1] + "0", 0.1),
        "appointments": load_function(f"{APPOINTMENTS}:read"),
        "masks": lambda text: (has_choice_letter(text), is_repetitive(text), create_sampling_mask([text])),
        "a prompt on the page": messages,
        "a conversation on the page": lambda text: messages(json.dumps([{"role": "user", "content": text}])),
        "a play on the page": _turns,
        "a page": lambda text: choice_html(choice_report(*a_choice(text)), text),
        "the console": lambda text: (visible(text, 1_000), shown_text(text, 1_000)),
        "chat": chat,
    }
    yield found
    judge.close()
    runner.close()


@pytest.mark.parametrize("longest", [100, slow(4_000)])
def test_readers_in_processes_of_their_own(longest: int) -> None:
    texts = [*(text for text in TEXTS.values() if len(text) < longest), "4", '{"name": 1}']
    assert set(json_reward({"type": "object", "required": ["name"]})(completions=texts, prompts=texts)) == {0.0, 1.0}
    with contextlib.closing(MathReward(time_limit=1.0)) as equal:
        assert set(equal(completions=texts, prompts=texts, answer=["4"] * len(texts))) == {0.0, 1.0}


LONG = [*(name for name in TEXTS if name.startswith(f"{LEVELS[1]} x ")), "100,000 calls"]
"""Of these, every fifth is in the fast set: they differ from those of the lower level in their length alone."""


@pytest.mark.parametrize("name", [slow(n) if n in LONG and LONG.index(n) % 5 else n for n in TEXTS])
def test_every_reader_answers_every_text(name: str, readers: Mapping[str, Callable[[str], Any]]) -> None:
    for reader, read in readers.items():
        try:
            read(TEXTS[name])
        except Exception as error:
            raise AssertionError(f"{reader}: {type(error).__name__}: {str(error)[:200]}") from error


def test_arguments_are_an_object_or_malformed() -> None:
    for value in VALUES:
        text = f'<tool_call>{{"name": "add", "arguments": {value}}}</tool_call>'
        (call,) = calls_in(text, (), ended=True, bare=False)[1]
        if value in ("null", '{"a": 1, "a": 2}'):
            assert call == Call("add", {} if value == "null" else {"a": 2})
        else:
            assert call.problem
            assert call.name in ("add", UNREADABLE)


def test_json_beyond_the_bounds_is_none() -> None:
    for text in ("[" * 300 + "]" * 300, "9" * 5_000, "NaN", '"\\ud800"', '"\ud800"', " " * MAX_JSON + "1"):
        raises(ValueError, r"[a-z]", read_json, text)
    assert read_json('{"a": [1, 2.5, "\\ud83d\\ude00"]}') == {"a": [1, 2.5, "\U0001f600"]}


def test_a_character_that_never_ends_is_not_waited_for() -> None:
    """A token is decoded with the few before it: 1,000 are 30,000 at most, where all before it would be 500,000."""
    decoded = 0

    class Bytes:
        def decode(self, ids: Sequence[int], **options: Any) -> str:
            nonlocal decoded
            decoded += len(ids)
            return "".join("\ufffd" if token < 0 else chr(token) for token in ids)

    matcher = StopMatcher(Bytes(), ["stop"])
    assert not any(matcher.push(-1) for _ in range(1_000))
    assert decoded <= 30_000
    assert [matcher.push(ord(letter)) for letter in "a stop"] == [False] * 5 + [True]


KNOWN, UNIQUE = ["go", "go to the red door"], json_reward({"type": "array", "uniqueItems": True})
# fmt: off
READERS: dict[str, Callable[[str], Any]] = {
    "a choice, as printed": extract_answer_literal, "a USMLE answer": extract_answer,
    "whether there is a choice": has_choice_letter, "repetition": is_repetitive, "a final number": extract.final_number,
    "the last number": extract.last_number, "a number": extract.parse_number, "a box": extract.boxed_content,
    "a program": extract_code, "an answer to the bundled task": lambda text: read_answer(text, (3, 5)),
    "a number after =": lambda text: extract.final_number(text, ("=", "answer", "boxed", "####")),
    "printed numbers": lambda text: same_output(text, text[:-1] + "0", 0.1),
    "tags": lambda text: has_tags(text, ("think", "answer")),
    "JSON": lambda text: UNIQUE([text]),
    "an action in tags": lambda text: parse_action(text, "tags", KNOWN),
    "an action as a line": lambda text: parse_action(text, "text", KNOWN),
    "an action as a call": lambda text: parse_action(text, "call", KNOWN),
    "an action as it is": lambda text: parse_action(text, "choice", KNOWN),
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
SIZE = 2_000
SLOW = ("a USMLE answer", "a number after =", "a final number", "an answer to the bundled task", "JSON")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in READERS])
def test_time_grows_no_faster_than_the_text(name: str) -> None:
    def seconds(unit: str, size: int) -> float:
        began = time.thread_time()
        for before, after in (("", ""), ("A", " x"), ("```python\n", "a"), ("[", "1]")):
            READERS[name](before + unit * (size // len(unit)) + after)
        return time.thread_time() - began

    for unit in UNITS:
        short, long = seconds(unit, SIZE), seconds(unit, 12 * SIZE)
        # a quadratic one takes 144 times as long; a pause of the machine does not come twice
        if long > 20 * short + 0.1:
            short, long = seconds(unit, SIZE), seconds(unit, 12 * SIZE)
        assert long <= 20 * short + 0.1, f"{name}: {unit!r} repeated: {short:.3f} s, 12 times as long: {long:.3f} s"
