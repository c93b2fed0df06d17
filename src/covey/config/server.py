"""The `server` and `distributed` sections: inference servers, and a run of several processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from covey.config.section import Section
from covey.errors import shown


class ServerConfig(Section, frozen=True):
    """The inference server that samples completions, and how it gets new weights."""

    inference_server_url: str | Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    """Address of the inference server that samples, such as http://127.0.0.1:8000 (the default of `covey serve`).
    Several addresses: a list, or text with commas. The adapter is uploaded to each. none = sample in this process."""
    inference_server_kind: str = Field(default="covey", pattern=r"^(covey|vllm|sglang|.+:.+)$")
    """covey (`covey serve`), vllm (vLLM's OpenAI server with run-time LoRA loading), sglang (SGLang's server), or
    FILE.py:NAME (your own dialect, see docs/use.md)."""
    server_token: str | None = Field(default=None, exclude=True, repr=False)
    """Bearer token of the server; none = the environment variable COVEY_SERVER_TOKEN. It is never saved."""
    adapter_folder: str | None = None
    """Folder from which vLLM, SGLang or your own server reads the weights; none = OUTPUT_DIR-adapters, beside the run
    folder."""
    server_timeout: float = Field(default=600.0, gt=0, le=1e9)
    """Time limit for one request, in seconds."""
    server_retry_seconds: float = Field(default=60.0, ge=0, le=1e9)
    """Time, in seconds, to repeat a failed request before the run stops. The run can then be resumed."""

    @property
    def upload_adapters_to_server(self) -> bool:
        """True when a server samples."""
        return self.inference_server_url is not None

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses one by one."""
        given = self.inference_server_url or ()
        return tuple(url.strip() for url in given.split(",")) if isinstance(given, str) else given

    def problems(self) -> Iterator[str]:
        for url in filter(None, self.urls):
            if not url.lower().startswith(("http://", "https://", "unix:")):
                yield f"inference_server_url={shown(url)}: not an address; begin it with http://, https:// or unix:"
        alike = [url.rstrip("/") for url in self.urls]
        twice = [url for url in alike if alike.count(url) > 1]
        if twice or "" in alike:
            problem = f"{twice[0]} appears twice" if twice and twice[0] else "one address is empty"
            yield f"inference_server_url={shown(self.inference_server_url)}: {problem}; name each server once"


class DistributedConfig(Section, frozen=True):
    """Samplers, learners and reward workers in other processes and on other machines."""

    samplers: int | None = Field(default=None, ge=0, le=100_000)
    """Ray actors that only sample. 0 = this process (or the servers) samples the same fixed batches, with the same
    results. none = this process samples a step in one call."""
    ray_address: str = Field(default="auto", min_length=1)
    """Ray cluster as HOST:PORT. local = start one on this machine for the run. auto = the cluster of this machine, else
    local. Ray also starts the learners on a cluster; with local, torchrun starts them."""
    gpus_per_sampler: float | None = Field(default=None, ge=0, le=1)
    """GPUs per sampler, from 0 to 1; none = 1 if the cluster has GPUs and model.device is not cpu, else 0."""
    groups_per_unit: int = Field(default=2, ge=1)
    """Groups in a unit, the fixed batch that a sampler samples in one call. Results depend on it, in the last
    digits."""
    learners: int = Field(default=1, ge=1, le=100_000)
    """Processes that train, each on its own GPU if there are any. `covey train` starts them on the Ray cluster, else
    with torchrun on this machine; you can also call torchrun yourself. They sample too if there is no other sampler.
    With samplers at 0 or more, results do not depend on their number."""
    learner_kind: Literal["auto", "replicated", "sharded"] = "auto"
    """What each of several learners holds. replicated: all weights. sharded: a part of them (FSDP2). auto: sharded if
    weights and training state would fill 80 % of a device's memory, else replicated."""
    timeout_seconds: float = Field(default=600.0, ge=1, le=1e9)
    """Give up a sampler or worker after this many seconds without an answer (at least 120 while it starts). Learners
    wait as long for each other, and restarts for a free place in the cluster."""
    max_restarts: int = Field(default=3, ge=0)
    """How often in a row a failed sampler is replaced before the run continues without it. Also how often `covey train`
    restarts the learners after one died."""
    reward_workers: int | None = Field(default=None, ge=0, le=100_000)
    """Ray actors that score completions, a group in each call, each actor on its own CPU. 0 = this process scores group
    by group, with the same results. none = this process scores all completions of a step in one call."""

    @property
    def actors(self) -> int:
        """Ray actors in all."""
        return (self.samplers or 0) + (self.reward_workers or 0)
