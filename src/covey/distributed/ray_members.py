"""Members in Ray actors. Ray places and watches processes, and carries weights; units and restarts are the fleet's."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import ray
import torch
from peft import PeftModel
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from covey.adapters import Adapter, fingerprint
from covey.backend import load_backend
from covey.config import GRPOConfig
from covey.distributed.members import START_SECONDS, Held, Member, MemberError, adapter_hash, in_thread
from covey.distributed.preflight import PACKAGES, Node, check_alike, check_room, check_store, installed
from covey.errors import ConfigError, CoveyError
from covey.pytorch.engine.merge import bare_model, weights_of
from covey.pytorch.loading import load_model
from covey.pytorch.lora import adapter_of, attach_adapter, load_adapter
from covey.rollout.learning import TrainedPolicy, Weights
from covey.types import Completion, Progress, Request, SamplingSettings

CPUS = 1.0
"""That a sampler takes of its node."""
_PROBE_SECONDS = 20.0
_CONNECT_SECONDS = 5.0
_LOCAL_STORE_BYTES = 200 << 20


class EngineHost:
    """What an actor runs: an engine with the base model, which is given adapters or all weights.

    Args:
        config: of the run.
        dtype: of the model, as the trainer has it.
        threads: of each operation, as the trainer has them: they are part of the numbers.
    """

    def __init__(self, config: GRPOConfig, dtype: str, threads: int) -> None:
        self._config, self._dtype, self._threads, self._finished = config, dtype, threads, 0
        self._loaded: Any = None
        self._model: Any = None
        self._engine: Any = None

    def start(self) -> dict[str, Any]:
        """Load the model; where it is, and what it has."""
        torch.set_num_threads(self._threads)
        chosen = self._config.model
        self._loaded = load_model(
            chosen.model, dtype=self._dtype, device=chosen.device, trust_remote_code=chosen.trust_remote_code
        )
        self._model = self._loaded.model
        self._start_engine()
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "node": ray.get_runtime_context().get_node_id(),
            "context_length": self._engine.context_length,
            "base": base_hash(self._model),
        }

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

    def sample(self, requests: Sequence[Request], settings: SamplingSettings, version: int) -> list[Completion]:
        """One call of the engine."""
        torch.set_num_threads(self._threads)
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
        view: Any = SimpleNamespace(model=self._model, tokenizer=self._loaded.tokenizer)
        self._engine = None
        self._engine = load_backend("pytorch").make_sampler(self._config, view)


def base_hash(model: Any) -> str:
    """SHA-256 of names, shapes and some values of the weights that LoRA leaves alone: equal for the same base model."""
    entries = []
    for name, parameter in bare_model(model).named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            continue
        flat = parameter.detach().reshape(-1)
        some = torch.cat([flat[:256], flat[-256:]]).float().cpu().numpy()
        entries.append((f"{name.replace('.base_layer', '')} {tuple(parameter.shape)}", [some]))
    return fingerprint(sorted(entries, key=lambda entry: entry[0]))


class RayMember:
    """An actor, as the fleet sees it.

    Args:
        cluster: started it.
        actor: its handle.
        about: what `EngineHost.start` said.
    """

    def __init__(self, cluster: Cluster, actor: Any, about: dict[str, Any]) -> None:
        self._cluster, self._actor, self.pid = cluster, actor, int(about["pid"])
        self._here = about["node"] == ray.get_runtime_context().get_node_id()
        self.name, self.context_length = f"process {self.pid} on {about['host']}", int(about["context_length"])
        self._asked: Any = None
        self._progress: Progress | None = None
        self._total = 0

    def load(self, held: Held) -> Future[str]:
        """One copy in the object store serves all actors."""
        return answer_of(self._actor.load.remote, *self._cluster.put(held), held.weights.version)

    def begin(
        self, requests: Sequence[Request], settings: SamplingSettings, version: int, progress: Progress
    ) -> Future[list[Completion]]:
        """One call of the actor."""
        self._progress, self._total, self._asked = progress, len(requests), None
        return answer_of(self._actor.sample.remote, list(requests), settings, version)

    def watch(self) -> None:
        """Ask how many completions are over, without waiting for the answer."""
        with suppress(RayError):
            if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
                done, self._asked = ray.get(self._asked), None
                if self._progress is not None:
                    self._progress(done, self._total)
            if self._asked is None:
                self._asked = self._actor.finished.options(concurrency_group="watch").remote()

    def stop(self, *, failed: bool) -> None:
        """Kill the process; one on this machine even if it takes no message any more."""
        kill(self._actor)
        if failed and self._here:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


class Cluster:
    """Connects to Ray, looks at the cluster, and starts actors in it.

    Args:
        config: of the run.
        policy: that is trained here; actors must have the same base model.

    Raises:
        ConfigError: the cluster cannot be reached, is too small, or has other versions than this process.
    """

    def __init__(self, config: GRPOConfig, policy: TrainedPolicy) -> None:
        self._config, self._policy = config, policy
        self._dtype = str(next(p for p in policy.model.parameters() if p.is_floating_point()).dtype)
        self._dtype = self._dtype.removeprefix("torch.")
        self._trains_all = not isinstance(policy.model, PeftModel)
        self._base = "" if self._trains_all else base_hash(policy.model)
        self._lock, self._connected, self._own = threading.RLock(), False, False
        self._actors: list[Any] = []
        self._starting: list[Future[Member]] = []
        self._session = 0
        self._put: tuple[Held, Any] | None = None
        self._gpus = 0.0
        self.connect()

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
            check_store(_nodes(), sum(array.nbytes for array in tensors.values()))
            self._put = (held, ray.put(tensors))
        return self._put[1], None if adapter is None else dict(adapter.config)

    def close(self) -> None:
        """Leave the cluster, which ends what was started in it; one that was started here ends too."""
        with self._lock:
            self._session += 1
            for actor in self._actors if self._connected else ():
                kill(actor)
            self._put, self._actors = None, []
        wait(self._starting, timeout=_CONNECT_SECONDS)  # a call of Ray's after its end would start it again
        if self._connected and self._own:
            ray.shutdown()
        self._connected = False

    def connect(self) -> None:
        """Be part of the cluster, one that has room and the same versions; nothing happens if that is so already."""
        with self._lock:
            if not self._connected:
                self._own = connect(self._config.distributed.ray_address, self._config.distributed.actors)
                self._connected = True
                try:
                    self._preflight()
                except BaseException:
                    self.close()
                    raise

    def _preflight(self) -> None:
        chosen, nodes = self._config.distributed, _nodes()
        gpus = chosen.gpus_per_sampler
        if gpus is None:
            gpus = 1.0 if self._config.model.device != "cpu" and any(node.gpus for node in nodes) else 0.0
        self._gpus, samplers = gpus, chosen.samplers or 0
        check_room(nodes, samplers, CPUS, gpus)
        nodes = _with_versions(nodes)
        check_room(nodes, samplers, CPUS, gpus)
        check_alike(nodes, installed(), CPUS, gpus)
        _await_room(samplers, gpus)

    def _start(self, session: int) -> Member:
        chosen = self._config.distributed
        with self._lock:
            if session != self._session:
                raise MemberError("the run is over")
            self.connect()
            host: Any = ray.remote(concurrency_groups={"watch": 1})(EngineHost)
            options = {"num_cpus": CPUS, "num_gpus": self._gpus, "max_restarts": 0, "max_task_retries": 0}
            actor = host.options(**options).remote(self._config, self._dtype, torch.get_num_threads())
            self._actors.append(actor)
        try:
            about = get_result(actor.start.remote(), max(START_SECONDS, chosen.timeout_seconds))
            if not self._trains_all and about["base"] != self._base:
                raise ConfigError(
                    f"model.model={self._config.model.model!r:.200}: on {about['host']} it has other weights than in "
                    "this process; give every machine the same files (a model that was changed in memory cannot be "
                    "loaded there)"
                )
            return RayMember(self, actor, about)
        except BaseException:
            kill(actor)
            raise


def kill(actor: Any) -> None:
    """End an actor, whatever it is doing."""
    with suppress(Exception):  # it, or Ray, has ended before
        ray.kill(actor, no_restart=True)


def connect(address: str, actors: int) -> bool:
    """Connect to a cluster; True if that was done here, so that it must be left here."""
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what Ray will do in its next version
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    known = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    if known == "auto":
        try:
            ray.init(address="auto", **quiet)
            return True
        except ConnectionError:
            known = "local"
    if known == "local":
        here: dict[str, Any] = {"num_cpus": max(os.cpu_count() or 1, actors), "include_dashboard": False}
        ray.init(address="local", object_store_memory=_LOCAL_STORE_BYTES, **here, **quiet)
        return True
    _require_reachable(known)
    try:
        ray.init(address=known, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"distributed.ray_address={known!r:.200}: Ray does not connect ({error!s:.300})") from error
    return True


def _require_reachable(address: str) -> None:
    """Ray tries for minutes where nobody listens."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "://" in address:
        raise ConfigError(
            f"distributed.ray_address={address!r:.200}: must be auto, local or HOST:PORT, as `ray start --head` prints "
            "it; from outside of a cluster, use ray job submit"
        )
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"distributed.ray_address={address!r:.200}: nobody answers there ({error}); start a cluster with "
            "ray start --head, or use auto"
        ) from error


def _nodes() -> list[Node]:
    found = []
    for node in ray.nodes():
        held = node["Resources"]
        if node["Alive"]:
            kinds = frozenset(name.partition(":")[2] for name in held if name.startswith("accelerator_type:"))
            cpus, gpus, store = (held.get(name, 0.0) for name in ("CPU", "GPU", "object_store_memory"))
            found.append(Node(node["NodeID"], cpus, gpus, store, kinds))
    return found


def _with_versions(nodes: Sequence[Node]) -> list[Node]:
    """The nodes that run a task, with what is installed there; this process knows what its own has."""

    def ask(names: Sequence[str]) -> dict[str, str]:  # sent by value, so that it runs where Covey is missing
        import platform
        from importlib import metadata

        found = {"python": platform.python_version()}
        for name in names:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                found[name] = ""
        return found

    here = ray.get_runtime_context().get_node_id()
    probe: Any = ray.remote(num_cpus=0, max_retries=0)(ask)
    asked = {
        node.name: probe.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.name, soft=False)).remote(
            list(PACKAGES)
        )
        for node in nodes
        if node.name != here
    }
    if not asked:
        return list(nodes)
    _, late = ray.wait(list(asked.values()), num_returns=len(asked), timeout=_PROBE_SECONDS)
    silent = [name for name, ref in asked.items() if ref in late]
    if silent:
        raise ConfigError(
            f"Ray node {silent[0]} does not run a task within {_PROBE_SECONDS:g} s ({len(silent)} of {len(nodes)} "
            "nodes); look at it with ray status"
        )
    found: dict[str, Any] = {here: None}
    for name, ref in asked.items():
        with suppress(MemberError):  # a node that has died since; Ray lists it for a while
            found[name] = get_result(ref, _PROBE_SECONDS)
    return [replace(node, versions=found[node.name]) for node in nodes if node.name in found]


def _await_room(samplers: int, gpus: float) -> None:
    """What is taken by somebody who has just ended is free soon."""
    deadline = time.monotonic() + _PROBE_SECONDS
    while True:
        free = ray.available_resources()
        lacking = [
            f"{samplers * each:g} {kind}, {free.get(kind, 0.0):g} are free"
            for kind, each in (("CPU", CPUS), ("GPU", gpus))
            if free.get(kind, 0.0) < samplers * each
        ]
        if not lacking:
            return
        if time.monotonic() > deadline:
            raise ConfigError(
                f"distributed.samplers={samplers}: needs {' and '.join(lacking)}: others use the Ray cluster; wait for "
                "them, or use fewer"
            )
        time.sleep(0.5)


def get_result(ref: Any, seconds: float) -> Any:
    """What a call has returned, with errors as `Member` says them."""
    try:
        return ray.get(ref, timeout=seconds)
    except RayError as error:
        raise _translated(error) from error


def answer_of(call: Any, *arguments: Any) -> Future[Any]:
    """A call of an actor as a future, with errors as `Member` says them."""
    found: Future[Any] = Future()

    def over(answer: Future[Any]) -> None:
        error = answer.exception()
        if error is None:
            found.set_result(answer.result())
        else:
            found.set_exception(_translated(error))

    try:
        call(*arguments).future().add_done_callback(over)
    except RayError as error:
        found.set_exception(_translated(error))
    return found


def _translated(error: BaseException) -> BaseException:
    """What was wrong inside the actor, or with it."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, CoveyError):
        return cause
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [""]
    text = lines[0] if "Traceback" not in str(cause) else lines[-1]
    return MemberError(f"{type(cause).__name__}: {text}")
