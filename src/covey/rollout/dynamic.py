"""Dynamic sampling (DAPO, arXiv 2503.14476): replace groups whose rewards are all equal, in a few tries at most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from covey.rollout.collect import Rollout
from covey.types import Group


@dataclass(frozen=True, slots=True)
class DynamicSampling:
    """How many times a step may sample in all before it trains on the groups that it has."""

    max_tries: int = 3


def collect_informative_groups(collect: Callable[[int], Rollout], wanted: int, settings: DynamicSampling) -> Rollout:
    """Sample until `wanted` groups have rewards that differ, or the tries are used up.

    A step that stays short trains on the partial batch: the tied groups would add nothing to the gradient. When no
    group at all differs, the last try's groups are returned so that the step still has rewards to report.

    Args:
        collect: draws the next k prompts of the data order and returns their scored groups.
        wanted: number of groups that the step should train on.
        settings: see `DynamicSampling`.
    """
    kept: list[Group] = []
    tries: list[Rollout] = []
    while len(kept) < wanted and len(tries) < settings.max_tries:
        tries.append(collect(wanted - len(kept)))
        kept.extend(group for group in tries[-1].groups if not group.is_tied)
    groups = tuple(kept) or tries[-1].groups
    trained = {id(group) for group in groups}
    played = [rollout.played for rollout in tries if rollout.played is not None]
    return Rollout(
        groups=groups,
        sampling_seconds=sum(rollout.sampling_seconds for rollout in tries),
        scoring_seconds=sum(rollout.scoring_seconds for rollout in tries),
        sampled_tokens=sum(rollout.sampled_tokens for rollout in tries),
        discarded=tuple(group for rollout in tries for group in rollout.groups if id(group) not in trained),
        played=sum(played[1:], played[0]) if played else None,
    )
