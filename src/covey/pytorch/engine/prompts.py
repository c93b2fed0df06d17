"""Prompts and their blocks in the cache: each distinct one once, while anything uses it, and longer if asked."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from covey.pytorch.engine.cache import KVCache, PromptBlock
from covey.types import IntArray


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """A distinct first prompt."""

    token_ids: IntArray
    users: int = 0  # rows that still need it
    block: PromptBlock | None = None
    logits: Tensor | None = None  # [V] after its last token, while rows wait for it
    broken: bool = False  # its logits are not finite


class Prompts:
    """The prompts of one version of the weights.

    Args:
        cache: where their keys and values are.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._known: dict[bytes, SharedPrompt] = {}
        self._unused: dict[bytes, SharedPrompt] = {}  # the longest unused first
        self.remembered = 0
        self.reused = 0

    def take(self, token_ids: IntArray) -> SharedPrompt:
        """The prompt, for one more row."""
        key = token_ids.tobytes()
        self.reused += self._unused.pop(key, None) is not None
        prompt = self._known.setdefault(key, SharedPrompt(token_ids))
        prompt.users += 1
        return prompt

    def release(self, prompt: SharedPrompt) -> None:
        """One row less needs it."""
        prompt.users -= 1
        if prompt.users:
            return
        key = prompt.token_ids.tobytes()
        if self._known.get(key) is not prompt:
            self._free(prompt)  # of older weights
        elif self.remembered and not prompt.broken and prompt.block is not None and prompt.logits is not None:
            self._unused[key] = prompt
            while len(self._unused) > self.remembered:
                self._evict()
        else:
            del self._known[key]
            self._free(prompt)

    def allocate(self, prompt: SharedPrompt) -> bool:
        """Give a prompt a block, of prompts that nothing uses if need be; False while there is no room."""
        prompt.block = self._cache.allocate(len(prompt.token_ids))
        while prompt.block is None and self._unused:
            self._evict()
            prompt.block = self._cache.allocate(len(prompt.token_ids))
        return prompt.block is not None

    def renew(self) -> None:
        """The weights are new: rows that run keep the prompts that they have, nobody else gets them."""
        while self._unused:
            self._evict()
        self._known.clear()

    def _evict(self) -> None:
        key = next(iter(self._unused))
        del self._known[key]
        self._free(self._unused.pop(key))

    def _free(self, prompt: SharedPrompt) -> None:
        if prompt.block is not None:
            self._cache.release(prompt.block)
            prompt.block = None
