"""Members that go wrong in all the ways that members can, and a clock that waits for nobody."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from covey.adapters import Adapter
from covey.distributed.fleet import Fleet
from covey.distributed.members import Held, Member, MemberError
from covey.errors import GenerationError
from covey.rollout.learning import Weights
from covey.types import Completion, Progress, Request, SamplingSettings, Support

SETTINGS = SamplingSettings(max_tokens=8)


def weights(version: int, value: float = 0.0) -> Weights:
    tensors = {"base_model.model.q.lora_A.weight": np.full((2, 3), value + version, np.float32)}
    return Weights(version, dict, lambda: Adapter(tensors, {"peft_type": "LORA"}))


def requests(groups: int, size: int = 2, step: int = 0) -> list[Request]:
    rng = np.random.default_rng(groups)
    prompts = [rng.integers(0, 50, size=int(rng.integers(1, 9))) for _ in range(groups)]
    return [Request(ids, (7, step, place, n)) for place, ids in enumerate(prompts) for n in range(size)]


def sample(unit: Sequence[Request], settings: SamplingSettings, version: int) -> list[Completion]:
    """A function of the unit and the version: each completion depends on what is sampled beside it."""
    beside = hashlib.sha256(b"".join(r.token_ids.tobytes() + repr(r.stream).encode() for r in unit)).digest()
    found = []
    for request in unit:
        seed = hashlib.sha256(beside + repr((request.stream, version, settings)).encode()).digest()
        rng = np.random.default_rng(list(seed))
        ids = rng.integers(0, 50, size=int(rng.integers(1, settings.max_tokens + 1)))
        support = Support(np.arange(len(ids)), np.arange(len(ids) + 1)) if rng.random() < 0.5 else None
        found.append(Completion(ids, rng.normal(size=len(ids)).astype(np.float32), "length", version, support))
    return found


class Clock:
    """Time that passes only while somebody waits, up to the next thing that happens."""

    def __init__(self) -> None:
        self.now = 0.0
        self.agenda: list[tuple[float, int, Any]] = []

    def __call__(self) -> float:
        return self.now

    def at(self, delay: float, action: Any) -> None:
        self.agenda.append((self.now + delay, len(self.agenda), action))

    def wait(self, futures: Sequence[Future[Any]], timeout: float, return_when: str) -> None:
        end = self.now + timeout
        while not any(future.done() for future in futures):
            due = [entry for entry in self.agenda if entry[0] <= end]
            if not due:
                self.now = end
                return
            first = min(due, key=lambda entry: entry[:2])
            self.agenda.remove(first)
            self.now = max(self.now, first[0])
            first[2]()


@dataclass
class World:
    """Where the members of a fleet live.

    Attributes:
        faults: what each unit, load or start meets in the order in which they are begun; "" when there is none left.
        stopped, started: names of members.
        begun: who was asked for a unit, and its completions.
        made: members that were asked for.
    """

    faults: list[str] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    stopped: list[str] = field(default_factory=list)
    begun: list[tuple[str, int]] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    made: int = 0

    def fault(self) -> str:
        return self.faults.pop(0) if self.faults else ""

    def make(self, again: bool) -> Future[Member]:
        self.made += 1
        future: Future[Member] = Future()
        kind = self.fault() if again else ""
        if kind == "die":
            self.clock.at(0.5, lambda: future.set_exception(MemberError("no start")))
        elif kind != "hang":
            member = FakeMember(self, f"m{self.made}")
            self.started.append(member.name)
            self.clock.at(1.0, lambda: future.set_result(member))
        return future

    def run_out(self) -> None:
        """What is still to happen happens."""
        while self.clock.agenda:
            self.clock.agenda.pop(0)[2]()

    def fleet(self, members: int, *, unit_size: int = 4, **options: Any) -> Fleet:
        options = {"timeout_seconds": 10.0, "max_restarts": 100, "wait": self.clock.wait, "clock": self.clock} | options
        return Fleet([self.make] * members, unit_size=unit_size, **options)


class FakeMember:
    context_length = 64

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.version, self.sha256 = world, name, -1, ""
        self.gone = False

    def load(self, held: Held) -> Future[str]:
        future: Future[str] = Future()
        kind = self.world.fault()

        def take() -> None:
            self.version, self.sha256 = held.weights.version, held.sha256
            future.set_result("of something else" if kind == "wrong hash" else held.sha256)

        if kind == "die":
            self.world.clock.at(0.1, lambda: future.set_exception(MemberError("died in a sync")))
        elif kind != "hang":
            self.world.clock.at(0.3, take)
        return future

    def begin(
        self, unit: Sequence[Request], settings: SamplingSettings, version: int, progress: Progress
    ) -> Future[list[Completion]]:
        assert version == self.version
        assert not self.gone, "a member that was given up is asked"
        future: Future[list[Completion]] = Future()
        kind, clock = self.world.fault(), self.world.clock
        self.world.begun.append((self.name, len(unit)))
        right = sample(unit, settings, version)
        if kind == "die":
            clock.at(0.5, lambda: future.set_exception(MemberError("died")))
        elif kind == "late":  # long after it was given up
            wrong = sample(unit, settings, version + 1)
            clock.at(25.0, lambda: future.set_result(wrong))
        elif kind == "slow":  # longer than the deadline, and it says how far it is
            for second in range(1, 4):
                clock.at(7.0 * second, lambda second=second: progress(second, len(unit)))
            clock.at(24.0, lambda: future.set_result(right))
        elif kind == "wrong version":
            wrong = sample(unit, settings, version - 1)
            clock.at(0.5, lambda: future.set_result(wrong))
        elif kind == "too few":
            clock.at(0.5, lambda: future.set_result(right[:-1]))
        elif kind == "refuses":
            clock.at(0.5, lambda: future.set_exception(GenerationError("the prompt is too long")))
        elif kind == "bug":
            clock.at(0.5, lambda: future.set_exception(RuntimeError("CUDA out of memory")))
        elif kind != "hang":
            clock.at(0.5 + len(unit) / 10, lambda: future.set_result(right))
            clock.at(0.6 + len(unit) / 10, lambda: progress(len(unit), len(unit)))
        return future

    def watch(self) -> None:
        pass

    def stop(self, *, failed: bool) -> None:
        self.gone = True
        self.world.stopped.append(self.name)
