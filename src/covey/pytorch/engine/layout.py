"""How the cache's memory is shared out between rows and prompts, for each kind of session."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

from covey.errors import GenerationError
from covey.pytorch.engine.cache import KVCache, block_capacity
from covey.rollout.turns import Row


def lay_out_for_queue(cache: KVCache, waiting: Iterable[Row], max_rows: int) -> list[Row]:
    """The most rows for which any stretch of the queue fits, prompts and all.

    Returns:
        The queue in the order that this is for: rows of one prompt come together, so that it is prefilled once; equal
        capacities too: they batch.

    Raises:
        GenerationError: not even one completion fits.
    """
    waiting = list(waiting)
    order: dict[int, int] = {}
    for place, row in enumerate(waiting):
        order.setdefault(id(row.place), place)
    in_turn = sorted(waiting, key=lambda row: (-block_capacity(len(row.prompt_ids)), order[id(row.place)]))
    slot_tokens = max(1, max(row.limit for row in in_turn) - 1)  # the last token is never fed back

    def needed(rows: int) -> int:
        return rows * slot_tokens + _widest_stretch(in_turn, rows)

    rows = bisect.bisect_right(range(1, min(max_rows, len(in_turn)) + 1), cache.capacity, key=needed)
    if rows == 0:
        prompt = max(len(row.prompt_ids) for row in in_turn)
        raise _too_small(cache, slot_tokens, prompt, needed(1))
    # room for a quarter more prompts than run at once: freed blocks do not always fit the next prompt
    everything, running = _widest_stretch(in_turn, len(in_turn)), _widest_stretch(in_turn, rows)
    cache.open(rows, slot_tokens, min(everything, running + running // 4, cache.capacity - rows * slot_tokens))
    return in_turn


def lay_out_for_conversations(cache: KVCache, rows: int, own_tokens: int, prompt_lengths: Sequence[int]) -> None:
    """`rows` conversations of `own_tokens` after first prompts of these lengths; fewer rows if they do not fit.

    Raises:
        GenerationError: not even one conversation fits.
    """
    slot_tokens = max(1, own_tokens - 1)
    prompt_tokens = sum(block_capacity(length) for length in prompt_lengths)
    fit = (cache.capacity - prompt_tokens) // slot_tokens
    if fit < 1:
        raise _too_small(cache, slot_tokens, prompt_tokens, slot_tokens + prompt_tokens)
    cache.open(min(rows, fit), slot_tokens, prompt_tokens)


def lay_out_for_clients(cache: KVCache, rows: int, own_tokens: int, context: int) -> None:
    """`rows` completions of `own_tokens`, in three fifths of the cache at most; the rest is for their prompts.

    Raises:
        GenerationError: not even one completion fits.
    """
    slot_tokens, capacity = max(1, own_tokens - 1), cache.capacity
    rows = min(rows, 3 * capacity // 5 // slot_tokens)
    if rows < 1:
        raise _too_small(cache, slot_tokens, 2 * slot_tokens // 3, 5 * slot_tokens // 3 + 1)
    longest = block_capacity(min(context, capacity))
    cache.open(rows, slot_tokens, min(capacity - rows * slot_tokens, 2 * rows * longest))


def _too_small(cache: KVCache, slot_tokens: int, prompt: int, needed: int) -> GenerationError:
    size = cache.bytes_per_token
    return GenerationError(
        f"kv_cache_bytes={cache.budget_bytes}: one completion of {slot_tokens + 1} tokens "
        f"after a prompt of {prompt} needs {needed * size} bytes ({size} a token); raise "
        f"sampling.kv_cache_gb to at least {needed * size / 2**30:.3g}, or lower "
        "sampling.max_completion_length"
    )


def _widest_stretch(in_turn: Sequence[Row], rows: int) -> int:
    """Most prompt tokens that any `rows` consecutive rows need."""
    window: dict[int, int] = {}
    tokens = widest = 0
    for i, row in enumerate(in_turn):
        prompt = id(row.place)
        if window.setdefault(prompt, 0) == 0:
            tokens += block_capacity(len(row.prompt_ids))
        window[prompt] += 1
        if i >= rows:
            left = in_turn[i - rows].place
            window[id(left)] -= 1
            if window[id(left)] == 0:
                tokens -= block_capacity(len(left.token_ids))
        widest = max(widest, tokens)
    return widest
