"""Dynamic sampling (DAPO, arXiv 2503.14476): replace groups that teach nothing, in a few tries at most."""

from __future__ import annotations

from collections.abc import Callable

from covey.rollout.collect import Rollout
from covey.types import Group


def collect_informative_groups(
    collect: Callable[[int], Rollout], wanted: int, max_tries: int, teaches: Callable[[Group], bool]
) -> Rollout:
    """Sample until `wanted` groups teach something, or the tries are used up.

    A step that stays short trains on the partial batch: the other groups would add nothing to the gradient. When no
    group at all teaches, the last try's groups are returned so that the step still has rewards to report.

    Args:
        collect: draws the next k prompts of the data order and returns their scored groups.
        wanted: number of groups that the step should train on.
        max_tries: how many times the step may sample in all.
        teaches: asks the advantage estimator, see `covey.algorithms.Estimator.teaches`.
    """
    kept: list[Group] = []
    tries: list[Rollout] = []
    while len(kept) < wanted and len(tries) < max_tries:
        tries.append(collect(wanted - len(kept)))
        kept.extend(group for group in tries[-1].groups if teaches(group))
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
