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


class ConversationTemplate:
    """Writes the turns of the world; the turns of the policy are sampled.

    Raises `ConfigError`: the template cannot be taken apart into turns.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(chat_template_kwargs or {})
        self.has_template = getattr(tokenizer, "chat_template", None) is not None
        self._system = system_prompt
        self._opening = self._before_and_after()
        self._between = {"user": ("\n", "\n> ")}
        self._ending = ""
        if not self.has_template:
            return
        said: list[Message] = [*self._asked(), {"role": "assistant", "content": _SAID}]
        _, tail = self._cut(self._render(said, False), _SAID)

        def between(role: str) -> tuple[str, str]:
            _, after = self._cut(self._render([*said, {"role": role, "content": _OBSERVED}], True), _SAID)
            if not after.startswith(tail.rstrip()):
                raise ConfigError(
                    "this chat template writes an earlier turn of the assistant differently once another turn follows; "
                    "use environment.history_length=2"
                )
            return self._cut(after, _OBSERVED)

        self._between["user"] = between("user")
        with suppress(Exception):  # templates without the role raise what they like
            self._between["tool"] = between("tool")
        endings = [str(tokenizer.decode([token])) for token in eos_token_ids]
        begins = [ending for ending in endings if ending and self._between["user"][0].startswith(ending)]
        self._ending = begins[0] if begins else ""

    def opening(self, observation: str, system_prompt: str | None = None, messages: Sequence[Message] = ()) -> IntArray:
        """Token ids of everything before the policy's first turn.

        A task may have a system prompt in place of the world's, and messages that come before the observation.
        """
        own = self._before_and_after(system_prompt, messages) if system_prompt or messages else self._opening
        return self._pieces(*own, observation, first=True)

    def _asked(self, system_prompt: str | None = None, messages: Sequence[Message] = ()) -> list[Message]:
        words = system_prompt or self._system
        system: list[Message] = [{"role": "system", "content": words}] if words else []
        return [*system, *messages, {"role": "user", "content": _OBSERVED}]

    def _before_and_after(self, *own: Any) -> tuple[str, str]:
        asked = self._asked(*own)
        if not self.has_template:
            return "".join(f"{message['content']}\n\n" for message in asked[:-1]), "\n> "
        return self._cut(self._render(asked, True), _OBSERVED)

    def reply(self, observation: str, *, ended: bool, role: str = "user") -> IntArray:
        """Token ids between a turn of the policy and its next one; `role` is of who says it, where there is such."""
        before, after = self._between.get(role, self._between["user"])
        return self._pieces(before.removeprefix(self._ending) if ended else before, after, observation)

    def _pieces(self, before: str, after: str, observation: str, *, first: bool = False) -> IntArray:
        # a template writes its own begin-of-sequence token; a plain tokenizer adds it to the first piece
        with_start = first and not self.has_template
        ids = [*self._encode(before, special=True, start=with_start), *self._encode(observation, special=False)]
        return np.array([*ids, *self._encode(after, special=True)], dtype=np.int64)

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
