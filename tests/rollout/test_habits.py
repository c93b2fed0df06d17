"""How alike the episodes of a group are, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from covey.rollout.habits import same_action_ratio
from covey.types import Group, Trajectory, Turn
from fakes import fake_prompt


def episode(*turns: tuple[str, str | None]) -> Trajectory:
    """Of what was seen and done; None: something that is no action."""
    told = tuple(Turn(seen, did or "hm", did, 0.0, did is not None, 0, n) for n, (seen, did) in enumerate(turns))
    return Trajectory((), told, False, "done")


def group(*episodes: Trajectory) -> Group:
    return Group(fake_prompt(), (), np.zeros(len(episodes)), {}, episodes)


def test_only_what_several_episodes_of_a_group_saw_counts() -> None:
    one = group(
        episode(("hall", "read"), ("note", "left")),
        episode(("hall", "read"), ("note", "left")),
        episode(("hall", "left"), ("left", "take")),  # "left" was seen by this one alone
    )
    # "hall": three turns, two ways; "note": two turns, one way
    assert same_action_ratio([one]) == pytest.approx(2 / 5)
    other = group(episode(("hall", "right")), episode(("hall", "right")))  # another group's hall is another hall
    assert same_action_ratio([one, other]) == pytest.approx(4 / 7)


def test_an_episode_alone_does_not_agree_with_itself() -> None:
    assert same_action_ratio([group(episode(("hall", "wait"), ("hall", "wait")))]) is None
    assert same_action_ratio([group(episode(("a", "x")), episode(("b", "x")))]) is None
    assert same_action_ratio([]) is None


def test_it_counts_where_one_episode_changes_its_mind() -> None:
    assert same_action_ratio([group(episode(("hall", "x"), ("hall", "y")), episode(("hall", "x")))]) == 0.0


def test_what_is_no_action_is_compared_as_it_was_written() -> None:
    assert same_action_ratio([group(episode(("hall", None)), episode(("hall", None)))]) == 1.0
