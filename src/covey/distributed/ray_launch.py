"""Ray starts the learners of a run: it reserves a place for each, and says when one is gone.

    the command (Ray's driver): watches, ends all when one ends, starts all again
     |-- rank 0, a process of its own on the same terminal and beside the run folder
     `-- ranks 1..L-1, Ray actors                             all places are one placement group

What they do is `covey.training.launch.run`, as under torchrun, and torch.distributed connects them. Rank 0 is no
actor, so that what it prints goes where the command prints, and Ctrl-C and a cluster that is lost leave it the time for
a checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from covey.config.whole import GRPOConfig
from covey.distributed.guards import Head, gpus_of_learner
from covey.distributed.ranks import RankLostError
from covey.distributed.ray_cluster import CPUS, check_cluster, kill, nodes_there, translated
from covey.errors import ClusterLostError, ConfigError, CoveyError
from covey.signals import ENDING, EndedError

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.25
_PLACE_SECONDS = 10.0
"""For a placement group when there is room for it."""
_TELL_SECONDS = 5.0
"""When a rank has ended, the others may say so long why they end too: the reason may be theirs."""
_SAVE_SECONDS = 20.0
"""For the end of rank 0's step and a checkpoint; who has no patience sends a signal again."""
_PASSED_ON = ("OMP_", "GOMP_", "MKL_", "ATEN_", "CUBLAS_", "TORCH_", "PYTORCH_", "GLOO_", "NCCL_", "HF_", "TOKENIZERS_")
"""How environment variables begin that are part of the numbers, or of how ranks and models are found."""
_RANK_0 = """
import ctypes, os, runpy, signal, sys
try:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the process that has started it
except AttributeError:
    pass
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit(1)
try:
    runpy.run_module("covey", run_name="__main__", alter_sys=True)
except KeyboardInterrupt:
    sys.exit(130)
except SystemExit as end:
    code = end.code if isinstance(end.code, int) else 0
    if code == 75 or code > 128:  # the cluster may be lost, and what Ray does at the end of a process waits for it
        sys.stdout.flush()
        os._exit(code)
    raise
"""


class RayRanks:
    """A Ray cluster that starts ranks."""

    def __init__(
        self,
        config: GRPOConfig,
        arguments: Sequence[str],
        work: Callable[[GRPOConfig], object],
        say: Callable[[str], None],
    ) -> None:
        self._config, self._arguments, self._work, self._say = config, list(arguments), work, say
        here = ray.get_runtime_context()
        self._head, self._here = Head(here.gcs_address), here.get_node_id()

    def close(self) -> None:
        if not self._head.lost:
            ray.shutdown()

    def start(self, attempt: int, environment: Mapping[str, str]) -> int:
        """Start all ranks, and wait until all have ended.

        Raises a CoveyError of a rank other than 0; ConfigError: there is no room; ClusterLostError: the head is gone,
        or there is no room any more; KeyboardInterrupt: this process or rank 0 was interrupted, see `covey.signals`.
        """
        group = self._reserve(again=attempt > 0)
        actors: dict[int, Any] = {}
        rank_0: subprocess.Popen[bytes] | None = None
        try:
            address, world = ray.util.get_node_ip_address(), self._config.distributed.learners
            seconds = timedelta(seconds=_PLACE_SECONDS)
            store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=seconds)
            common = {
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
            }
            own, *others = [common | place for place in self._places(group)]
            shared = {name: value for name, value in environment.items() if name.startswith(_PASSED_ON)}
            host: Any = ray.remote(concurrency_groups={"beside": 1})(_rank_host())
            for rank, told in enumerate(others, start=1):
                options = self._options(group, rank) | {"max_restarts": 0, "max_task_retries": 0}
                actors[rank] = host.options(**options).remote(shared | told, os.getcwd())
            runs = {actor.run.remote(self._work, self._config): rank for rank, actor in actors.items()}
            given = {**environment, **own, **self._devices(group), "RAY_ADDRESS": self._head.address}
            command = [sys.executable, "-c", _RANK_0, str(os.getpid()), *self._arguments]
            # In a session of its own: the terminal's Ctrl-C comes here, and rank 0 is told once.
            rank_0 = subprocess.Popen(command, env=given, start_new_session=True)
            return self._watch(rank_0, runs, actors)
        finally:
            self._end(rank_0, actors)
            if not self._head.lost:
                with suppress(Exception):
                    remove_placement_group(group)

    def _reserve(self, *, again: bool) -> PlacementGroup:
        """A place for each rank, the first one's on this node."""
        chosen = self._config.distributed
        deadline, waits = time.monotonic() + chosen.timeout_seconds, False
        while True:
            try:
                self._gpus = gpus_of_learner(self._config, nodes_there())
                _, said = check_cluster(self._config, chosen.learners)
                break
            except ConfigError as error:
                if not again:
                    raise
                if not waits:
                    log.warning("waiting %g s for room: %s", chosen.timeout_seconds, error)
                waits = True
                self._head.check()
                if time.monotonic() > deadline:
                    raise ClusterLostError(
                        f"{error}. It had room before, and for {chosen.timeout_seconds:g} s nothing came in place of "
                        "what is lost; start again when there is: the run continues from its last checkpoint"
                    ) from error
                time.sleep(1)
        for sentence in said:
            log.warning("%s", sentence)
        bundle = {"CPU": CPUS} | ({"GPU": self._gpus} if self._gpus else {})
        where = [{"ray.io/node-id": self._here}, *({} for _ in range(chosen.learners - 1))]
        group = placement_group([bundle] * chosen.learners, strategy="PACK", bundle_label_selector=where)
        if group.wait(_PLACE_SECONDS):
            return group
        remove_placement_group(group)
        free = ray.available_resources()
        raise (ClusterLostError if again else ConfigError)(
            f"distributed.learners={chosen.learners}: Ray does not place them within {_PLACE_SECONDS:g} s, each with "
            f"{CPUS:g} CPU and {self._gpus:g} GPU on one machine and the first on this one; {free.get('CPU', 0.0):g} "
            f"CPUs and {free.get('GPU', 0.0):g} GPUs are free in all: others use the Ray cluster; wait for them, or "
            "use fewer"
        )

    def _places(self, group: PlacementGroup) -> list[dict[str, str]]:
        """Which rank it is, and which of those on its machine, as environment variables."""
        nodes = placement_group_table(group)["bundles_to_node_id"]
        on = [nodes[rank] for rank in range(len(nodes))]
        named = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
        counts = [f"{on.count(node)} on {named.get(node, node)}" for node in dict.fromkeys(on)]
        self._say(f"layout: {len(on)} learners on the Ray cluster {self._head.address}: {', '.join(counts)}")
        return [
            {"RANK": str(rank), "LOCAL_RANK": str(on[:rank].count(node)), "LOCAL_WORLD_SIZE": str(on.count(node))}
            for rank, node in enumerate(on)
        ]

    def _devices(self, group: PlacementGroup) -> dict[str, str]:
        """The GPU of the first place; Ray tells actors theirs."""
        if not self._gpus:
            return {}

        def ask() -> list[str]:  # sent by value
            import ray

            found: list[str] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
            return found

        asked = ray.remote(max_retries=0)(ask).options(**self._options(group, 0)).remote()
        try:
            return {"CUDA_VISIBLE_DEVICES": ",".join(ray.get(asked, timeout=_PLACE_SECONDS * 3))}
        except RayError as error:
            raise ClusterLostError(
                f"distributed.learners: this node does not say which GPU is reserved ({error!s:.300}); look at it with "
                "ray status, and start again"
            ) from error

    def _options(self, group: PlacementGroup, rank: int) -> dict[str, Any]:
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        return {"num_cpus": CPUS, "num_gpus": self._gpus, "scheduling_strategy": place}

    def _watch(self, rank_0: subprocess.Popen[bytes], runs: dict[Any, int], actors: Mapping[int, Any]) -> int:
        """Wait until rank 0 has ended, or another rank too early."""
        waiting, died, since = list(runs), dict[int, str](), 0.0
        refused: CoveyError | None = None
        while True:
            self._head.check()
            status = rank_0.poll()
            over, waiting = ray.wait(waiting, timeout=_LOOK_SECONDS) if waiting else ([], [])
            for ref in over:
                error = _error_of(ref)
                if isinstance(error, CoveyError) and not isinstance(error, RankLostError):
                    refused = refused or error
                elif error is not None:
                    died[runs[ref]] = f"{error}"
            if status is None and not died and refused is None:
                time.sleep(0 if waiting else _LOOK_SECONDS)
                continue
            since = since or time.monotonic()
            if time.monotonic() - since > _TELL_SECONDS or (status is not None and not waiting):
                break
        if refused is not None:
            raise refused
        if status is not None and status - 128 in ENDING and not died:
            raise EndedError(status - 128)
        if status != 0:
            self._tell(status, died, actors)
        return 1 if status is None else status

    def _tell(self, status: int | None, died: Mapping[int, str], actors: Mapping[int, Any]) -> None:
        if status is not None and status < 0:
            log.warning("rank 0 was ended by signal %d", -status)
        for rank, why in sorted(died.items()):
            log.warning("rank %d: %s", rank, why)
        asked = {actor.said.remote(): rank for rank, actor in actors.items()}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_LOOK_SECONDS * 4)
        for ref in answered:
            with suppress(RayError):
                for line in ray.get(ref):
                    log.warning("rank %d said: %s", asked[ref], line)

    def _end(self, rank_0: subprocess.Popen[bytes] | None, actors: Mapping[int, Any]) -> None:
        """All ranks have ended after this; rank 0 is given the time for a checkpoint."""
        try:
            if rank_0 is not None and self._head.lost and self._config.distributed.samplers:
                with suppress(subprocess.TimeoutExpired):  # it finds out by itself, at a moment that can be saved
                    rank_0.wait(_TELL_SECONDS)
            if rank_0 is not None and rank_0.poll() is None:
                rank_0.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    rank_0.wait(_SAVE_SECONDS)
            for actor in actors.values():  # what waits for them fails now
                with suppress(Exception):
                    actor.end.remote()  # reaches it without the head
            for actor in actors.values() if not self._head.lost else ():
                kill(actor)
            if rank_0 is not None:
                with suppress(subprocess.TimeoutExpired):
                    rank_0.wait(_LOOK_SECONDS * 10)
        finally:
            if rank_0 is not None:
                rank_0.kill()
                rank_0.wait()


def _rank_host() -> type:
    """What an actor is. Made here, so that it is sent by value: its environment is there before torch is loaded."""

    class RankHost:
        def __init__(self, environment: dict[str, str], folder: str) -> None:
            import collections
            import logging
            import os

            os.environ.update(environment)
            if os.path.isdir(folder):  # files that the settings name are named from there
                os.chdir(folder)
            self._said: collections.deque[str] = collections.deque(maxlen=20)
            handler = logging.Handler(logging.WARNING)
            handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
            handler.emit = lambda record: self._said.append(handler.format(record))  # type: ignore[method-assign]
            logging.getLogger().addHandler(handler)

        def run(self, work: Any, config: Any) -> None:
            work(config)

        @ray.method(concurrency_group="beside")  # type: ignore[untyped-decorator]
        def said(self) -> list[str]:
            lines = list(self._said)
            self._said.clear()
            return lines

        @ray.method(concurrency_group="beside")  # type: ignore[untyped-decorator]
        def end(self) -> None:
            import os

            os._exit(0)

    return RankHost


def _error_of(ref: Any) -> BaseException | None:
    """What a rank ended with: a CoveyError, or what Ray says with its traceback."""
    try:
        ray.get(ref)
    except RayError as error:
        found = translated(error)
        if isinstance(found, CoveyError):
            return found
        return error if isinstance(error, RayTaskError) else found
    return None
