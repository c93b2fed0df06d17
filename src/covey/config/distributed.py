"""The `distributed` section: what samples and trains when one process is not enough."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from covey.config.section import Section


class DistributedConfig(Section, frozen=True):
    """Samplers in other processes and on other machines. Without `samplers`, all of it is as in one process."""

    samplers: int | None = Field(default=None, ge=0, le=100_000)
    """Ray actors that only sample. 0 = this process, or the servers, in the same fixed batches and so with the same
    numbers; none = this process in one call."""
    ray_address: str = Field(default="auto", min_length=1)
    """Ray cluster, HOST:PORT; local = one that is started here and ends with the run; auto = the one that this machine
    is part of, else local. A cluster also starts learners; with local, torchrun starts them."""
    gpus_per_sampler: float | None = Field(default=None, ge=0, le=1)
    """GPUs per sampler, fractions included; none = 1 if the cluster has any and model.device is not cpu, else 0."""
    groups_per_unit: int = Field(default=2, ge=1)
    """Groups in one batch of a sampler; it samples this times sampling.num_generations completions in one call. It
    changes the numbers."""
    learners: int = Field(default=1, ge=1, le=100_000)
    """Processes that train. covey train starts them on the Ray cluster of ray_address or of this machine, else with
    torchrun on this machine; torchrun by hand starts them anywhere. Each has a GPU if there are any. They also sample
    if nothing else does. It does not change the numbers, with samplers at 0 or more."""
    learner_kind: Literal["auto", "replicated", "sharded"] = "auto"
    """What each of several learners holds: replicated = all weights; sharded = a part of them (FSDP2); auto =
    replicated, unless weights and training state would fill 80 % of a device's memory."""
    timeout_seconds: float = Field(default=600.0, ge=1, le=1e9)
    """Seconds without an answer after which a sampler or another worker is given up; a start has at least 120. Learners
    wait as long for each other, and a restart for room in the cluster."""
    max_restarts: int = Field(default=3, ge=0)
    """How often in a row a sampler is replaced before the run continues without it, and how often covey train restarts
    all learners when one dies."""
    reward_workers: int | None = Field(default=None, ge=0, le=100_000)
    """Ray actors that score completions in whole groups, each on its own CPU. 0 = this process, group by group as they
    would; none = this process, all rows of a step in one call."""

    @property
    def actors(self) -> int:
        """Ray actors in all."""
        return (self.samplers or 0) + (self.reward_workers or 0)
