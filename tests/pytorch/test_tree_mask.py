"""The mask of a pack from intervals: against a walk to the root, against what the parts attend to, and by blocks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from forests import forest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from covey.pytorch.attention import tree_parts
from covey.pytorch.attention.tree_flex import Lists
from covey.pytorch.attention.tree_layout import TreeLayout
from covey.pytorch.attention.tree_mask import Mask, sees
from covey.rollout.packing import Branch, pack_episodes
from covey.rollout.walking import Piece, pieces_of
from covey.types import Episode

WINDOWS = st.sampled_from([None, None, 1, 3, 20])


def ancestors(branches: list[Branch], past: int, window: int | None) -> np.ndarray:
    """`[M, past + M]` whom each token sees: itself and, from parent to parent, all before it as far as the window."""
    length = branches[-1].stop
    parent: dict[
        int, int
    ] = {}  # of each token the one before it, by its index in the past and then the pack; -1 = none
    for branch in branches:
        before = past + branches[branch.parent].start if branch.parent >= 0 else 0
        parent |= {past + token: past + token - 1 for token in range(branch.start, branch.stop)}
        parent[past + branch.start] = before + branch.at - 1
        if branch.parent < 0 and branch.at == 0:
            parent[past + branch.start] = -1
    found = np.zeros((length, past + length), np.bool_)
    for query in range(length):
        key, steps = past + query, 0
        while key >= 0 and (window is None or steps < window):
            found[query, key] = True
            key, steps = parent[key] if key >= past else key - 1, steps + 1
    return found


def attended(branches: list[Branch], past: int, window: int | None) -> np.ndarray:
    """The same of the parts: equal scores, and each key's value its own direction, so that its weight shows."""
    length = branches[-1].stop
    zeros, values = torch.zeros(past + length, 1, 2), torch.eye(past + length)[:, None]
    layout = TreeLayout.of(branches, past=past)
    above = (zeros[:past], values[:past]) if past else None
    out, _ = tree_parts.forward(layout, *(zeros[past:],) * 2, values[past:], above, scale=1.0, window=window)
    return (out[:, 0] > 0).numpy()


def without_padding(mask: Mask, past: int, length: int) -> np.ndarray:
    dense = mask.dense()
    assert not dense[:length, past : len(mask.first) - len(mask.since)].any()  # nobody sees what fills up the past
    own = dense[:, -len(mask.since) :]
    assert np.array_equal(own[length:], np.eye(len(own), dtype=np.bool_)[length:])  # what fills up the pack: itself
    assert not own[:length, length:].any()
    return np.concatenate([dense[:length, :past], own[:length, :length]], axis=1)


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6), past=st.sampled_from([0, 1, 7, 12]), window=WINDOWS, block=st.sampled_from([4, 8, 128])
)
def test_the_mask_is_that_of_a_walk_to_the_root_and_of_the_parts(
    seed: int, past: int, window: int | None, block: int
) -> None:
    branches = forest(seed, past=past, depth=5, ordered=True)
    found = without_padding(Mask.of(branches, past, window, block), past, branches[-1].stop)
    assert np.array_equal(found, ancestors(branches, past, window))
    assert np.array_equal(found, attended(branches, past, window))


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    past=st.sampled_from([0, 1, 7, 40]),
    window=WINDOWS,
    longest=st.sampled_from([6, 30]),
    block=st.sampled_from([4, 16]),
)
def test_its_blocks_are_those_of_the_whole_mask(
    seed: int, past: int, window: int | None, longest: int, block: int
) -> None:
    """PyTorch writes the mask out; here it is not."""
    mask = Mask.of(forest(seed, past=past, longest=longest, depth=5, ordered=True), past, window, block)
    first, leave, position, since = map(torch.from_numpy, (mask.first, mask.leave, mask.position, mask.since))

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found: Tensor = sees(query, since[query], first[key], leave[key], position[key])
        return found

    theirs = create_block_mask(visible, None, None, len(since), len(first), device="cpu", BLOCK_SIZE=block)
    for name, value in Lists.of(mask)._asdict().items():
        if "_" in name:
            assert torch.equal(value, getattr(theirs, name)), name


def test_three_tokens_by_hand() -> None:
    """A past of 2; a token after both, one after that, and one after the first of the past."""
    mask = Mask.of([Branch(0, 2, -1, 2), Branch(2, 1, -1, 1)], 2, None, 2)
    assert mask.first.tolist() == [0, 0, 0, 1, 2, 3]
    assert mask.leave.tolist() == [3, 2, 2, 2, 3, 4]
    assert mask.position.tolist() == [0, 1, 2, 3, 1, 0]
    assert mask.since.tolist() == [0, 0, 0, 0]
    assert Mask.of([Branch(0, 2, -1, 2), Branch(2, 1, -1, 1)], 2, 2, 2).since.tolist() == [1, 2, 0, 0]
    partial, full = mask.blocks()
    assert partial.tolist() == [[False, True, False], [True, False, True]]
    assert full.tolist() == [[True, False, False], [False, False, False]]


def test_the_order_of_what_leaves_the_past() -> None:
    with pytest.raises(ValueError, match=r"leave the past after \[1, 2\] tokens: those that leave it last come first"):
        Mask.of([Branch(0, 2, -1, 1), Branch(2, 1, -1, 2)], 2, None, 128)


def all_of(pieces: list[Piece]) -> Iterator[Piece]:
    for piece in pieces:
        yield piece
        yield from all_of(list(piece.followers))


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.integers(4, 40), window=WINDOWS)
def test_pieces_of_a_walk_are_in_that_order(seed: int, budget: int, window: int | None) -> None:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 2, rng.integers(3, 20)) for _ in range(rng.integers(2, 12))]
    episodes = [Episode(r, np.arange(len(r)) > 0, np.zeros(len(r), np.float32), "", "stop", 0) for r in rows]
    for pack in pack_episodes(episodes, tokens_per_pack=10**6, whole_trees=True):
        for piece in all_of(pieces_of(pack, budget)):
            branches = list(piece.branches)
            found = without_padding(Mask.of(branches, piece.past, window, 4), piece.past, piece.num_tokens)
            assert np.array_equal(found, ancestors(branches, piece.past, window))
