"""The text of a completion, told piece by piece while it grows: the pieces add up to the decoding of the whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

_KEPT = 8
"""Tokens before the next one that are decoded with it: their text settles what depends on what came before, and they
have more bytes than the longest character."""
_REMEMBERED = 1 << 16
_UNFINISHED = re.compile("\ufffd{1,3}\\Z")
"""Bytes of a character that the next token may finish."""
_CLEANED = re.compile("(?:\ufffd{1,3}|[ ']+[vrn]?'?)\\Z")
"""Likewise, and what the tokenizer's clean-up of spaces may change."""


class GrowingTexts:
    """Makes the texts of one tokenizer's completions, without special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.decode: Callable[[list[int]], str] = lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
        self.unsure = _CLEANED if getattr(tokenizer, "clean_up_tokenization_spaces", False) else _UNFINISHED
        names = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
        self.bytes = frozenset(token for name, token in names.items() if re.fullmatch("<0x[0-9A-Fa-f]{2}>", name))
        # special ones and ids beyond the tokenizer's: one more of it changes nothing
        self.silent = lru_cache(_REMEMBERED)(lambda token: self.decode([token]) == self.decode([token, token]))


class GrowingText:
    """One completion. A token costs one decoding of at most 16 and those that arrive with it, whatever came before.

    A run of byte tokens is text only as a whole (one wrong byte spoils all of them), so it is told when it is over.
    """

    def __init__(self, texts: GrowingTexts) -> None:
        self._texts = texts
        self._ids: list[int] = []
        self._told = 0  # characters of their text

    def push(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """What is new and certain of the text with these tokens; with the `last` ones all that is left."""
        texts = self._texts
        self._ids += [token for token in token_ids if not texts.silent(token)]
        if not self._ids or (self._ids[-1] in texts.bytes and not last):
            return ""
        text = texts.decode(self._ids)
        unsure = None if last else texts.unsure.search(text)
        end = max(self._told, len(text) if unsure is None else unsure.start())
        new, left, self._told = text[self._told : end], len(text) - end, end
        if len(self._ids) >= 2 * _KEPT and left <= 3:
            del self._ids[:-_KEPT]
            self._told = len(texts.decode(self._ids)) - left
        return new
