"""A sampler that has a vLLM server of its own, and speaks to it as to any other one (`covey.serving.dialects`).

Requests, answers, names of versions and what is refused are the dialect's; here is how its vLLM is started for a run,
and what its members' protocol asks beyond that.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from covey.adapters import Adapter, read_adapter_folder
from covey.config.vllm import logprobs_mode
from covey.config.whole import GRPOConfig
from covey.distributed.members import START_SECONDS, MemberError, adapter_hash
from covey.distributed.vllm_server import VLLMServer, find_vllm
from covey.errors import ServingError
from covey.rollout.drawing import room_for_rank
from covey.rollout.learning import Weights
from covey.serving.client import InferenceClient, RefusedError
from covey.serving.dialects import VLLMDialect
from covey.serving.remote import RemoteEngine
from covey.types import Completion, Request, SamplingSettings

_AT_ONCE = 32
"""Requests that `RemoteEngine` has under way."""
_SHARE = 0.9
"""Of a GPU's memory that several vLLMs on it take together."""
_SILENT_SECONDS = 1e6
"""A request may take as long as it likes: whoever waits for the unit sees how many completions are over."""


class VLLMHost:
    """What an actor runs in place of Covey's engine: vLLM with the base model, given adapters or all weights."""

    def __init__(self, config: GRPOConfig, dtype: str, gpus: float, rank: int, vocabulary: int) -> None:
        self._config, self._rank, self._vocabulary, self._finished = config, rank, vocabulary, 0
        self._dtype, self._gpus = dtype, gpus
        self._server: VLLMServer | None = None
        self._engine: Any = None

    def start(self) -> dict[str, Any]:
        """Start vLLM; what it has.

        Raises:
            ConfigError: there is no vLLM, it is too old, it has not enough memory, or the adapter's rank is too large.
            MemberError: it does not start.
        """
        chosen = self._config.distributed
        words = options(self._config, self._dtype, self._gpus, self._rank)
        installed = find_vllm(chosen.vllm_python)
        variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
        if not self._rank:
            variables["VLLM_SERVER_DEV_MODE"] = "1"  # for `reload_weights`; nobody else can reach the socket
        if self._gpus == 0:  # vLLM takes all cores and memory for itself; there may be several on a machine
            for name, value in (("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind")):
                variables[name] = os.environ.get(name, value)
        self._server = VLLMServer(installed, words, variables)
        model = os.path.expanduser(self._config.model.model)
        if not self._rank:
            model = str(linked(model, self._server.folder / "model"))
        self._server.start(model, max(START_SECONDS, chosen.timeout_seconds))
        client = InferenceClient(self._server.url, timeout=_SILENT_SECONDS, retry_seconds=0.0)
        with self._as_member():
            self._engine = RemoteEngine(
                client,
                trainer=f"process {os.getpid()}",
                dialect=VLLMDialect,
                folder=self._server.folder / ("adapters" if self._rank else "model"),
                vocabulary=self._vocabulary,
            )
        return {"context_length": self._engine.context_length, "vllm": installed.version}

    def load(self, tensors: Mapping[str, Any], config: Mapping[str, Any] | None, version: int) -> str:
        """Take an adapter, or all weights where `config` is None; the hash of what vLLM has read."""
        dialect = self._engine.dialect
        if config is None:
            weights = Weights(version, lambda: tensors)
            for path in dialect.folder.glob("*.safetensors*"):  # vLLM was started from them, and would read them too
                if path.name != "model.safetensors":
                    path.unlink()
        else:
            adapter = Adapter(tensors, config)
            weights = Weights(version, lambda: tensors, lambda: adapter)
        with self._as_member():
            self._engine.publish(weights)
        return weights.sha256 if config is None else adapter_hash(read_adapter_folder(dialect.adapter_path))

    def sample(self, requests: Sequence[Request], settings: SamplingSettings, version: int) -> list[Completion]:
        """Completions of all requests, which vLLM batches as it likes."""
        self._finished = 0

        def note(done: int, total: int) -> None:
            self._finished = done

        with self._as_member():
            self._engine.dialect.per_request = math.ceil(len(requests) / _AT_ONCE)
            found: list[Completion] = self._engine(requests, settings, policy_version=version, progress=note)
        return found

    def finished(self) -> int:
        """Completions of the present unit that are over; answered while it is sampled."""
        return self._finished

    def stop(self) -> None:
        """End vLLM; the end of this process does as well."""
        if self._server is not None:
            self._server.stop()

    @contextmanager
    def _as_member(self) -> Iterator[None]:
        """What another sampler could do better is this one's failure; what vLLM refuses, it refuses everywhere."""
        try:
            yield
        except RefusedError:
            raise
        except ServingError as error:
            assert self._server is not None
            self._server.check()
            raise MemberError(f"vLLM does not answer: {error}".partition("; is the server running")[0]) from error


def options(config: GRPOConfig, dtype: str, gpus: float, rank: int) -> list[str]:
    """Options of `vllm serve` for a run; arguments as `VLLMHost`.

    Raises:
        ConfigError: the adapter's rank is too large.
    """
    chosen = config.distributed
    found = ["--dtype", dtype, "--seed", str(secrets.randbits(31)), "--disable-uvicorn-access-log"]
    # the model's own generation settings would be used besides those that a request names
    found += ["--generation-config", "vllm", "--logprobs-mode", logprobs_mode(config)]
    if rank:
        found += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(room_for_rank(rank))]
    if gpus > 1:
        found += ["--tensor-parallel-size", f"{gpus:.0f}", "--distributed-executor-backend", "mp"]
    elif 0 < gpus < 1:
        found += ["--gpu-memory-utilization", f"{_SHARE * gpus:.3f}"]
    if config.model.trust_remote_code:
        found += ["--trust-remote-code"]
    return [*found, *chosen.vllm_arguments]


def linked(model: str, folder: Path) -> Path:
    """Make a folder with links to a model's files, so that new weights can stand in the place of the old ones."""
    source = Path(model).expanduser()
    if not source.is_dir():
        source = Path(snapshot_download(model))
    folder.mkdir()
    for path in source.resolve().iterdir():
        if path.is_file():
            (folder / path.name).symlink_to(path.resolve())
    return folder
