"""Members in Ray actors. Ray places and watches processes, and carries weights; units and restarts are the fleet's."""

from __future__ import annotations

import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import ray
import torch
from peft import PeftModel
from ray.exceptions import RayError
from torch.distributed.tensor import DTensor

from covey.adapters import Adapter, fingerprint
from covey.config.whole import GRPOConfig
from covey.distributed import guards, ray_cluster
from covey.distributed.members import START_SECONDS, Held, Member, MemberError, adapter_hash, in_thread
from covey.distributed.ray_cluster import CPUS, check_cluster, nodes_there
from covey.errors import ConfigError
from covey.pytorch.backend import BACKEND
from covey.pytorch.engine.merge import bare_model, weights_of
from covey.pytorch.models.loading import load_model
from covey.pytorch.models.lora import adapter_of, album_of, attach_adapter, load_adapter, pictures_in
from covey.rollout.learning import TrainedPolicy, Weights
from covey.tasks.pictures import Picture
from covey.types import Completion, Progress, Request, SamplingSettings

log = logging.getLogger(__name__)


class EngineHost:
    """What an actor runs: an engine with the base model, which is given adapters or all weights."""

    def __init__(self, config: GRPOConfig, dtype: str, threads: int) -> None:
        self._config, self._dtype, self._threads, self._finished = config, dtype, threads, 0
        self._model: Any = None
        self._engine: Any = None

    def start(self) -> dict[str, Any]:
        """Load the model; where it is, and what it has."""
        torch.set_num_threads(self._threads)
        chosen = self._config.model
        how: dict[str, Any] = {"trust_remote_code": chosen.trust_remote_code, "quantization": chosen.quantization}
        loaded = load_model(chosen.model, dtype=self._dtype, device=chosen.device, **how)
        self._model, self._tokenizer, self._album = loaded.model, loaded.tokenizer, album_of(loaded.model)
        if self._album is not None:
            self._album.options = dict(self._config.data.processor_kwargs)
        self._start_engine()
        where = {"pid": os.getpid(), "host": socket.gethostname(), "node": ray.get_runtime_context().get_node_id()}
        return where | {"context_length": self._engine.context_length, "base": base_hash(self._model)}

    def load(self, tensors: dict[str, Any], config: dict[str, Any] | None, version: int) -> str:
        """Take an adapter, or all weights where `config` is None; the hash of what is in use then."""
        torch.set_num_threads(self._threads)
        if config is None:
            weights = Weights(version, lambda: tensors)
            self._engine.publish(weights)
            return weights.sha256
        with tempfile.TemporaryDirectory(prefix="covey-adapter-") as folder:
            Adapter(tensors, config).write(folder)
            if isinstance(self._model, PeftModel):
                load_adapter(self._model, folder)
            else:
                self._model = attach_adapter(self._model, folder)
                self._start_engine()
        self._engine.publish(weights_of(self._model, version))
        return adapter_hash(adapter_of(self._model))

    def sample(
        self, requests: Sequence[Request], settings: SamplingSettings, version: int, pictures: Sequence[Picture]
    ) -> list[Completion]:
        torch.set_num_threads(self._threads)
        if self._album is not None:
            self._album.hold(pictures)
        self._finished = 0

        def note(done: int, total: int) -> None:
            self._finished = done

        found: list[Completion] = self._engine(requests, settings, policy_version=version, progress=note)
        return found

    def finished(self) -> int:
        """Completions of the present unit that are over; answered while it is sampled."""
        return self._finished

    def _start_engine(self) -> None:
        """The same engine as in the trainer's process: what it is built from decides how it computes."""
        view: Any = SimpleNamespace(model=self._model, tokenizer=self._tokenizer)
        self._engine = None
        self._engine = BACKEND.make_sampler(self._config, view)


def base_hash(model: Any) -> str:
    """SHA-256 of names, shapes and some values of the weights that LoRA leaves alone: equal for the same base model."""
    entries, album = [], album_of(model)
    for name, parameter in (bare_model(model) if album is None else album.whole).named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            continue
        held = getattr(parameter, "qdata", parameter)  # of torchao's, the 8 bits
        flat = held.detach().reshape(-1)
        some = torch.cat([flat[:256], flat[-256:]]).float().cpu().numpy()
        entries.append((f"{name.replace('.base_layer', '')} {tuple(parameter.shape)}", [some]))
    return fingerprint(sorted(entries, key=lambda entry: entry[0]))


class RayMember:
    """An actor, as the fleet sees it."""

    def __init__(self, cluster: Cluster, actor: Any, about: dict[str, Any]) -> None:
        self._cluster, self._actor, self.pid = cluster, actor, int(about["pid"])
        self._here = about["node"] == ray.get_runtime_context().get_node_id()
        self.name, self.context_length = f"process {self.pid} on {about['host']}", int(about["context_length"])
        self._asked: Any = None
        self._progress: Progress | None = None
        self._total = 0

    def load(self, held: Held) -> Future[str]:
        """One copy in the object store serves all actors."""
        return ray_cluster.answer_of(self._actor.load.remote, *self._cluster.put(held), held.weights.version)

    def begin(
        self, requests: Sequence[Request], settings: SamplingSettings, version: int, progress: Progress
    ) -> Future[list[Completion]]:
        # Actors may answer for a while longer than the head lives. It is asked here rather than in `load`: between the
        # update and the end of `load` nothing can be saved.
        self._cluster.head.check()
        self._progress, self._total, self._asked = progress, len(requests), None
        pictures = pictures_in(self._cluster.policy.model, (request.token_ids for request in requests))
        return ray_cluster.answer_of(self._actor.sample.remote, list(requests), settings, version, pictures)

    def watch(self) -> None:
        """Ask how many completions are over, without waiting for the answer. Raises ClusterLostError."""
        self._cluster.head.check()
        with suppress(RayError):
            if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
                done, self._asked = ray.get(self._asked), None
                if self._progress is not None:
                    self._progress(done, self._total)
            if self._asked is None:
                self._asked = self._actor.finished.options(concurrency_group="watch").remote()

    def stop(self, *, failed: bool) -> None:
        """Kill the process; one on this machine even if it takes no message any more."""
        if not self._cluster.head.lost:
            ray_cluster.kill(self._actor)
        if failed and self._here:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


class Cluster:
    """Connects to Ray, looks at the cluster, and starts actors in it. Raises ConfigError: the cluster does not do."""

    def __init__(self, config: GRPOConfig, policy: TrainedPolicy) -> None:
        self._config, self.policy = config, policy
        self._dtype = str(next(p for p in policy.model.parameters() if p.is_floating_point()).dtype)
        self._dtype = self._dtype.removeprefix("torch.")
        self._trains_all = not isinstance(policy.model, PeftModel)
        # Of a model in parts, see `check_models`: the files have been compared.
        in_parts = any(p.is_meta or isinstance(p, DTensor) for p in policy.model.parameters())
        self._base = "" if self._trains_all or in_parts else base_hash(policy.model)
        self._lock, self._connected, self._own = threading.RLock(), False, False
        self._actors, self._starting, self._session = list[Any](), list[Future[Member]](), 0
        self._stored = sum(p.numel() * p.element_size() for p in policy.model.parameters() if p.requires_grad)
        self._put: tuple[Held, Any] | None = None
        self._connect()

    def make(self, again: bool) -> Future[Member]:
        """Start an actor; it waits for a place in the cluster if one was lost."""
        started = in_thread(partial(self._start, self._session))
        self._starting = [*(future for future in self._starting if not future.done()), started]
        return started

    def put(self, held: Held) -> tuple[Any, dict[str, Any] | None]:
        """Weights in the object store, and the adapter's config if they are one."""
        adapter = held.weights.adapter
        if self._put is None or self._put[0] is not held:
            tensors = dict(held.weights.tensors() if adapter is None else adapter.tensors)
            size = sum(array.nbytes for array in tensors.values())
            if size > self._stored:  # not each time: it asks the head, and would wait for one that is lost
                guards.check_store(nodes_there(), size)
                self._stored = size
            self._put = (held, ray.put(tensors))
        return self._put[1], None if adapter is None else dict(adapter.config)

    def close(self) -> None:
        """Leave the cluster, which ends what was started in it; one that was started here ends too."""
        with self._lock:
            self._session += 1
            for actor in self._actors if self._connected and not self.head.lost else ():
                ray_cluster.kill(actor)
            self._put, self._actors = None, []
        wait(self._starting, timeout=guards.CONNECT_SECONDS)  # a call of Ray's after its end would start it again
        if self._connected and self._own and not self.head.lost:
            ray.shutdown()
        self._connected = False

    def _connect(self) -> None:
        """Be part of the cluster, one that has room and the same versions; nothing happens if that is so already."""
        with self._lock:
            if not self._connected:
                chosen = self._config.distributed
                self._own = ray_cluster.connect(
                    chosen.ray_address, chosen.actors, guards.STORED_ADAPTERS * self._stored
                )
                self._connected, self.head = True, guards.Head(ray.get_runtime_context().gcs_address)
                try:
                    self._gpus = guards.gpus_of_sampler(self._config, nodes_there())
                    nodes, said = check_cluster(self._config, learners=0)
                    guards.check_store(nodes, self._stored)
                except BaseException:
                    self.close()
                    raise
                for sentence in said:
                    log.warning("%s", sentence)

    def _start(self, session: int) -> Member:
        chosen = self._config.distributed
        with self._lock:
            if session != self._session:
                raise MemberError("the run is over")
            self._connect()
            host: Any = ray.remote(concurrency_groups={"watch": 1})(EngineHost)
            options = {"num_cpus": CPUS, "num_gpus": self._gpus, "max_restarts": 0, "max_task_retries": 0}
            actor = host.options(**options).remote(self._config, self._dtype, torch.get_num_threads())
            self._actors.append(actor)
        try:
            about = ray_cluster.get_result(actor.start.remote(), max(START_SECONDS, chosen.timeout_seconds))
            if self._base and about.get("base", self._base) != self._base:
                raise ConfigError(
                    f"model.model={self._config.model.model!r:.200}: on {about['host']} it has other weights than in "
                    "this process; give every machine the same files (a model that was changed in memory cannot be "
                    "loaded there)"
                )
            return RayMember(self, actor, about)
        except BaseException:
            ray_cluster.kill(actor)
            raise


def look_at_cluster(config: GRPOConfig) -> list[str]:
    """Connect, look at the cluster as a run would, and leave it; what there is, a line each, or a run's ConfigError."""
    began, own = time.monotonic(), ray_cluster.connect(config.distributed.ray_address, config.distributed.actors)
    samplers = config.distributed.samplers or 0
    learners = config.distributed.learners if config.distributed.learners > 1 and not ray_cluster.is_local() else 0
    try:
        nodes, said = check_cluster(config, learners)
        address = ray.get_runtime_context().gcs_address
    finally:
        if own:
            ray.shutdown()
    lines = [
        f"node {node.name}: {node.cpus:g} CPUs, {node.gpus:g} GPUs, "
        f"{node.memory / 1e9:.1f} GB, object store {node.store_bytes / 1e9:.1f} GB"
        for node in nodes
    ]
    placed = [(learners, "learners", guards.gpus_of_learner)] if learners else []
    placed += [(samplers, "samplers", guards.gpus_of_sampler)] if samplers or not placed else []
    each = [f"distributed.{name}={n}, each {CPUS:g} CPU and {gpus(config, nodes):g} GPU" for n, name, gpus in placed]
    room = f"room for {' and '.join(each)}"
    took = f"looked at in {time.monotonic() - began:.0f} s"
    return [f"Ray cluster {address}: {len(nodes)} nodes, {room}; {took}", *lines, *(f"warning: {s}" for s in said)]
