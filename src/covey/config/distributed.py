"""The `distributed` section: what samples and trains when one process is not enough."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

_OURS = (
    *("--model", "--served-model-name", "--uds", "--host", "--port", "--api-key", "--root-path", "--seed"),
    *("--enable-lora", "--no-enable-lora", "--max-loras", "--tensor-parallel-size", "-tp", "--data-parallel-size"),
    *("--logprobs-mode", "--generation-config", "--skip-tokenizer-init", "--dtype", "--config"),
)
"""Options of vLLM that a sampler sets itself."""


class DistributedConfig(BaseModel, extra="forbid", frozen=True, strict=True, allow_inf_nan=False):
    """Samplers in other processes and on other machines. Without `samplers`, all of it is as in one process."""

    samplers: int | None = Field(
        default=None,
        ge=0,
        le=100_000,
        description="Ray actors that only sample. 0: this process samples, or the servers, unit by unit as actors "
        "would and so with their numbers; none = this process in one call.",
    )
    ray_address: str = Field(
        default="auto",
        min_length=1,
        description="Ray cluster, HOST:PORT; local = one that is started here and ends with the run; auto = the one "
        "that this machine is part of, else local. A cluster also starts learners, local leaves them to torchrun.",
    )
    gpus_per_sampler: float | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="GPUs of each sampler, parts of one included, and with sampler_kind = vllm several, among which "
        "vLLM splits the model; none = 1 where the cluster has any and model.device is not cpu, else 0.",
    )
    sampler_kind: Literal["covey", "vllm"] = Field(
        default="covey",
        description="What the samplers sample with: Covey's engine, whose numbers repeat, or a vLLM server of each "
        "sampler's own, whose numbers do not.",
    )
    vllm_python: str | None = Field(
        default=None,
        min_length=1,
        description="Python in whose environment vLLM is installed, on each machine with samplers, such as "
        "/opt/vllm/bin/python: it needs neither Covey nor Ray. none = the one that runs Covey.",
    )
    vllm_arguments: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        default=(),
        description='More options of `vllm serve`, word by word, such as ["--max-model-len", "4096"].',
    )
    groups_per_unit: int = Field(
        default=2,
        ge=1,
        description="Size of a unit, which is sampled in one call, alone: times sampling.num_generations completions. "
        "It is part of the numbers.",
    )
    learners: int = Field(
        default=1,
        ge=1,
        le=100_000,
        description="Processes that train: covey train starts them on the Ray cluster that ray_address names or that "
        "this machine is part of, else with torchrun on this machine; torchrun by hand starts them anywhere. Each has "
        "a GPU where there are any. They sample too, unit by unit, where nobody else does. No part of the numbers, "
        "with samplers at 0 or more.",
    )
    learner_kind: Literal["auto", "replicated", "sharded"] = Field(
        default="auto",
        description="What each of several learners holds: replicated = all weights, sharded = a part of each "
        "(FSDP2); auto = replicated, unless weights and training state would fill 80 % of a device's memory.",
    )
    timeout_seconds: float = Field(
        default=600.0,
        ge=1,
        le=1e9,
        description="Seconds that a sampler, or another worker, may be silent before it is given up; a start has at "
        "least 120. Learners wait as long for each other, and their restart for room in the cluster.",
    )
    max_restarts: int = Field(
        default=3,
        ge=0,
        description="How often in a row a sampler, or another worker, is replaced before the run goes on without it, "
        "and how often covey train starts all learners again when one dies.",
    )
    reward_workers: int | None = Field(
        default=None,
        ge=0,
        le=100_000,
        description="Ray actors that score completions, whole groups at a time, each on a CPU of its own. 0: this "
        "process scores, group by group as they would; none = this process, all rows of a step in one call.",
    )
    world_workers: int = Field(
        default=0,
        ge=0,
        le=100_000,
        description="Ray actors that hold an agent's worlds, environment.parallel_episodes shared out among them; "
        "0 = processes of this machine.",
    )
    keep_units: bool = Field(
        default=True,
        description="Write sampled units to the run folder until the next checkpoint, so that a run that is killed "
        "does not sample them again.",
    )

    @model_validator(mode="after")
    def _one_gpu_or_vllm(self) -> Self:
        gpus = self.gpus_per_sampler
        if gpus is not None and gpus > 1:
            if gpus != int(gpus):
                raise ValueError(f"gpus_per_sampler={gpus:g}: must be at most 1, or a whole number")
            if self.sampler_kind != "vllm":
                raise ValueError(
                    f"gpus_per_sampler={gpus:g}: Covey's engine samples on one GPU; set it to 1 or less, or "
                    "sampler_kind to vllm"
                )
        ours = [word for word in self.vllm_arguments if word.partition("=")[0].replace("_", "-") in _OURS]
        if ours:
            raise ValueError(f"vllm_arguments={ours[0]!r:.100}: each sampler sets this option itself; leave it out")
        return self

    @property
    def actors(self) -> int:
        """Ray actors in all."""
        return (self.samplers or 0) + (self.reward_workers or 0) + self.world_workers
