"""Stop strings, found in the decoded completion while it grows.

Tokens do not map to text one by one: a character may need several tokens, and some tokenizers drop the space
before the first token that they are given. So the text of a new token is the *difference* of two decodings
that start at the same earlier token, and text that ends in U+FFFD (an unfinished character) waits for the
tokens that finish it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\ufffd"
_LONGEST_CHARACTER = 8
"""Tokens that an unfinished character may have: UTF-8's have at most four bytes, so text after these is settled."""


class StopMatcher:
    """Watches one completion. `push` each token; it answers True once the text contains a stop string.

    Special tokens count as text, so that a marker such as `<|im_end|>` can be a stop string.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = tuple(stop_strings)
        self._overlap = max(map(len, self._stop_strings)) - 1
        self._ids: list[int] = []
        self._window = 0  # where both decodings start
        self._settled = 0  # tokens before this one have contributed their text
        self._tail = ""  # the last characters of the settled text: a stop string may begin there

    def push(self, token_id: int) -> bool:
        """Add the next token; True if the completion's text now contains a stop string."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._window : self._settled])
        after = self._decode(self._ids[self._window :])
        text = self._tail + after[len(before) :]
        if before and after == before:  # an id without a text: a window of these alone would lose the next one's space
            del self._ids[self._settled :]
        elif not after.endswith(_UNFINISHED) or len(self._ids) - self._settled >= _LONGEST_CHARACTER:
            self._tail = text[len(text) - self._overlap :] if self._overlap < len(text) else text
            del self._ids[: self._window]
            self._window, self._settled = self._settled - self._window, len(self._ids)
        return any(stop in text for stop in self._stop_strings)

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
