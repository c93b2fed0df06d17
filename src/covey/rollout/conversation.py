"""From observations to token ids, and never back: the tokens of a conversation in the model's own template.

    opening("You are in the hall.")   ...<|im_start|>user You are in the hall.<|im_end|> <|im_start|>assistant
    (the policy samples)              go kitchen<|im_end|>
    reply("You are in the kitchen.")  <|im_start|>user You are in the kitchen.<|im_end|> <|im_start|>assistant

What the policy sampled stays as it was sampled. What the world says is tokenised once, by itself, and never as special
tokens: an observation that contains `<|im_end|>` does not end anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        system: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        if not self.has_template:
            first = f"{system_prompt}\n\n" if system_prompt else ""
            self._opening, self._between = (first, "\n> "), ("\n", "\n> ")
            self._ending = ""
            return
        asked = [*system, {"role": "user", "content": _OBSERVED}]
        self._opening = self._cut(self._render(asked, True), _OBSERVED)
        said: list[Message] = [*asked, {"role": "assistant", "content": _SAID}]
        _, tail = self._cut(self._render(said, False), _SAID)
        after = self._render([*said, {"role": "user", "content": _OBSERVED}], True)
        _, between = self._cut(after, _SAID)
        if not between.startswith(tail.rstrip()):
            raise ConfigError(
                "this chat template writes an earlier turn of the assistant differently once another turn follows; "
                "use environment.history_length=2"
            )
        self._between = self._cut(between, _OBSERVED)
        endings = [str(tokenizer.decode([token])) for token in eos_token_ids]
        self._ending = next((ending for ending in endings if ending and between.startswith(ending)), "")

    def opening(self, observation: str) -> IntArray:
        """Token ids of everything before the policy's first turn."""
        return self._pieces(*self._opening, observation, first=True)

    def reply(self, observation: str, *, ended: bool) -> IntArray:
        """Token ids between a turn of the policy and its next one."""
        before, after = self._between
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
