"""Sample a group of completions for each prompt and score them, again where they teach nothing if asked.

`AnswerCollector` asks reward functions for the scores of single answers; `AgentCollector` plays episodes, which their
worlds score.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from covey.errors import EpisodeError
from covey.rollout.batching import trajectory_rewards
from covey.rollout.scoring import Scorer
from covey.rollout.turns import TurnGenerator
from covey.types import Episode, Generator, Group, Message, Progress, Prompt, Request, SamplingSettings, Turn

if TYPE_CHECKING:  # single answers need none of it
    from covey.rollout.agents import Player, PlayStats

Rewards = NDArray[np.float64]
Decode = Callable[[Sequence[int]], str]
"""Token ids of a completion -> text without special tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """Scored groups with what it cost to get them."""

    groups: tuple[Group, ...]  # one for each prompt, in order
    sampling_seconds: float  # wall time in the generator
    scoring_seconds: float  # wall time in the reward functions
    sampled_tokens: int  # tokens that the policy sampled, those of groups later discarded included
    discarded: tuple[Group, ...] = ()  # groups that were sampled but are not trained on (dynamic sampling only)
    played: PlayStats | None = None  # what playing cost (agents and tools only)

    @property
    def whole(self) -> Rollout:
        """With the discarded groups after the others: all that was sampled."""
        return replace(self, groups=self.groups + self.discarded, discarded=())

    @property
    def counted(self) -> Rollout:
        """The same without completions that groups were grown by: what says how good the policy is."""
        whole = self.whole
        return replace(whole, groups=tuple(group.first for group in whole.groups))

    @property
    def metrics(self) -> dict[str, float]:
        """What there is to tell of agents and tools, discarded groups included."""
        if self.played is None:
            return {}
        from covey.rollout.agents import play_metrics, tool_metrics

        groups = self.counted.groups
        if not any(group.trajectories for group in groups):
            return tool_metrics(sum(len(group.episodes) for group in self.whole.groups), self.played)
        found, alike = play_metrics([t for g in groups for t in g.trajectories], self.played), same_action_ratio(groups)
        return found if alike is None else found | {"agent/same_action_ratio": alike}


class Collector(Protocol):
    """Samples and scores a group for each prompt: single answers, or episodes of an agent."""

    def __call__(
        self,
        prompts: Sequence[Prompt],
        settings: SamplingSettings,
        *,
        num_generations: int,
        streams: Sequence[tuple[int, ...]],
        policy_version: int,
        progress: Progress | None = None,
    ) -> Rollout:
        """The rollout.

        Args:
            prompts: one for each group.
            settings: how tokens are drawn.
            num_generations: group size G.
            streams: for each prompt, the key of its random stream; the sample's index is appended.
            policy_version: version of the weights that must be sampled from.
            progress: called with (finished, total) completions.
        """
        ...

    def prepare(self, prompts: Sequence[Prompt], *, num_generations: int, streams: Sequence[tuple[int, ...]]) -> None:
        """Begin what the next call needs, while something else goes on."""

    def close(self) -> None:
        """End what runs beside this process; what is needed again starts anew."""


class Scoring:
    """A collector that has nothing to prepare, and whose only threads are those of its reward functions."""

    scorer: Scorer

    def scored(
        self,
        prompts: Sequence[Prompt],
        owners: Sequence[Prompt],
        episodes: Sequence[Episode],
        began: float,
        messages: Sequence[Sequence[Message]] | None = None,
    ) -> Rollout:
        """A group for each prompt, all of one size, of N episodes that follow one another.

        Args:
            prompts: one for each group.
            owners: N prompts, whose columns reward functions get.
            episodes: N, sampled from `began` (of `time.perf_counter`) until now.
            began: in seconds.
            messages: what reward functions see in place of `episode.text`.

        Raises `RewardError`: from a reward function.
        """
        sampled, size = time.perf_counter(), len(episodes) // max(len(prompts), 1)
        rewards, parts = self.scorer.score(owners, episodes, messages)
        feedback = self.scorer.feedback(len(episodes))
        places = [slice(index * size, (index + 1) * size) for index in range(len(prompts))]
        groups = tuple(
            Group(p, tuple(episodes[own]), rewards[own], {n: x[own] for n, x in parts.items()}, feedback=feedback[own])
            for p, own in zip(prompts, places, strict=True)
        )
        tokens = sum(episode.num_sampled for episode in episodes)
        return Rollout(groups, sampled - began, time.perf_counter() - sampled, tokens)

    def prepare(self, prompts: Sequence[Prompt], *, num_generations: int, streams: Sequence[tuple[int, ...]]) -> None:
        """Nothing to prepare."""

    def close(self) -> None:
        """End the reward functions' threads."""
        self.scorer.close()


@dataclass(frozen=True, slots=True, eq=False)
class AnswerCollector(Scoring):
    """Single answers, scored by reward functions; a `Collector`."""

    generator: Generator  # who samples
    scorer: Scorer  # the reward functions with their weights
    decode: Decode

    def __call__(
        self, prompts: Sequence[Prompt], settings: SamplingSettings, *, num_generations: int, streams: Any, **how: Any
    ) -> Rollout:
        """Sample `num_generations` completions for each prompt and score all of them in one call; see `Collector`.

        Raises:
            GenerationError: from the generator.
            RewardError: from a reward function; nothing was trained on, so the run can be resumed before this step.
        """
        began = time.perf_counter()
        requests = [
            Request(prompt.token_ids, (*stream, sample))
            for prompt, stream in zip(prompts, streams, strict=True)
            for sample in range(num_generations)
        ]
        completions = self.generator(requests, settings, **how)
        owners = [prompt for prompt in prompts for _ in range(num_generations)]
        texts = [self.decode(completion.token_ids.tolist()) for completion in completions]
        episodes = [Episode.from_completion(*each) for each in zip(owners, completions, texts, strict=True)]
        return self.scored(prompts, owners, episodes, began)


def with_greedy_rewards(
    rollout: Rollout,
    collect: Collector,
    settings: SamplingSettings,
    *,
    streams: Sequence[tuple[int, ...]],
    policy_version: int,
) -> Rollout:
    """The rollout with `Group.greedy_reward`: one greedy completion, or episode, is scored for each group's prompt."""
    prompts = [group.prompt for group in rollout.groups]
    found = collect(prompts, settings, num_generations=1, streams=streams, policy_version=policy_version)
    both = zip(rollout.groups, found.groups, strict=True)
    groups = [replace(group, greedy_reward=float(greedy.rewards[0])) for group, greedy in both]
    return replace(together([rollout, found], groups, rollout.discarded), played=rollout.played)


def collect_informative_groups(
    collect: Callable[[int], Rollout], wanted: int, max_tries: int, teaches: Callable[[Group], bool]
) -> Rollout:
    """Sample until `wanted` groups teach something, or the tries are used up (DAPO, arXiv 2503.14476).

    A step that stays short trains on the partial batch: the other groups would add nothing to the gradient. When no
    group at all teaches, the last try's groups are returned so that the step still has rewards to report. `collect`
    draws the next k prompts and returns their scored groups; `teaches` asks the advantage estimator.
    """
    kept: list[Group] = []
    tries: list[Rollout] = []
    while len(kept) < wanted and len(tries) < max_tries:
        tries.append(collect(wanted - len(kept)))
        kept.extend(group for group in tries[-1].groups if teaches(group))
    groups = tuple(kept) or tries[-1].groups
    trained = {id(group) for group in groups}
    discarded = tuple(group for rollout in tries for group in rollout.groups if id(group) not in trained)
    return together(tries, groups, discarded)


def together(tries: Sequence[Rollout], groups: Sequence[Group], discarded: Sequence[Group] = ()) -> Rollout:
    """These groups, with what all tries have cost."""
    played = [rollout.played for rollout in tries if rollout.played is not None]
    return Rollout(
        groups=tuple(groups),
        sampling_seconds=sum(rollout.sampling_seconds for rollout in tries),
        scoring_seconds=sum(rollout.scoring_seconds for rollout in tries),
        sampled_tokens=sum(rollout.sampled_tokens for rollout in tries),
        discarded=tuple(discarded),
        played=sum(played[1:], played[0]) if played else None,
    )


def grow_groups(
    rollout: Rollout,
    collect: Callable[[Sequence[int], int, int], Rollout],
    most: int | None,
    teaches: Callable[[Group], bool],
) -> Rollout:
    """Sample on where a question is hard: groups that teach nothing and are worse than the best completion of the step.

    Such a group gets as many completions again, until its rewards differ or it has `most`. One whose rewards are all
    the best that the step has seen has nothing to find, and so has every group while nothing differs at all.
    """
    groups, tries, size = list(rollout.groups), [rollout], len(rollout.groups[0].rewards)
    best = max((r for group in groups for r in group.rewards.tolist() if not math.isnan(r)), default=-math.inf)
    step = size
    while most is not None and size < most:
        # fmax: a NaN is a completion without a score; a group of these alone is none of the hard ones
        tops = [float(np.fmax.reduce(group.rewards)) for group in groups]
        hard = [n for n, g in enumerate(groups) if len(g.rewards) == size and tops[n] < best and not teaches(g)]
        if not hard:
            break
        count = min(step, most - size)
        tries.append(collect(hard, count, len(tries)))
        for number, more in zip(hard, tries[-1].groups, strict=True):
            groups[number] = groups[number].grown_by(more)
        size += count
    return rollout if len(tries) == 1 else together(tries, groups)


def table_order(groups: Sequence[Group]) -> list[int]:
    """For each completion of these groups, as tables list them, its place among those that were scored.

    Groups that have grown were scored in rounds: first all of the groups, then what was added to them.
    """
    rounds = [
        (sample // max(len(group.rewards) - group.added, 1), number, sample)
        for number, group in enumerate(groups)
        for sample in range(len(group.rewards))
    ]
    scored = sorted(range(len(rounds)), key=rounds.__getitem__)
    return [int(place) for place in np.argsort(scored)]  # the inverse


class AgentCollector:
    """Plays each task in its world; a `covey.rollout.collect.Collector`."""

    def __init__(self, generator: TurnGenerator, player: Player) -> None:
        self._generator, self.player = generator, player

    def __call__(self, prompts: Sequence[Prompt], settings: SamplingSettings, **what: Any) -> Rollout:
        """Play `num_generations` episodes of each task; the arguments are those of `Collector`.

        Raises `GenerationError`: from the generator; `EpisodeError`: not a single episode of the step got as far as a
        turn.
        """
        played = self.player.play(prompts, self._generator, settings, **what)
        groups = []
        for prompt, trajectories in zip(prompts, played, strict=True):
            episodes = tuple(chain.from_iterable(t.episodes for t in trajectories))
            rewards = trajectory_rewards(trajectories, self.player.settings)
            groups.append(Group(prompt, episodes, rewards, trajectories=tuple(trajectories)))
        if not any(group.episodes for group in groups):
            raise EpisodeError(f"no episode got as far as a turn; the first one: {played[0][0].error}")
        sampled = sum(episode.num_sampled for group in groups for episode in group.episodes)
        stats = self.player.stats
        return Rollout(tuple(groups), stats.seconds, 0.0, sampled, played=stats)

    def prepare(self, prompts: Sequence[Prompt], *, num_generations: int, streams: Sequence[tuple[int, ...]]) -> None:
        """Reset the worlds of the next call now, while something else goes on."""
        self.player.prepare(prompts, num_generations=num_generations, streams=streams)

    def close(self) -> None:
        """End the environments' processes; they start anew when they are needed."""
        self.player.close()


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
                done = {turn.said if turn.action is None else turn.action for _, turn in turns}
                shared += len(turns)
                alike += len(turns) * (len(done) == 1)
    return alike / shared if shared else None
