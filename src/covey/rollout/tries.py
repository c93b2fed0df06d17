"""Sequences as a trie: what several of them begin with is there once, however deep.

    rows      a b c d        nodes   a b          rows 0, 1, 2     depth 0..2
              a b c e                  c          rows 0, 1        depth 2..3
              a b f                      d        row 0            depth 3..4
                                         e        row 1            depth 3..4
                                       f          row 2            depth 2..3

A node is a run of tokens that the same rows have; it begins where rows part, and a row may end at any node. Nothing is
declared: common instructions, a group's prompt, the turns of a conversation and equal completions are found by their
token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from covey.types import IntArray


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens, and what follows it."""

    begin: int  # depth of its first token, counted from the beginning of the sequence
    end: int  # depth after its last one. The root of a forest has no tokens: begin = end = 0
    source: int  # a row that has these tokens, at `begin:end`
    ending: list[int] = field(default_factory=list)  # rows that end here
    children: list[Node] = field(default_factory=list)  # what follows, in the order of their first rows
    size: int = 0  # tokens of the node and of all that follows it

    @property
    def length(self) -> int:
        """Tokens of the node itself."""
        return self.end - self.begin

    def nodes(self) -> Iterator[Node]:
        """The node and all that follow it, parents before children."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += reversed(node.children)


def build_trie(sequences: Mapping[int, IntArray]) -> Node:
    """The trie of row -> `[L]` token ids, in the order of the rows: the root, a node without tokens whose children are
    the trees of the forest.
    """
    order = {row: place for place, row in enumerate(sequences)}
    keys = {row: ids.astype(">u8").tobytes() for row, ids in sequences.items()}  # bytes in the order of the numbers
    rows = sorted(sequences, key=lambda row: (keys[row], order[row]))
    shared = np.array([0, *(in_common(sequences[one], sequences[two]) for one, two in pairwise(rows))])
    root = Node(0, 0, rows[0] if rows else 0)
    waiting = [(root, 0, len(rows))]  # a node, and its rows in the sorted order
    while waiting:
        node, first, last = waiting.pop()
        while first < last and len(sequences[rows[first]]) == node.end:  # a beginning sorts before what it begins
            node.ending.append(rows[first])
            first += 1
        cuts = [first, *(np.flatnonzero(shared[first + 1 : last] == node.end) + first + 1).tolist(), last]
        for begin, end in pairwise(cuts):
            if begin < end:
                whole = len(sequences[rows[begin]]) if end - begin == 1 else int(shared[begin + 1 : end].min())
                child = Node(node.end, whole, rows[begin])
                node.children.append(child)
                waiting.append((child, begin, end))
    earliest: dict[int, int] = {}
    for node in reversed(list(root.nodes())):
        node.size = node.length + sum(child.size for child in node.children)
        node.children.sort(key=lambda child: earliest[id(child)])
        places = [order[row] for row in node.ending] + [earliest[id(child)] for child in node.children[:1]]
        earliest[id(node)] = min(places, default=0)
    return root


def in_common(one: IntArray, two: IntArray) -> int:
    """How many tokens two sequences begin with in common."""
    length = min(len(one), len(two))
    if length == 0 or one[0] != two[0]:
        return 0
    differs = one[:length] != two[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


def partition(root: Node, budget: int) -> list[list[int]]:
    """Part the rows so that each part's own trie has at most `budget` tokens, and little is in several parts.

    From the leaves up: at each node the parts found below it are put together, the largest first, wherever they fit
    with the path to the node, which they then have once. What cannot be put together repeats the path. So parts share
    the deepest nodes that the budget lets them share. A row that is longer than the budget is a part of its own.
    """
    found: dict[int, list[tuple[int, list[int]]]] = {}  # node -> parts: tokens below the node, and rows
    for node in reversed(list(root.nodes())):
        parts = [part for child in node.children for part in found.pop(id(child))]
        parts += [(0, [row]) for row in node.ending]
        merged = _fit(parts, budget - node.end)
        found[id(node)] = [(tokens + node.length, rows) for tokens, rows in merged]
    return [rows for _, rows in found[id(root)]]


def _fit(parts: Sequence[tuple[int, list[int]]], room: int) -> Sequence[tuple[int, list[int]]]:
    """Put parts together, first fit, the largest first; all in their own order where everything fits."""
    if sum(tokens for tokens, _ in parts) <= max(room, 0):
        return [(sum(tokens for tokens, _ in parts), [row for _, rows in parts for row in rows])] if parts else []
    bins: list[tuple[int, list[int]]] = []
    smallest = min(tokens for tokens, _ in parts)
    still: list[int] = []  # bins that may take more
    for tokens, rows in sorted(parts, key=lambda part: -part[0]):
        number = next((n for n in still if tokens == 0 or bins[n][0] + tokens <= room), len(bins))
        if number == len(bins):
            bins.append((tokens, rows))
            still.append(number)
        else:
            bins[number] = (bins[number][0] + tokens, bins[number][1] + rows)
        if smallest > 0 and bins[number][0] + smallest > room:
            still.remove(number)
    return bins
