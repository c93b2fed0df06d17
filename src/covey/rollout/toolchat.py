"""Tools in a model's chat template: prompts that show them, what is said after a call, and calls in what was sampled.

    opening([user], schemas)        <|im_start|>system ... tools ...<|im_end|> <|im_start|>user ... assistant
    (the policy samples)            <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|im_end|>
    results([tool], ended=True)     <|im_start|>tool 3<|im_end|> <|im_start|>assistant

What was sampled stays as it was sampled. What a tool returned is never read as special tokens where the template writes
it as it is. `covey.environments.actions` reads calls.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from covey.environments.actions import OPEN, UNREADABLE, Call, calls_in, read_call
from covey.errors import ConfigError
from covey.functions import later
from covey.rewards.extract import MAX_JSON, read_json
from covey.rollout.conversation import ASKED, MARK, Chat
from covey.rollout.tools import EMPTY
from covey.types import IntArray, Message

(pictures,) = later("covey.tasks", "pictures")
log = logging.getLogger(__name__)


class ToolChat(Chat):
    """Writes and reads conversations with tools.

    Raises `ConfigError`: the template does not show tools, or their results. With `in_words` such a template is given
    them as text, in the messages that it shows, and a turn that is nothing but the JSON of a call is one. `album` reads
    pictures; a tool's message has its own as `pictures`.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        chat_template_kwargs: Mapping[str, Any],
        *,
        in_words: bool = False,
        album: Any = None,
    ) -> None:
        super().__init__(tokenizer, eos_token_ids, chat_template_kwargs, album)
        self._in_words = False
        result: Message = {"role": "tool", "name": "f", "content": "1"}
        try:
            self._check(result)
        except ConfigError:
            if not in_words:
                raise
            self._in_words = True
            self._check(result)
        shown = self._render([*_called([result]), result])
        bare = OPEN not in shown and '"parameters": {' in shown
        self._bare = bare or in_words
        known = bare or getattr(tokenizer, "response_template", None) is not None
        if not known and all(call.problem for call in calls_in(shown, (), ended=False, bare=False)[1]):
            log.warning(
                "tools: this chat template writes calls in a form that is not read; set the tokenizer's "
                "response_template to what its model writes, or ask in the prompt for calls like "
                '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'
            )

    def _check(self, result: Message) -> None:
        for count in (1, 2):
            self.results([result] * count, ended=True)
        tool: Any = {"name": "covey_tool", "description": ".", "parameters": {"type": "object", "properties": {}}}
        if tool["name"] not in self._render([EMPTY], tools=[{"type": "function", "function": tool}]):
            raise ConfigError(
                "tools: this chat template does not show the model its tools (it leaves out the argument `tools`); use "
                "a model made for tools, or set another chat_template"
            )

    def opening(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> IntArray:
        """`[P]` token ids of a prompt that shows the tools."""
        text = self._render(messages, list(schemas) or None)
        return self._expanded(self._encode(text, special=True), pictures.pictures_in(messages))

    def places(self, shown: Sequence[Any]) -> IntArray:
        """The ids of pictures alone. Raises `DataError`: the model cannot take one."""
        return self._expanded([self._album.placeholder_id for _ in shown], shown)

    def results(self, messages: Sequence[Message], *, ended: bool) -> IntArray:
        """Token ids between a turn of the policy that called tools and its next one; an error if they are not shown."""
        before = _called(messages)
        marked, marks = self._marked(before, messages)
        cut, found = self._turn_end(marked, ended), MARK.findall(marked)
        if not set(marks) <= set(found) or cut < 0:
            one = "what a tool returned" if len(marks) == 1 else f"what each of {len(marks)} calls in a turn returned"
            raise ConfigError(
                f"tools: this chat template does not show {one} (messages of the role 'tool' after one of the "
                "assistant with tool_calls); use a model made for tools, or set another chat_template"
            )
        text, contents = self._render([*before, *messages])[cut:], iter(messages)
        told = MARK.sub(lambda _: str(next(contents)["content"]), marked[cut:]) if found == marks else ""
        shown = [picture for message in messages for picture in message.get("pictures", ())]
        # beside pictures no text is special, since it may hold what stands for a picture
        if told == text or (told and shown):
            return self._tokens(marked[cut:], messages)
        # the template changes what it is given, so what belongs to whom is lost
        return self._expanded(self._encode(text, special=True), shown)

    def read(
        self, token_ids: Sequence[int], prefix: Sequence[int], schemas: Sequence[Mapping[str, Any]], *, ended: bool
    ) -> tuple[Message, list[Call]]:
        """A turn of the policy as a message, and the calls in it."""
        text = self._text(token_ids)
        message: Message = {"role": "assistant", "content": text}
        if getattr(self.tokenizer, "response_template", None) is None:
            message["content"], calls = calls_in(text, schemas, ended=ended, bare=self._bare)
        else:
            try:
                if len(text) > MAX_JSON:  # the patterns of a response_template may take the square of the length
                    raise ValueError(f"{len(text)} characters, more than the {MAX_JSON} that are read")
                prefix = prefix if self._album is None else self._album.placeholders(np.array(prefix)).tolist()
                parsed = self.tokenizer.parse_response(list(token_ids), prefix=list(prefix), tools=list(schemas))
                if not isinstance(parsed, dict):
                    return message, []
                entries = parsed.pop("tool_calls", None) or ()
                calls = [read_call(read_json(json.dumps(entry.get("function")))) for entry in entries]
            except Exception as error:  # transformers' parser raises what it likes, for text that nobody vouches for
                problem = f"The tool call cannot be read: {error!s:.300}"
                return message, [Call(UNREADABLE, problem=problem)] if ended else []
            message |= {"content": "", **{name: value for name, value in parsed.items() if value is not None}}
        good = [call for call in calls if not call.problem]
        if good:
            functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in good]
            message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        return message, calls

    def _text(self, token_ids: Sequence[int]) -> str:
        """A turn without special tokens, but for those that calls begin with where they are such."""
        text = str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))
        if OPEN in text:
            return text
        whole = str(self.tokenizer.decode(list(token_ids)))
        for ending in self._endings:
            whole = whole.removesuffix(ending)
        return whole if OPEN in whole else text

    def _render(self, messages: Sequence[Message], tools: Any = None) -> str:
        if self._in_words:
            messages, tools = _worded(messages, tools), None
        return super()._render(messages, tools)


def _called(results: Sequence[Message]) -> list[Message]:
    """What results follow: one call is enough for any number, and some templates refuse more."""
    call = {"type": "function", "function": {"name": results[0]["name"], "arguments": {}}}
    return [dict(ASKED), {"role": "assistant", "content": "", "tool_calls": [call]}]


def _worded(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[Message]:
    """The same for a template without tools: the system message tells them, and the user the results."""
    told: list[Message] = []
    for before, message in zip([{}, *messages], messages, strict=False):
        text = message["content"] if message["role"] == "user" else str(message["content"])
        if message["role"] == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            if before.get("role") == "tool":
                told[-1]["content"] += f"\n{text}"
                told[-1]["pictures"] += message.get("pictures", ())
                continue
        for call in message.get("tool_calls") or ():
            text += f"<tool_call>{json.dumps(call['function'])}</tool_call>"
        role = "user" if message["role"] == "tool" else message["role"]
        told.append({"role": role, "content": text, "pictures": message.get("pictures", ())})
    if tools:
        system = told.pop(0)["content"] + "\n\n" if told[0]["role"] == "system" else ""
        told.insert(0, {"role": "system", "content": system + tools_in_words(tools)})
    return told


def tools_in_words(schemas: Sequence[Mapping[str, Any]]) -> str:
    """What the system message says of tools where the chat template has no place for them."""
    return "\n".join(
        [
            "You may call these functions:",
            *(json.dumps(schema["function"], ensure_ascii=False) for schema in schemas),
            "To call one, write its name and its arguments as JSON:",
            '<tool_call>{"name": "...", "arguments": {...}}</tool_call>',
        ]
    )
