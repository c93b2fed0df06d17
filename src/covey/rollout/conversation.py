"""From observations to token ids, and never back: the tokens of a conversation in the model's own template.

    opening("You are in the hall.")   ...<|im_start|>user You are in the hall.<|im_end|> <|im_start|>assistant
    (the policy samples)              go kitchen<|im_end|>
    reply("You are in the kitchen.")  <|im_start|>user You are in the kitchen.<|im_end|> <|im_start|>assistant

What the policy sampled stays as it was sampled. What the world says is tokenised once, by itself, and never as special
tokens: an observation that contains `<|im_end|>` does not end anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from covey.errors import ConfigError
from covey.types import IntArray, Message

_OBSERVED, _SAID = "\u2402observed\u2402", "\u2402said\u2402"


def _seen(role: str, pictures: int) -> Message:
    """A message with an observation and so many pictures before it."""
    parts = [*[{"type": "image"}] * pictures, {"type": "text", "text": _OBSERVED}]
    return {"role": role, "content": parts if pictures else _OBSERVED}


class ConversationTemplate:
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
        self._tokenizer, self._album, self._blind = tokenizer, album, blind
        self._kwargs = dict(chat_template_kwargs or {})
        self.has_template = getattr(tokenizer, "chat_template", None) is not None
        self._system = system_prompt
        self._opening = self._before_and_after()
        self._between = {("user", 0): ("\n", "\n> ")}
        self._ending = ""
        if not self.has_template:
            return
        self._between["user", 0] = self._around("user", 0)
        with suppress(Exception):  # templates without the role raise what they like
            self._between["tool", 0] = self._around("tool", 0)
        endings = [str(tokenizer.decode([token])) for token in eos_token_ids]
        begins = [ending for ending in endings if ending and self._between["user", 0][0].startswith(ending)]
        self._ending = begins[0] if begins else ""

    def _around(self, role: str, pictures: int) -> tuple[str, str]:
        """What is written between a turn of the policy and the text of a later message, and after that."""
        said: list[Message] = [*self._asked(), {"role": "assistant", "content": _SAID}]
        _, tail = self._cut(self._render(said, False), _SAID)
        _, after = self._cut(self._render([*said, _seen(role, pictures)], True), _SAID)
        if not after.startswith(tail.rstrip()):
            raise ConfigError(
                "this chat template writes an earlier turn of the assistant differently once another turn follows; "
                "use environment.history_length=2"
            )
        return self._cut(after, _OBSERVED)

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
        own = (system_prompt, messages, self._readable(pictures))
        around = self._before_and_after(*own) if any(own) else self._opening
        return self._pieces(*around, observation, pictures, first=True)

    def _readable(self, pictures: Sequence[Any]) -> int:
        """How many they are."""
        if pictures and (self._album is None or not self.has_template):
            why = self._blind if self._album is None else "the model has no chat template to show them in"
            raise ConfigError(f"the world shows pictures: {why}; use a vision model (docs/pictures.md), or show none")
        return len(pictures)

    def _asked(
        self, system_prompt: str | None = None, messages: Sequence[Message] = (), pictures: int = 0
    ) -> list[Message]:
        words = system_prompt or self._system
        system: list[Message] = [{"role": "system", "content": words}] if words else []
        return [*system, *messages, _seen("user", pictures)]

    def _before_and_after(self, *own: Any) -> tuple[str, str]:
        asked = self._asked(*own)
        if not self.has_template:
            return "".join(f"{message['content']}\n\n" for message in asked[:-1]), "\n> "
        return self._cut(self._render(asked, True), _OBSERVED)

    def reply(self, observation: str, *, ended: bool, role: str = "user", pictures: Sequence[Any] = ()) -> IntArray:
        """Token ids between a turn of the policy and its next one; `role` is of who says it, where there is such.

        Raises `ConfigError`: there are pictures, and none are read.
        """
        key = (role if (role, 0) in self._between else "user", self._readable(pictures))
        if key not in self._between:
            self._between[key] = self._around(*key)
        before, after = self._between[key]
        return self._pieces(before.removeprefix(self._ending) if ended else before, after, observation, pictures)

    def _pieces(
        self, before: str, after: str, observation: str, pictures: Sequence[Any], *, first: bool = False
    ) -> IntArray:
        # a template writes its own begin-of-sequence token; a plain tokenizer adds it to the first piece
        begin = np.array(self._encode(before, special=True, start=first and not self.has_template), dtype=np.int64)
        if pictures:
            begin = self._album.expand(begin, pictures)
        rest = [*self._encode(observation, special=False), *self._encode(after, special=True)]
        return np.concatenate([begin, np.array(rest, dtype=np.int64)])

    def _encode(self, text: str, *, special: bool, start: bool = False) -> list[int]:
        if not text and not start:
            return []
        encoded = self._tokenizer(text, add_special_tokens=start, split_special_tokens=not special)
        return [int(token) for token in encoded["input_ids"]]

    def _render(self, messages: list[Message], prompt: bool) -> str:
        how = {"add_generation_prompt": prompt, "tokenize": False, **self._kwargs}
        return str(self._tokenizer.apply_chat_template(messages, **how))

    @staticmethod
    def _cut(text: str, mark: str) -> tuple[str, str]:
        before, found, after = text.partition(mark)
        if not found or mark in after:
            raise ConfigError(
                "this chat template changes or repeats what is said; use environment.history_length=2 with a model "
                "whose template keeps messages as they are"
            )
        return before, after
