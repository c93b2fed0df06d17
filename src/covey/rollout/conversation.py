"""From messages to token ids, and never back: the tokens of a conversation in the model's own template.

    opening("You are in the hall.")   ...<|im_start|>user You are in the hall.<|im_end|> <|im_start|>assistant
    (the policy samples)              go kitchen<|im_end|>
    reply("You are in the kitchen.")  <|im_start|>user You are in the kitchen.<|im_end|> <|im_start|>assistant

What the policy sampled stays as it was sampled. What the world says is tokenised once, by itself, and never as special
tokens: an observation that contains `<|im_end|>` does not end anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import numpy as np

from covey.errors import ConfigError
from covey.tasks.dataset import prompt_ending
from covey.types import IntArray, Message

MARK = re.compile("\u2402[0-9]+\u2402")
_SAID = "\u2402said\u2402"
ASKED: Message = {"role": "user", "content": "."}
_TURN: list[Message] = [ASKED, {"role": "assistant", "content": _SAID}]


class Chat:
    """Messages as token ids, in the chat template of `tokenizer`; one without a template gets plain lines.

    A message may have `pictures`, which come before its text and which `album` reads.
    """

    def __init__(
        self, tokenizer: Any, eos_token_ids: Sequence[int], chat_template_kwargs: Mapping[str, Any], album: Any
    ) -> None:
        self.tokenizer, self._kwargs, self._album = tokenizer, dict(chat_template_kwargs), album
        self._has_template = getattr(tokenizer, "chat_template", None) is not None
        self._endings = [text for text in (str(tokenizer.decode([token])) for token in eos_token_ids) if text]

    def _marked(self, before: Sequence[Message], told: Sequence[Message]) -> tuple[str, list[str]]:
        """The text of messages with a mark in place of what each of `told` says, and the marks."""
        marks = [f"\u2402{place}\u2402" for place in range(len(told))]
        marked = [{**message, "content": mark} for message, mark in zip(told, marks, strict=True)]
        return self._render([*before, *marked]), marks

    def _turn_end(self, text: str, ended: bool) -> int:
        """Where the policy's turn is over in a text with marks, with what ends it if that was sampled; -1 = nowhere."""
        head = MARK.split(text, maxsplit=1)[0]
        said = head.rfind(_SAID) + len(_SAID) if _SAID in head else -1
        begin, ending = max(((head.rfind(ending), ending) for ending in self._endings), default=(-1, ""))
        return said if begin < max(said, 0) else begin + len(ending) * ended

    def _tokens(self, text: str, told: Sequence[Message], start: bool = False) -> IntArray:
        """The ids of a text in which marks stand for what is told; nothing of that is a special token."""
        ids: list[int] = []
        for piece, message in zip_longest(MARK.split(text), told):
            ids += self._encode(piece, special=True, start=start and not ids)
            ids += self._encode(str(message["content"]), special=False) if message else []
        return self._expanded(ids, [picture for message in told for picture in message.get("pictures", ())])

    def _expanded(self, ids: Sequence[int], shown: Sequence[Any]) -> IntArray:
        found = np.array(ids, dtype=np.int64)
        return self._album.expand(found, shown) if shown else found

    def _encode(self, text: str, *, special: bool, start: bool = False) -> list[int]:
        if not text and not start:
            return []
        encoded = self.tokenizer(text, add_special_tokens=start, split_special_tokens=not special)
        return [int(token) for token in encoded["input_ids"]]

    def _render(self, messages: Sequence[Message], tools: Any = None) -> str:
        if not self._has_template:
            lines = [f"{message['content']}\n" + "\n" * (message["content"] != _SAID) for message in messages[:-1]]
            return "".join([*lines, str(messages[-1]["content"]), "\n> "])
        told = list(map(in_parts, messages))
        try:
            how = {"tools": tools, "tokenize": False, **prompt_ending(told), **self._kwargs}
            return str(self.tokenizer.apply_chat_template(told, **how))
        except Exception as error:  # templates raise what they like
            raise ConfigError(
                f"the chat template cannot write a conversation ({type(error).__name__}: {error!s:.300}); set another "
                "chat_template, or use a model made for conversations, and with tools for these"
            ) from error


class ConversationTemplate(Chat):
    """Writes the turns of the world; the turns of the policy are sampled.

    `album` reads pictures (`covey.pytorch.models.pictures`); without one, `blind` says why none are read here.

    Raises `ConfigError`: the template cannot be taken apart into turns.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        album: Any = None,
        blind: str = "the model reads none",
    ) -> None:
        super().__init__(tokenizer, eos_token_ids, chat_template_kwargs or {}, album)
        self._system, self._blind, self._roles = system_prompt, blind, ["user"]
        self.opening("")
        self.reply("", ended=False)
        with suppress(ConfigError):
            self._told(_TURN, "tool", "", (), False)
            self._roles.append("tool")

    def opening(
        self,
        observation: str,
        system_prompt: str | None = None,
        messages: Sequence[Message] = (),
        pictures: Sequence[Any] = (),
    ) -> IntArray:
        """Token ids of everything before the policy's first turn.

        A task may have a system prompt in place of the world's, and messages that come before the observation, which
        begins with its pictures. Raises `ConfigError`: there are pictures, and none are read.
        """
        words = system_prompt or self._system
        system: list[Message] = [{"role": "system", "content": words}] if words else []
        return self._told([*system, *messages], "user", observation, pictures)

    def reply(self, observation: str, *, ended: bool, role: str = "user", pictures: Sequence[Any] = ()) -> IntArray:
        """Token ids between a turn of the policy and its next one; `role` is of who says it, where there is such.

        Raises `ConfigError`: there are pictures, and none are read.
        """
        return self._told(_TURN, role if role in self._roles else "user", observation, pictures, ended)

    def _told(
        self, before: list[Message], role: str, said: str, pictures: Sequence[Any], ended: bool | None = None
    ) -> IntArray:
        if pictures and (self._album is None or not self._has_template):
            why = self._blind if self._album is None else "the model has no chat template to show them in"
            raise ConfigError(f"the world shows pictures: {why}; use a vision model (docs/pictures.md), or show none")
        told: list[Message] = [{"role": role, "content": said, "pictures": pictures}]
        text, marks = self._marked(before, told)
        if MARK.findall(text) != marks or text.count(_SAID) != (ended is not None):
            raise ConfigError(
                "this chat template changes or repeats what is said; use environment.history_length=2 with a model "
                "whose template keeps messages as they are"
            )
        return self._tokens(
            text if ended is None else text[self._turn_end(text, ended) :],
            told,
            start=ended is None and not self._has_template,
        )


def in_parts(message: Message) -> Message:
    """A message whose pictures are parts before its text."""
    told = {name: value for name, value in message.items() if name != "pictures"}
    if shown := message.get("pictures"):
        parts = [{"type": "image", "image": picture} for picture in shown]
        told["content"] = [*parts, {"type": "text", "text": message["content"]}]
    return told
