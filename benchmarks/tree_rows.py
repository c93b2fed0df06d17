"""Rollouts whose rows begin alike, as plain data: token ids drawn from a seed. Needs nothing but Python.

A row is what one optimiser step trains on: a prompt, sampled segments, other tokens between them. What it computes are
its inputs: all tokens before its last sampled one. Inputs of several rows form a trie, whose size is the least that has
to be computed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

VOCABULARY = 49152
"""Of SmolLM2."""
NAMES = ("groups", "preamble", "steps", "conversations", "fork2", "fork4", "fork8", "fork16")

BUDGETS = (1024, 4096, 16384)
"""Tokens of a pack, where packings are compared; at least the longest row."""
FORKED_TREES = {2: 16, 4: 6, 8: 2, 16: 1}
"""For each compression so many that about 2,000 tokens are unique, a quarter of that where small."""

Draw = Callable[[int], list[int]]


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence: tokens, which of them the policy sampled, and the group that it is compared in."""

    token_ids: list[int]
    sampled: list[bool]
    group: int

    @property
    def inputs(self) -> list[int]:
        """All tokens before the last sampled one."""
        return self.token_ids[: max(t for t, sampled in enumerate(self.sampled) if sampled)]


@dataclass(frozen=True, slots=True)
class Play:
    """What a world says in one episode, and answers of the lengths that a sampler gives.

    Attributes:
        opening: begins every prompt of the episode.
        said: tokens that the world says before each answer.
        answers: one for each.
        ask: between history and answer where each turn has a prompt of its own; it does not enter the history.
        group: episodes of one task.
    """

    opening: list[int]
    said: list[list[int]]
    answers: list[list[int]]
    ask: list[int]
    group: int

    def growing(self) -> Row:
        """The episode as one row."""
        tokens, sampled = list(self.opening), [False] * len(self.opening)
        for said, answer in zip(self.said, self.answers, strict=True):
            tokens += said + answer
            sampled += [False] * len(said) + [True] * len(answer)
        return Row(tokens, sampled, self.group)

    def turns(self) -> list[Row]:
        """A row for each turn: opening, what was said and answered so far, the ask, the answer."""
        rows, history = [], list(self.opening)
        for said, answer in zip(self.said, self.answers, strict=True):
            history += said
            before = len(history) + len(self.ask)
            rows.append(Row(history + self.ask + answer, [False] * before + [True] * len(answer), self.group))
            history += answer
        return rows


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained on, and the episodes that a sampler plays; `steps`: with a prompt for each of their turns."""

    name: str
    title: str
    rows: list[Row]
    plays: list[Play]
    steps: bool = False


def make(name: str, *, small: bool = False, seed: int = 0, vocabulary: int = VOCABULARY) -> Workload:
    """The workload of one of `NAMES`; equal arguments give equal tokens."""
    random_ = random.Random(f"{name} {seed}")
    draw = _drawing(random_, vocabulary)
    if name.startswith("fork"):
        compression, node = int(name[4:]), 4 if small else 16
        rows = forked(compression, node, FORKED_TREES[compression], draw)
        lengths = f"{len(rows)} rows of {len(rows[0].token_ids)} tokens"
        return Workload(name, f"{FORKED_TREES[compression]} forked trees, {lengths}", rows, [])
    if name in ("groups", "preamble"):
        size, shortest, longest = (4, 30, 50) if small else (8, 60, 100)
        shared = draw({"groups": 0, "preamble": 200 if small else 1000}[name])
        plays = []
        for group in range(size):
            opening = shared + draw(random_.randrange(55, 66))
            plays += [Play(opening, [[]], [draw(random_.randint(shortest, longest))], [], group) for _ in range(size)]
        title = f"{size} prompts x {size} completions of {shortest} to {longest} tokens"
        title += f" after a preamble of {len(shared)}" if shared else ""
        return Workload(name, title, [play.growing() for play in plays], plays)
    episodes, turns, group_size = (4, 10, 4) if small else (16, 20, 8)
    steps = name == "steps"
    opening, plays = draw(32), []
    for episode in range(episodes):
        if not steps and episode % group_size == 0:
            opening = draw(40)
        said = [draw(6) if steps else draw(12 if turn else 0) for turn in range(turns)]
        answers = [draw(8) for _ in range(turns)]
        plays.append(Play(opening, said, answers, draw(4) if steps else [], episode // group_size))
    title = f"{episodes} episodes x {turns} turns, " + ("a prompt for each turn" if steps else "growing conversations")
    rows = [row for play in plays for row in play.turns()] if steps else [play.growing() for play in plays]
    return Workload(name, title, rows, plays, steps)


def forked(compression: int, node: int, trees: int, draw: Draw) -> list[Row]:
    """Trees of nodes of `node` tokens: a trunk, then binary forks; L leaves are L rows.

    With L = 2 x compression and k = log2(L) levels of forks, a trunk of c = 2L - 2 - 2k nodes gives the compression
    exactly: raw nodes are L(c + k), unique ones c + 2L - 2. Of each node the second half is sampled, so sampled tokens
    are shared too. A leaf ends with one more token, which is sampled and is no input.
    """
    leaves = 2 * compression
    levels = leaves.bit_length() - 1

    def nodes(count: int, group: int) -> Row:
        return Row(draw(count * node), [t % node >= node // 2 for t in range(count * node)], group)

    rows = []
    for tree in range(trees):
        paths = [nodes(2 * leaves - 2 - 2 * levels, tree)]
        for _ in range(levels):
            grown = [(path, nodes(1, tree)) for path in paths for _ in range(2)]
            paths = [Row(path.token_ids + new.token_ids, path.sampled + new.sampled, tree) for path, new in grown]
        rows += [Row(path.token_ids + draw(1), [*path.sampled, True], tree) for path in paths]
    return rows


def mixed(vocabulary: int, seed: int = 0) -> list[Row]:
    """A few rows of every shape for a tiny vocabulary, at most 40 tokens each."""
    draw = _drawing(random.Random(seed), vocabulary)
    opening = draw(9)
    plays = [
        Play(opening, [draw(3) for _ in range(4)], [draw(1 + turn) for turn in range(4)], draw(2), group)
        for group in range(2)
    ]
    return [row for play in plays for row in (play.growing(), *play.turns())] + forked(4, 3, 1, draw)


def count_prefill(rows: Sequence[Row]) -> int:
    """Tokens that a sampler which forgets nothing has to prefill: the prompts' trie without what it has decoded.

    Each row's prompt is all before its last sampled segment. Keys and values of a segment's tokens are there when it
    has been sampled, but for those of its last token.
    """
    prefilled = 0
    trie: dict[int, dict] = {}
    for row in rows:
        node, sampled = trie, row.sampled
        prompt = len(row.inputs)
        while sampled[prompt - 1]:
            prompt -= 1
        for t, token in enumerate(row.token_ids[:prompt]):
            prefilled += token not in node and not (sampled[t] and sampled[t + 1])
            node = node.setdefault(token, {})
    return prefilled


def first(rows: Sequence[Row], tokens: int) -> int:
    """How many rows, from the first on, have at most so many inputs together; at least one."""
    totals = list(accumulate(len(row.inputs) for row in rows))
    return max(1, sum(total <= tokens for total in totals))


def budgets(rows: Sequence[Row]) -> dict[int, int]:
    """The budget that each of `BUDGETS` becomes."""
    longest = max(len(row.token_ids) for row in rows)
    return {budget: max(budget, longest) for budget in BUDGETS}


def _drawing(random_: random.Random, vocabulary: int) -> Draw:
    return lambda count: [random_.randrange(4, vocabulary) for _ in range(count)]


def count_tokens(rows: Sequence[Row]) -> tuple[int, int]:
    """Raw and unique tokens: all inputs, and the nodes of the trie that they form."""
    raw = unique = 0
    trie: dict[int, dict] = {}
    for row in rows:
        node = trie
        for token in row.inputs:
            raw += 1
            unique += token not in node
            node = node.setdefault(token, {})
    return raw, unique


def differences(mine: Mapping[str, Any], truth: Mapping[str, Any]) -> dict[str, float]:
    """Largest difference of `logprobs`, and of all other arrays, gradients, relative to the largest gradient."""
    assert set(mine) == set(truth)
    off = {name: float(abs(mine[name] - truth[name]).max()) for name in truth}
    largest = max(float(abs(truth[name]).max()) for name in truth if name != "logprobs")
    return {"logprob": off.pop("logprobs"), "gradient": max(off.values()) / largest}
