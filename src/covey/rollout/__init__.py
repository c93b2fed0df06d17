"""From prompts to scored groups to a training batch. Knows no backend, only a `Generator` and arrays."""

from covey.rollout.batching import make_batch
from covey.rollout.collect import Rollout, collect_groups, collect_informative_groups
from covey.rollout.packing import Pack, pack_episodes
from covey.rollout.scoring import Scorer

__all__ = ["Pack", "Rollout", "Scorer", "collect_groups", "collect_informative_groups", "make_batch", "pack_episodes"]
