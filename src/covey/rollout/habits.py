"""How alike the episodes of a group are: an action that none of them tries can be neither praised nor blamed."""

from __future__ import annotations

from collections.abc import Iterable

from covey.types import Group, Turn


def same_action_ratio(groups: Iterable[Group]) -> float | None:
    """Of the turns that begin with what several episodes of their group saw, the share of those in which all of these
    episodes did the same; None if no two episodes of a group saw the same. Between 0 and 1.
    """
    shared = alike = 0
    for group in groups:
        met: dict[str, list[tuple[int, Turn]]] = {}
        for number, trajectory in enumerate(group.trajectories):
            for turn in trajectory.turns:
                met.setdefault(turn.observation, []).append((number, turn))
        for turns in met.values():
            if len({number for number, _ in turns}) > 1:
                shared += len(turns)
                alike += len(turns) * (len({_done(turn) for _, turn in turns}) == 1)
    return alike / shared if shared else None


def _done(turn: Turn) -> str:
    return turn.said if turn.action is None else turn.action
