"""The processes that train together, and what they say to each other; none of it waits without a deadline.

Rank 0 runs the loop and tells the others what to call. Between calls, while it samples for an hour, a thread of it says
every few seconds that it is still there, so that the others can tell a long step from a dead process. Before the first
call all wait until each has built its parts, which one on a busy machine does later than the others.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from covey.config.whole import GRPOConfig
from covey.distributed.guards import Facts, check_mixture, check_models, check_versions, facts_here, installed, mixtures
from covey.distributed.members import START_SECONDS
from covey.errors import ConfigError, ModelError

IDLE = "idle"
STOP = "stop"
_SUM_NUMBERS = 1 << 17
"""Whole numbers that are added up on trial: 1 MB."""


class RankLostError(ModelError):
    """Another rank is gone, or does not answer."""


class TornError(ModelError):
    """The ranks cannot go on together: one has left work that the others share in."""


class NoMemoryError(TornError):
    """They have left it for want of memory, and another start would not help."""


class Ranks:
    """The processes that train, as one of them sees them."""

    def __init__(self, rank: int = 0, world: int = 1, timeout_seconds: float = 600.0) -> None:
        """Join the others, of which the environment tells as torchrun sets it."""
        self.rank, self.world = rank, world
        self._timeout = timeout_seconds
        self._busy = threading.RLock()
        self._ended = threading.Event()
        self._calls: Any = None
        self._torn = ""
        self.pictures: Sequence[Any] = ()
        self._store: Any = None  # until all ranks are known to be ready for calls
        if world == 1:
            return
        deadline, starting = timedelta(seconds=timeout_seconds), max(timeout_seconds, START_SECONDS)
        with self.waiting("joining", starting):
            # torchrun's store outlives its ranks: those that it starts again must not read the addresses of the dead.
            store, *_ = next(dist.rendezvous("env://", rank, world, timeout=timedelta(seconds=starting)))  # type: ignore[attr-defined]
            attempt = dist.PrefixStore(f"covey-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)  # type: ignore[attr-defined]
            await_all(attempt, rank, world, starting)
            dist.init_process_group("gloo", store=attempt, rank=rank, world_size=world, timeout=deadline)
            self._calls = dist.new_group(backend="gloo", timeout=deadline)
            self._store = attempt
        if rank == 0:
            threading.Thread(target=self._say_idle, name="covey-ranks", daemon=True).start()

    @classmethod
    def of_torchrun(cls, timeout_seconds: float = 600.0) -> Ranks | None:
        """The ranks that torchrun has started, or None where it has not. Raises ConfigError."""
        rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        if rank is None or world is None:
            return None
        set_by_torchrun = int(world) == 1 or "MASTER_ADDR" in os.environ if world.isdecimal() else False
        if not (rank.isdecimal() and set_by_torchrun and int(rank) < int(world)):
            raise ConfigError(
                f"RANK={rank!r}, WORLD_SIZE={world!r}, MASTER_ADDR={os.environ.get('MASTER_ADDR', '')!r}: torchrun "
                "sets them; unset them to run without it"
            )
        return cls(int(rank), int(world), timeout_seconds)

    @contextmanager
    def telling(self, message: Any, pictures: Sequence[Any] = ()) -> Iterator[None]:
        """Rank 0: all others get the message, and until the end of the block are taken to be at work on it, with the
        pictures that it names.
        """
        with self._busy:
            if self._torn:
                raise TornError(self._torn)
            if self.world > 1:
                self.await_ready()
                with self.waiting("telling the others"):
                    dist.broadcast_object_list([message, pictures], src=0, group=self._calls)
            yield

    def hear(self) -> Any:
        """Another rank: the next message, or `STOP`; `pictures` are then those that it names."""
        self.await_ready()
        while True:
            box: list[Any] = [None, None]
            with self.waiting("waiting for rank 0"):
                dist.broadcast_object_list(box, src=0, group=self._calls)
            if box[0] != IDLE:
                self.pictures = box[1]
                return box[0]

    def await_ready(self) -> None:
        """Before the first call: say that this rank is ready for it, and wait for the others that are to hear it."""
        if self._store is None:
            return
        seconds = max(self._timeout, START_SECONDS)
        with self.waiting("waiting until all have started", seconds):
            if self.rank > 0:
                self._store.set(f"ready-{self.rank}", "")
            names = [f"ready-{rank}" for rank in range(1, self.world)]
            self._store.wait(names, timedelta(seconds=seconds))
        self._store = None

    def _say_idle(self) -> None:
        while not self._ended.wait(min(self._timeout / 4, 30.0)):
            if self._busy.acquire(blocking=False):
                try:
                    if not self._ended.is_set():
                        self.await_ready()
                        dist.broadcast_object_list([IDLE, None], src=0, group=self._calls)
                except (RuntimeError, RankLostError):  # the next call of the loop says who is gone
                    return
                finally:
                    self._busy.release()

    def gather(self, own: Any) -> list[Any]:
        """What every rank gives, in the order of ranks, on every rank."""
        if self.world == 1:
            return [own]
        found = [None] * self.world
        with self.waiting("putting results together"):
            dist.all_gather_object(found, own)
        return found

    def add(self, total: torch.Tensor) -> None:
        """The sum of a tensor over all ranks, in place."""
        if self.world == 1:
            return
        here = total.cpu()
        with self.waiting("adding gradients"):
            dist.all_reduce(here)
        if here is not total:
            total.copy_(here)

    def mesh(self, device: str, parts: int) -> DeviceMesh:
        """The ranks, for tensors that are sharded over each `parts` of them: two dimensions, the first one of equal
        parts, or one where that is all ranks.
        """
        backend = "nccl" if device == "cuda" else "gloo"
        numbers = torch.arange(self.world).view(-1, parts)

        def join(members: torch.Tensor) -> Any:
            return dist.new_group(members.tolist(), backend=backend, timeout=timedelta(seconds=self._timeout))

        with self.waiting("joining"):
            if parts == self.world:
                return DeviceMesh.from_group(join(numbers[0]), device)
            # every rank makes every group, in the same order
            columns, rows = [join(members) for members in numbers.T], [join(members) for members in numbers]
            own = [columns[self.rank % parts], rows[self.rank // parts]]
            return DeviceMesh.from_group(own, device, mesh=numbers, mesh_dim_names=("copies", "parts"))

    @property
    def local_world(self) -> int:
        """How many of the ranks are on this machine."""
        told = os.environ.get("LOCAL_WORLD_SIZE", "")
        return int(told) if told.isdecimal() else self.world

    def torn(self, why: str) -> TornError:
        """The error to raise where this rank has failed while others wait for it; no call comes after it."""
        self._torn = (
            f"rank {self.rank} of {self.world} failed beside others that wait for it, or they failed first: {why}; see "
            "what the others print, and start again: the run continues from its last checkpoint"
        )
        return TornError(self._torn)

    def leave(self) -> None:
        """Leave the group after a failure; the others, which may wait for something else, see the connection end."""
        self._torn = self._torn or "this rank has left"
        self.close()

    def close(self) -> None:
        """Rank 0 lets the others go; each leaves the group. May be called twice."""
        if self.world == 1 or self._ended.is_set():
            return
        self._ended.set()
        if self.rank == 0 and not self._torn:
            with suppress(RankLostError), self.telling(STOP):  # they may be gone already
                pass
        dist.destroy_process_group()

    @contextmanager
    def waiting(self, doing: str, seconds: float | None = None) -> Iterator[None]:
        """A collective inside that fails is a `RankLostError`, which says what it was for."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            # what gloo and the store say, without where in their source they say it and what they guess
            line = re.sub(r"^\[/\S+\]\s*", "", str(error).splitlines()[0] if str(error) else type(error).__name__)
            said = line.partition(" This is typically caused")[0][:600]
            raise RankLostError(
                f"rank {self.rank} of {self.world}, {doing}: another rank is gone or did not answer within "
                f"{seconds or self._timeout:g} s ({said}); see what the others print, and "
                "start again: the run continues from its last checkpoint"
            ) from error


def check_ranks(ranks: Ranks, config: GRPOConfig) -> list[str]:
    """Refuse ranks whose numbers would differ, and try one sum; every rank calls this and raises the same."""
    own = (installed(), {**facts_here(config.model.model), "threads": torch.get_num_threads()}, whereabouts())
    told: list[Any] = ranks.gather(own)
    (versions, first, where), others = told[0], told[1:]
    facts = {f"rank {rank} on {place}": Facts(**found) for rank, (_, found, place) in enumerate(others, 1)}
    differences = []
    for rank, (theirs, _, place) in enumerate(others, 1):
        differences += check_versions(f"rank {rank} on {place}", theirs, versions, "rank 0")
    leader = Facts(**first)
    check_models(config.model.model, leader, {f"rank 0 on {where}": leader, **facts})
    on_gpus = config.model.device != "cpu" and bool(leader.gpus)
    said = mixtures(leader, facts, gpus=on_gpus, name_of_own="rank 0")
    total = torch.full((_SUM_NUMBERS,), ranks.rank + 1, dtype=torch.int64)
    ranks.add(total)
    if not bool((total == ranks.world * (ranks.world + 1) // 2).all()):
        raise ModelError(f"the ranks' sum of 1 MB is wrong on {whereabouts()}: look at its network and memory")
    return check_mixture([*differences, *said], allowed=config.run.allow_mixture)


def await_all(store: Any, rank: int, world: int, seconds: float) -> None:
    """Wait until every rank has come. Raises RuntimeError: some have not; it names them, and where the others are."""
    store.set(f"here-{rank}", whereabouts())
    deadline = time.monotonic() + seconds
    for other in range(world):
        left = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait([f"here-{other}"], timedelta(seconds=left))
        except RuntimeError:
            break
    missing = [other for other in range(world) if not store.check([f"here-{other}"])]
    if missing:
        came = [other for other in range(world) if other not in missing]
        there = [f"rank {other} on {store.get(f'here-{other}').decode()}" for other in came[:8]]
        names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise RuntimeError(
            f"rank {names} of {world} did not come; {', '.join(there)} did. Look there, and that the machines reach "
            "each other through these addresses (GLOO_SOCKET_IFNAME chooses another interface)"
        )


def whereabouts() -> str:
    """The name of this machine, with the address by which it reaches the other ranks."""
    master = (os.environ.get("MASTER_ADDR", "127.0.0.1"), 9)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(master)  # sends nothing
            address = str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()} ({address})"
