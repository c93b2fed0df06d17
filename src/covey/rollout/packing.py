"""Packs episodes into micro-batches in which every distinct prompt appears once.

The completions of a group share their prompt, so the token-wise work of a forward pass (embeddings, linear
layers, norms) needs `P + sum(R)` tokens, not `G * (P + max(R))`. One pack with a prompt of 4 tokens and two
completions of 3 and 2:

    packed index   0  1  2  3 | 4  5 | 6
    token_ids     11 12 13 14 |21 22 |31        a completion's last token is no input: nothing follows it
    position_ids   0  1  2  3 | 4  5 | 4
    blocks         Block(start=0, prefix_len=4, suffix_lens=(2, 1))

    s              0  1  2  3  4
    targets       21 22  2 31  2                the sampled tokens, row by row
    score_at       3  4  5  3  6                the packed index whose hidden state predicts the target
    row            0  0  0  1  1
    column         0  1  2  0  1

Who may see whom is not stored: a suffix token sees its block's prefix and the earlier tokens of its own
suffix. An agent's episode with foreign tokens between sampled segments has one long suffix in which only the
sampled tokens are targets.

Order inside a pack: blocks in the order in which they were added, rows inside a block in the order of `rows`,
and `s` runs over the pack's rows and, inside a row, over its sampled tokens. The same input always gives the
same packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from covey.types import Episode, IntArray, Support

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Block:
    """One prefix and the suffixes that continue it, contiguous in the pack.

    Attributes:
        start: packed index of the prefix's first token; the suffixes follow the prefix directly.
        prefix_len: P, at least 1.
        suffix_lens: R of each row of the block; 0 for a row that needs the prefix alone (one sampled token).
    """

    start: int
    prefix_len: int
    suffix_lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the block, prefix and suffixes."""
        return self.prefix_len + sum(self.suffix_lens)


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """One micro-batch: M packed tokens that score S sampled tokens of n rows (drawn in the module docstring).

    Attributes:
        token_ids: `[M]`.
        position_ids: `[M]` position of each token in its own sequence.
        blocks: the layout of the M tokens.
        score_at: `[S]` packed index whose hidden state predicts the s-th sampled token.
        targets: `[S]` the sampled token ids.
        row: `[S]` row in this pack, 0..n-1.
        column: `[S]` index among that row's sampled tokens: the column in the batch's `[N, T]` arrays.
        rows: `[n]` row number in the batch of each row in this pack.
    """

    token_ids: IntArray
    position_ids: IntArray
    blocks: tuple[Block, ...]
    score_at: IntArray
    targets: IntArray
    row: IntArray
    column: IntArray
    rows: IntArray

    @property
    def num_tokens(self) -> int:
        """M, tokens in the forward pass."""
        return len(self.token_ids)

    @property
    def num_targets(self) -> int:
        """S, sampled tokens that are scored."""
        return len(self.targets)

    def take(self, values_NT: NDArray[Scalar]) -> NDArray[Scalar]:
        """Values `[N, T]` of the whole batch -> `[S]` of this pack."""
        return values_NT[self.rows[self.row], self.column]

    def put(self, values_S: NDArray[Any], into_NT: NDArray[Any]) -> None:
        """Write values `[S]` of this pack into an array `[N, T]` of the whole batch."""
        into_NT[self.rows[self.row], self.column] = values_S

    def support(self, episodes: Sequence[Episode]) -> Support | None:
        """The kept ids of the pack's S targets, or None when no row of the pack recorded them.

        Args:
            episodes: all N episodes of the batch.

        Raises:
            ValueError: some rows recorded their support and others did not.
        """
        kept = [episodes[row].support for row in self.rows]
        if all(support is None for support in kept):
            return None
        present = [support for support in kept if support is not None]
        if len(present) != len(kept):
            missing = next(int(row) for row, support in zip(self.rows, kept, strict=True) if support is None)
            raise ValueError(
                f"row {missing} recorded no kept ids while others did; sample the whole batch with keep_support on"
            )
        counts = np.concatenate([np.diff(support.offsets) for support in present])
        return Support(
            ids=np.concatenate([support.ids for support in present]).astype(np.int64),
            offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        )


@dataclass(slots=True)
class _Item:
    """Rows with one prefix that go into the same pack."""

    prefix: IntArray
    rows: list[int]
    num_tokens: int


@dataclass(slots=True)
class _Bin:
    items: list[_Item] = field(default_factory=list)
    num_tokens: int = 0
    num_rows: int = 0

    def add(self, item: _Item) -> None:
        self.items.append(item)
        self.num_tokens += item.num_tokens
        self.num_rows += len(item.rows)


def pack_episodes(
    episodes: Sequence[Episode], rows: Sequence[int] | IntArray | None = None, tokens_per_pack: int = 8192
) -> list[Pack]:
    """Pack rows of a batch into micro-batches of at most `tokens_per_pack` tokens.

    Rows with equal prefixes (the tokens before the first sampled one, compared by value) share the prefix,
    whatever group they belong to. A prefix with more rows than fit is repeated in several packs; a sequence
    is never split, so one that exceeds the budget gets a pack of its own. Rows without a sampled token are
    left out: there is nothing to score.

    Args:
        episodes: all N episodes of the batch.
        rows: row numbers to pack; None = all N.
        tokens_per_pack: budget, in packed tokens.

    Returns:
        The packs, deterministic in the arguments. Together they hold each given row that has sampled tokens
        once.

    Raises:
        ValueError: `tokens_per_pack` is not positive, or the first token of an episode is marked as sampled.
    """
    if tokens_per_pack < 1:
        raise ValueError(f"tokens_per_pack={tokens_per_pack}: a pack needs room for at least one token; raise it")
    bins: list[_Bin] = []
    for same_prefix in _by_prefix(episodes, rows):
        for item in _split(episodes, same_prefix, tokens_per_pack):
            # First fit: a prefix stays whole if any pack has room for it, since every split repeats the
            # prefix.
            fitting = (b for b in bins if b.num_tokens + item.num_tokens <= tokens_per_pack)
            target = next(fitting, None)
            if target is None:
                target = _Bin()
                bins.append(target)
            target.add(item)
    return [_build(episodes, b.items) for b in bins]


def fill_packs(
    episodes: Sequence[Episode], rows: Sequence[int] | IntArray | None, tokens_per_pack: int, rows_per_pack: int
) -> list[Pack]:
    """The same where a pack costs all of its tokens, used or not: a prefix is repeated wherever that fills a pack.

    Large groups come first, and in each of them long rows.

    Args:
        episodes: all N episodes of the batch.
        rows: row numbers to pack; None = all N.
        tokens_per_pack: tokens of a pack; no sequence is longer.
        rows_per_pack: most rows of a pack.

    Raises:
        ValueError: the first token of an episode is marked as sampled, or a sequence is longer than a pack.
    """
    groups = _by_prefix(episodes, rows)
    needed = {row: _suffix_len(episodes[row]) for same in groups for row in same}
    bins: list[_Bin] = []
    for group in sorted(groups, key=lambda same: -sum(needed[row] for row in same)):
        same = sorted(group, key=lambda row: -needed[row])
        lengths = [needed[row] for row in same]
        first = episodes[same[0]]
        prefix = first.token_ids[: first.prompt_length]
        if len(prefix) + lengths[0] > tokens_per_pack:
            raise ValueError(
                f"row {same[0]}: its {len(prefix) + lengths[0]} tokens are more than the "
                f"{tokens_per_pack} of a pack; raise tokens_per_pack"
            )
        done = 0
        while done < len(same):
            open_ones = [(_fitting(b, len(prefix), lengths[done:], tokens_per_pack, rows_per_pack), b) for b in bins]
            # as many rows as possible; of packs that take equally many, the fullest
            count, target = max(open_ones, key=lambda one: (one[0], one[1].num_tokens), default=(0, _Bin()))
            whole = count == len(same) - done
            if not whole and sum(lengths[done : done + count]) <= len(prefix):  # it would fill less than it costs
                target = _Bin()
                count = _fitting(target, len(prefix), lengths[done:], tokens_per_pack, rows_per_pack)
                bins.append(target)
            num_tokens = len(prefix) + sum(lengths[done : done + count])
            target.add(_Item(prefix, same[done : done + count], num_tokens))
            done += count
    return [_build(episodes, b.items) for b in bins]


def _by_prefix(episodes: Sequence[Episode], rows: Sequence[int] | IntArray | None) -> list[list[int]]:
    """Rows with equal prefixes together; those without a sampled token are left out."""
    chosen = range(len(episodes)) if rows is None else [int(row) for row in rows]
    by_prefix: dict[bytes, list[int]] = {}
    for row in chosen:
        episode = episodes[row]
        if not episode.sampled.any():
            continue
        if episode.sampled[0]:
            raise ValueError(
                f"row {row}: its first token is marked as sampled, but nothing precedes it to predict it; "
                "begin the episode with a prompt of at least one token"
            )
        prefix = np.ascontiguousarray(episode.token_ids[: episode.prompt_length], dtype=np.int64)
        by_prefix.setdefault(prefix.tobytes(), []).append(row)
    return list(by_prefix.values())


def _fitting(bin_: _Bin, prefix_len: int, lengths: Sequence[int], tokens: int, rows: int) -> int:
    """How many of the rows, from the first on, a pack still takes together with their prefix."""
    room = tokens - bin_.num_tokens - prefix_len
    fitting = int(np.searchsorted(np.cumsum(lengths), room, side="right")) if room >= 0 else 0
    return min(fitting, rows - bin_.num_rows)


def _suffix_len(episode: Episode) -> int:
    """Tokens after the prefix that some sampled token needs as input: all before the last sampled one."""
    last_sampled = int(np.flatnonzero(episode.sampled)[-1])
    return last_sampled - episode.prompt_length


def _split(episodes: Sequence[Episode], rows: list[int], budget: int) -> list[_Item]:
    """Cut rows that share a prefix into as few items of at most `budget` tokens as their order allows."""
    prefix = episodes[rows[0]].token_ids[: episodes[rows[0]].prompt_length]
    items: list[_Item] = []
    for row in rows:
        length = _suffix_len(episodes[row])
        if not items or items[-1].num_tokens + length > budget:
            items.append(_Item(prefix, [], len(prefix)))
        items[-1].rows.append(row)
        items[-1].num_tokens += length
    return items


def _build(episodes: Sequence[Episode], items: list[_Item]) -> Pack:
    token_ids: list[IntArray] = []
    position_ids: list[IntArray] = []
    score_at: list[IntArray] = []
    targets: list[IntArray] = []
    row_of: list[IntArray] = []
    column_of: list[IntArray] = []
    blocks: list[Block] = []
    rows: list[int] = []
    start = 0
    for item in items:
        prefix_len = len(item.prefix)
        token_ids.append(item.prefix)
        position_ids.append(np.arange(prefix_len))
        suffix_start = start + prefix_len
        suffix_lens: list[int] = []
        for row in item.rows:
            episode = episodes[row]
            length = _suffix_len(episode)
            token_ids.append(episode.token_ids[prefix_len : prefix_len + length])
            position_ids.append(np.arange(prefix_len, prefix_len + length))
            sampled_at = np.flatnonzero(episode.sampled)
            # The token before a sampled one predicts it: the prefix's last token, or one of this row's
            # suffix.
            before = sampled_at - 1
            in_suffix = before - prefix_len + suffix_start
            score_at.append(np.where(before < prefix_len, start + before, in_suffix))
            targets.append(episode.token_ids[sampled_at])
            row_of.append(np.full(len(sampled_at), len(rows)))
            column_of.append(np.arange(len(sampled_at)))
            rows.append(row)
            suffix_lens.append(length)
            suffix_start += length
        blocks.append(Block(start, prefix_len, tuple(suffix_lens)))
        start = suffix_start
    return Pack(
        token_ids=_join(token_ids),
        position_ids=_join(position_ids),
        blocks=tuple(blocks),
        score_at=_join(score_at),
        targets=_join(targets),
        row=_join(row_of),
        column=_join(column_of),
        rows=np.asarray(rows, dtype=np.int64),
    )


def _join(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts).astype(np.int64, copy=False)
