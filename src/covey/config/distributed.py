"""The `distributed` section: what samples and trains when one process is not enough."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from covey.config.section import Section


class DistributedConfig(Section, frozen=True):
    """Samplers in other processes and on other machines. Without `samplers`, all of it is as in one process."""

    samplers: int | None = Field(default=None, ge=0, le=100_000)
    """Ray actors that only sample. 0: this process samples, or the servers, unit by unit as actors would and so with
    their numbers; none = this process in one call."""
    ray_address: str = Field(default="auto", min_length=1)
    """Ray cluster, HOST:PORT; local = one that is started here and ends with the run; auto = the one that this machine
    is part of, else local. A cluster also starts learners, local leaves them to torchrun."""
    gpus_per_sampler: float | None = Field(default=None, ge=0, le=1)
    """GPUs of each sampler, parts of one included; none = 1 where the cluster has any and model.device is not cpu, else
    0."""
    groups_per_unit: int = Field(default=2, ge=1)
    """Size of a unit, which is sampled in one call, alone: times sampling.num_generations completions. It is part of
    the numbers."""
    learners: int = Field(default=1, ge=1, le=100_000)
    """Processes that train: covey train starts them on the Ray cluster that ray_address names or that this machine is
    part of, else with torchrun on this machine; torchrun by hand starts them anywhere. Each has a GPU where there are
    any. They sample too, unit by unit, where nobody else does. No part of the numbers, with samplers at 0 or more."""
    learner_kind: Literal["auto", "replicated", "sharded"] = "auto"
    """What each of several learners holds: replicated = all weights, sharded = a part of each (FSDP2); auto =
    replicated, unless weights and training state would fill 80 % of a device's memory."""
    timeout_seconds: float = Field(default=600.0, ge=1, le=1e9)
    """Seconds that a sampler, or another worker, may be silent before it is given up; a start has at least 120.
    Learners wait as long for each other, and their restart for room in the cluster."""
    max_restarts: int = Field(default=3, ge=0)
    """How often in a row a sampler is replaced before the run goes on without it, and how often covey train starts all
    learners again when one dies."""
    reward_workers: int | None = Field(default=None, ge=0, le=100_000)
    """Ray actors that score completions, whole groups at a time, each on a CPU of its own. 0: this process scores,
    group by group as they would; none = this process, all rows of a step in one call."""

    @property
    def actors(self) -> int:
        """Ray actors in all."""
        return (self.samplers or 0) + (self.reward_workers or 0)
