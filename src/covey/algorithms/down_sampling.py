"""Which completions of a group are trained on: sampling many is cheap, learning from all of them may not be.

    def longest(group, size):
        return np.argsort([-episode.num_sampled for episode in group.episodes], kind="stable")[:size]

A rule takes a scored `Group` and a number and returns that many indices of its completions (of an agent's episodes),
in any order. `algorithm.down_sampling` names a built-in one or `FILE.py:RULE`. What is not chosen leaves the loss like
anything that is masked, and stays in tables and metrics.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from covey.algorithms.arrays import locked
from covey.errors import ConfigError, naming
from covey.functions import load_function
from covey.types import BoolArray, Group

Statistics = Literal["selected", "group"]


def lengths(group: Group) -> NDArray[np.int64]:
    """`[G]` sampled tokens of each completion, of an agent's episode those of all its turns."""
    if group.trajectories:
        return np.array([sum(e.num_sampled for e in trajectory.episodes) for trajectory in group.trajectories])
    return np.array([episode.num_sampled for episode in group.episodes])


def max_variance(group: Group, size: int) -> NDArray[np.int64]:
    """PODS (arXiv 2504.13818, algorithm 2): the subset whose rewards vary most.

    It always consists of some of the lowest and some of the highest rewards. Of 0, 0, 1, 2 the two are 0 and 2; of ten
    right and two wrong completions, four are the two wrong ones and two right ones.
    """
    scored, rewards = _scored(group), group.rewards
    order = scored[np.argsort(rewards[scored], kind="stable")]  # from the lowest to the highest
    size = min(size, len(order))
    best, chosen = -1.0, order[:size]
    rounding = (1e-12 * np.abs(rewards[scored]).max(initial=0.0)) ** 2
    for high in range(size + 1):
        both = np.concatenate([order[: size - high], order[len(order) - high :]])
        variance = float(np.var(rewards[both]))
        # The same variance by rounding alone changes nothing: the fewest high rewards that reach it.
        if variance > best + max(1e-12 * best, rounding):
            best, chosen = variance, both
    return chosen


def largest_advantage(group: Group, size: int) -> NDArray[np.int64]:
    """CPPO (arXiv 2503.22342): the completions whose rewards are farthest from the group's mean."""
    scored = _scored(group)
    distance = np.abs(group.rewards[scored] - group.rewards[scored].mean())
    return scored[np.argsort(-distance, kind="stable")[:size]]


def shortest(group: Group, size: int) -> NDArray[np.int64]:
    """GFPO (arXiv 2508.09726): the shortest completions, so that length is not learnt."""
    scored = _scored(group)
    return scored[np.argsort(lengths(group)[scored], kind="stable")[:size]]


def token_efficiency(group: Group, size: int) -> NDArray[np.int64]:
    """GFPO (arXiv 2508.09726): those with the most reward for each token."""
    scored = _scored(group)
    each = group.rewards[scored] / np.maximum(lengths(group)[scored], 1)
    return scored[np.argsort(-each, kind="stable")[:size]]


def first(group: Group, size: int) -> NDArray[np.int64]:
    """Any: what the others are to be compared with."""
    return _scored(group)[:size]


def _scored(group: Group) -> NDArray[np.int64]:
    return np.flatnonzero(~np.isnan(group.rewards))


Rule = Callable[[Group, int], Any]

DOWN_SAMPLING: Mapping[str, tuple[Rule, Statistics]] = {
    "max_variance": (max_variance, "selected"),
    "largest_advantage": (largest_advantage, "group"),
    "shortest": (shortest, "selected"),
    "token_efficiency": (token_efficiency, "selected"),
    "first": (first, "selected"),
}
"""Name -> the rule, and of which completions its paper takes mean and spread."""


@dataclass(frozen=True, slots=True)
class DownSampling:
    """A rule with its number."""

    name: str
    rule: Rule
    size: int
    statistics: Statistics

    def __call__(self, group: Group) -> BoolArray:
        """`[G]` True for what is trained on: all of a group that is not larger than `size`.

        Raises `ConfigError`: the rule is somebody's own and raised, or returned what are no indices of the group.
        """
        count = len(group.rewards)
        kept = np.ones(count, np.bool_)
        if count <= self.size or np.isnan(group.rewards).all():  # of which nothing is known: the estimator gives all 0
            return kept
        with naming(f"down_sampling={self.name!r}: it"):
            found = np.asarray(self.rule(locked(group), self.size))
        whole = found.ndim == 1 and (np.issubdtype(found.dtype, np.integer) or not found.size)
        if not whole or len(set(found.tolist())) < found.size or not all(0 <= n < count for n in found.tolist()):
            raise ConfigError(
                f"down_sampling={self.name!r}: it returned {np.array2string(found, threshold=8)!s:.200} for a group of "
                f"{count}; return the indices of up to {self.size} completions, each once, from 0 to {count - 1}"
            )
        if found.size > self.size:
            raise ConfigError(
                f"down_sampling={self.name!r}: it returned {found.size} indices and was asked for {self.size}"
            )
        return np.isin(np.arange(count), found)


def read_down_sampling(text: str) -> tuple[str, int, Statistics | None]:
    """`algorithm.down_sampling`, `RULE:SIZE` or `RULE:SIZE:STATISTICS`, where `RULE` is `none`, a name or
    `FILE.py:NAME`: the rule, the size (4 where none is given), and the statistics, if they are given.

    Raises `ValueError`: no such name, or a size below 1.
    """
    name, statistics, size = text, None, 4
    for each in get_args(Statistics):
        if text.endswith(f":{each}"):
            name, statistics = text.removesuffix(f":{each}"), each
    rule, _, number = name.rpartition(":")
    if number.isdecimal():
        name, size = rule, int(number)
    rule, colon, rest = name.partition(":")
    if colon and rule in (*DOWN_SAMPLING, "none"):
        odd = rest.rpartition(":")[2]
        raise ValueError(f"{odd!r} is not a number and neither selected nor group; write {rule}:4 or {rule}:4:group")
    if size < 1 or (":" not in name and name not in (*DOWN_SAMPLING, "none")):
        near = difflib.get_close_matches(name, DOWN_SAMPLING, n=1)
        fix = f"; did you mean {near[0]!r}?" if near and near[0] != name else ""
        raise ValueError(
            f"must be none | {' | '.join(DOWN_SAMPLING)} or FILE.py:RULE, with a number of completions after it, such "
            f"as max_variance:4{fix}"
        )
    return name, size, statistics


def find_down_sampling(text: str) -> DownSampling | None:
    """The rule that `read_down_sampling` reads; its advantages are compared within the chosen, unless the paper of the
    rule or `STATISTICS` says otherwise. None for `none`.

    Raises `ConfigError`: a rule in a file cannot be found.
    """
    name, size, statistics = read_down_sampling(text)
    if name == "none":
        return None
    own: tuple[Rule, Statistics]
    own = (load_function(name), "selected") if ":" in name else DOWN_SAMPLING[name]
    return DownSampling(name, own[0], size, statistics or own[1])
