"""Groups of an agent's episodes, played and scored by their worlds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from covey.errors import EpisodeError
from covey.rollout.agents import Player
from covey.rollout.collect import Rollout
from covey.rollout.credit import trajectory_rewards
from covey.rollout.playing import TurnGenerator
from covey.types import Group, Progress, Prompt, SamplingSettings

if TYPE_CHECKING:
    from covey.environments.config import EnvironmentConfig


class AgentCollector:
    """Plays each task in its world; a `covey.rollout.collect.Collector`.

    Args:
        generator: samples the turns.
        player: plays the episodes.
        environment: says what failed episodes count for.
    """

    def __init__(self, generator: TurnGenerator, player: Player, environment: EnvironmentConfig) -> None:
        self._generator, self._player, self._environment = generator, player, environment

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
        """Play `num_generations` episodes of each task.

        Raises:
            GenerationError: from the generator.
            EpisodeError: not a single episode of the step got as far as a turn.
        """
        played = self._player.play(
            prompts,
            self._generator,
            settings,
            num_generations=num_generations,
            streams=streams,
            policy_version=policy_version,
            progress=progress,
        )
        groups = tuple(
            Group(
                prompt=prompt,
                episodes=tuple(chain.from_iterable(t.episodes for t in trajectories)),
                rewards=trajectory_rewards(trajectories, self._environment),
                trajectories=tuple(trajectories),
            )
            for prompt, trajectories in zip(prompts, played, strict=True)
        )
        everything = list(chain.from_iterable(played))
        if not any(trajectory.episodes for trajectory in everything):
            error = next(t.error for t in everything)
            raise EpisodeError(f"no episode got as far as a turn; the first one: {error}")
        sampled = sum(episode.num_sampled for group in groups for episode in group.episodes)
        stats = self._player.stats
        return Rollout(groups, stats.seconds, 0.0, sampled, played=stats)

    def prepare(self, prompts: Sequence[Prompt], *, num_generations: int, streams: Sequence[tuple[int, ...]]) -> None:
        """Reset the worlds of the next call now, while something else goes on."""
        self._player.prepare(prompts, num_generations=num_generations, streams=streams)

    def close(self) -> None:
        """End the environments' processes; they start anew when they are needed."""
        self._player.close()
