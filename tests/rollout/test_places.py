"""Ids of places in pictures, and what tokens are turned by, in sequences, forests and pieces of them."""

import numpy as np

from covey.rollout.packing import Pack, count_tokens, pack_episodes
from covey.rollout.places import PLACE_BITS, place_ids, place_of, sequence_turns
from covey.rollout.walking import pieces_of, walk
from covey.types import PICTURES, Episode, IntArray

WIDE, TALL = place_ids(b"a" * 32, 6, 3), place_ids(b"b" * 32, 4, 1)
PLAIN = place_ids(b"c" * 32, 1000)


def episode(*parts: IntArray | list[int], answer: list[int]) -> Episode:
    ids = np.concatenate([*parts, answer]).astype(np.int64)
    sampled = np.arange(len(ids)) >= len(ids) - len(answer)
    return Episode(ids, sampled, np.zeros(len(ids), np.float32), "", "stop", 0)


def by_walking(ids: IntArray, sizes: dict[int, tuple[int, int]]) -> IntArray:
    """Token by token; the last picture may be cut."""
    found, at, i = np.zeros((3, len(ids)), np.int64), 0, 0
    while i < len(ids):
        rows, columns = sizes.get(int(ids[i]) >> PLACE_BITS, (0, 0))
        if not rows:
            found[:, i] = at
            at, i = at + 1, i + 1
            continue
        for k in range(min(rows * columns, len(ids) - i)):
            found[:, i + k] = at, at + k // columns, at + k % columns
        at, i = at + max(rows, columns), i + rows * columns
    return found


SIZES = {int(WIDE[0]) >> PLACE_BITS: (2, 3), int(TALL[0]) >> PLACE_BITS: (4, 1)}


def test_positions_of_a_picture_by_hand() -> None:
    turns = sequence_turns(np.array([5, *WIDE, 6, 7]))
    assert turns.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5],
        [0, 1, 1, 1, 2, 2, 2, 4, 5],
        [0, 1, 2, 3, 1, 2, 3, 4, 5],
    ]
    assert sequence_turns(np.array([5, 6]), np.array([7])).tolist() == [0, 1, 0]
    assert sequence_turns(np.array([5, *PLAIN[:3], 6])).tolist() == [0, 1, 2, 3, 4]  # a family that counts places


def test_ids_of_places() -> None:
    for ids, columns in ((WIDE, 3), (TALL, 1), (PLAIN, 512)):
        assert place_of(ids, columns).tolist() == list(range(len(ids)))
        assert len(set((ids >> PLACE_BITS).tolist())) == 1
        assert ids.min() >= PICTURES
        assert ids.dtype == np.int64


def test_a_group_computes_the_places_of_a_prompt_once() -> None:
    """Eight answers of 50 tokens to 1,100, of which 1,000 are places; nothing follows an answer's last token."""
    rows = [episode([*range(40)], PLAIN, [*range(60)], answer=[n] * 50) for n in range(8)]
    (pack,) = pack_episodes(rows, tokens_per_pack=10_000)
    counted = count_tokens(rows, range(8), pack.num_tokens)
    assert (counted.raw, counted.unique, counted.computed) == (8 * 1149, 1100 + 8 * 49, 1100 + 8 * 49)


def packed() -> Pack:
    first, second = [[5, 6], WIDE, [7], TALL, [8, 9]], [[5, 6], TALL, [7]]
    rows = [episode(*first, answer=[1, 2, 3]), episode(*first, answer=[1, 4, 3, 2]), episode(*first, answer=[4, 4])]
    rows += [episode(*second, answer=[1, 2]), episode(WIDE, answer=[1, 2]), episode([5, 6, 1], answer=[3, 3])]
    rows.append(episode([7], WIDE, WIDE, answer=[2, 1]))
    return pack_episodes(rows)[0]


def test_each_token_of_a_pack_is_turned_as_in_its_own_sequence() -> None:
    pack = packed()
    assert pack.num_tokens < sum(map(len, pack.sequences()))
    for index in range(pack.num_tokens):
        path = pack.path(index)
        assert (pack.turns[:, path] == by_walking(pack.token_ids[path], SIZES)).all()


def test_pieces_keep_their_positions() -> None:
    pack = packed()
    pieces = []
    walk(pieces_of(pack, 12), pieces.append, lambda piece, _: None)
    assert len(pieces) > 3
    assert any(piece.trunk for piece in pieces)
    known = {
        (int(t), int(p), *turn) for t, p, turn in zip(pack.token_ids, pack.position_ids, pack.turns.T, strict=True)
    }
    for piece in pieces:
        own = zip(piece.token_ids, piece.position_ids, piece.turns.T, strict=True)
        assert {(int(t), int(p), *turn) for t, p, turn in own} <= known


def test_text_is_turned_by_its_places() -> None:
    (pack,) = pack_episodes([episode([5, 6], answer=[1, 2]), episode([5, 6], answer=[1, 3, 4])])
    assert pack.turns is pack.position_ids
