"""The fleet's result is one member's, whatever its members do.

They go wrong in all the ways that members can, and their clock waits for nobody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.adapters import Adapter
from covey.distributed.fleet import Fleet
from covey.distributed.members import Held, Member, MemberError
from covey.distributed.units import make_units
from covey.errors import GenerationError, ServingError
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


def bits(completions: Sequence[Completion]) -> list[object]:
    found: list[object] = []
    for one in completions:
        kept = None if one.support is None else (one.support.ids.tobytes(), one.support.offsets.tobytes())
        arrays = (one.token_ids.astype(np.int64).tobytes(), one.logprobs.tobytes())
        found.append((*arrays, one.finish_reason, one.policy_version, kept))
    return found


def alone(asked: Sequence[Request], version: int, size: int = 4) -> list[object]:
    return bits([found for unit in make_units(asked, size) for found in sample(unit.requests, SETTINGS, version)])


# ---------------------------------------------------------------------- units


def test_units_are_whole_groups_in_order() -> None:
    asked = requests(5, 3)
    units = make_units(asked, 6)
    assert [len(unit.requests) for unit in units] == [6, 6, 3]
    assert [unit.first for unit in units] == [0, 6, 12]
    assert [r for unit in units for r in unit.requests] == asked
    assert [len(unit.requests) for unit in make_units(asked, 1)] == [3] * 5
    assert [len(unit.requests) for unit in make_units(asked, 4)] == [6, 6, 3]  # groups are never cut
    assert make_units([], 4) == []


def test_single_completions_fill_units() -> None:
    assert [len(unit.requests) for unit in make_units(requests(10, 1), 4)] == [4, 4, 2]


# ---------------------------------------------------------------------- members that go wrong

FAULTS = st.sampled_from(["", "", "", "die", "hang", "late", "slow", "wrong version", "too few", "bug"])


def attempt(fleet: Fleet, asked: Sequence[Request]) -> tuple[list[Completion] | None, str]:
    try:
        return fleet(asked, SETTINGS, policy_version=3), ""
    except GenerationError as error:
        return None, str(error)


@settings(max_examples=150, deadline=None)
@given(
    members=st.integers(1, 4), groups=st.integers(1, 12), size=st.integers(1, 9), faults=st.lists(FAULTS, max_size=12)
)
def test_the_result_is_one_members(members: int, groups: int, size: int, faults: list[str]) -> None:
    world = World()
    fleet = world.fleet(members, unit_size=size)
    fleet.publish(weights(3))
    world.faults = list(faults)
    asked = requests(groups)
    found, error = attempt(fleet, asked)
    if found is None:
        assert "failed one after another" in error
        assert sum(kind not in ("", "slow") for kind in faults) >= 3
        return
    assert bits(found) == alone(asked, 3, size)
    fleet.publish(weights(4))  # late answers of the version before arrive meanwhile
    world.faults = []
    again = requests(groups, step=1)
    assert bits(fleet(again, SETTINGS, policy_version=4)) == alone(again, 4, size)
    fleet.close()
    world.run_out()
    assert sorted(set(world.stopped)) == sorted(world.started)


@settings(max_examples=60, deadline=None)
@given(members=st.integers(1, 3), faults=st.lists(st.sampled_from(["", "die", "hang"]), max_size=6))
def test_weights_reach_everybody(members: int, faults: list[str]) -> None:
    world = World()
    fleet = world.fleet(members)
    world.faults = list(faults)
    fleet.publish(weights(1))
    world.faults = []
    asked = requests(9)
    assert bits(fleet(asked, SETTINGS, policy_version=1)) == alone(asked, 1)


def test_units_are_shared_out_and_the_longest_prompts_go_first() -> None:
    world = World()
    fleet = world.fleet(3)
    fleet.publish(weights(1))
    progress: list[tuple[int, int]] = []
    fleet(requests(12), SETTINGS, policy_version=1, progress=lambda done, total: progress.append((done, total)))
    assert {name for name, _ in world.begun} == {"m1", "m2", "m3"}
    assert progress[-1] == (24, 24)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)


def test_a_death_is_told_and_counted() -> None:
    world = World()
    fleet = world.fleet(2)
    fleet.publish(weights(1))
    world.faults = ["die"]
    asked = requests(8)
    assert bits(fleet(asked, SETTINGS, policy_version=1)) == alone(asked, 1)
    (sentence,) = fleet.take_news()
    assert sentence == "sampler 1 (m1) failed while sampling: died; it is replaced"
    metrics = fleet.take_metrics()
    assert metrics["samplers/reissued_units"] == metrics["samplers/restarts"] == 1
    assert metrics["time/samplers_waiting"] > 0
    assert fleet.take_metrics()["samplers/restarts"] == 0
    assert world.stopped == ["m1"]
    first, second = fleet.members()
    assert (first["failed"], first["left"], second["failed"], second["version"]) == (1, False, 0, 1)
    assert first["units"] + second["units"] == 4


def test_silence_has_a_deadline_and_progress_is_no_silence() -> None:
    world = World()
    fleet = world.fleet(1)
    fleet.publish(weights(1))
    world.faults = ["slow"]
    fleet(requests(2), SETTINGS, policy_version=1)
    assert fleet.take_news() == []
    world.faults, before = ["hang"], world.clock.now
    fleet(requests(2), SETTINGS, policy_version=1)
    assert "silent for 10 s (distributed.timeout_seconds)" in fleet.take_news()[0]
    assert world.clock.now - before < 14


def test_a_unit_that_three_members_fail_at_is_to_blame() -> None:
    world = World()
    fleet = world.fleet(1)
    fleet.publish(weights(1))
    world.faults = ["die", "", "", "die", "", "", "bug"]  # a unit, a start, a load, ...
    with pytest.raises(GenerationError, match=r"3 samplers failed.*\[\(7, 0, 0\), \(7, 0, 1\)\].*CUDA out of memory"):
        fleet(requests(2), SETTINGS, policy_version=1)


def test_what_the_unit_asks_for_wrongly_is_raised_at_once() -> None:
    world = World()
    fleet = world.fleet(2)
    fleet.publish(weights(1))
    world.faults = ["", "refuses"]
    with pytest.raises(GenerationError, match="the prompt is too long"):
        fleet(requests(8), SETTINGS, policy_version=1)
    assert world.stopped == []
    asked = requests(5, step=2)  # what the others were doing is forgotten
    assert bits(fleet(asked, SETTINGS, policy_version=1)) == alone(asked, 1)


def test_the_run_goes_on_with_fewer_and_ends_with_none() -> None:
    world = World()
    fleet = world.fleet(2, max_restarts=1)
    fleet.publish(weights(1))
    world.faults = ["die", "", "die"]
    asked = requests(8)
    assert bits(fleet(asked, SETTINGS, policy_version=1)) == alone(asked, 1)
    assert "2 times in a row: the run goes on with 1 of 2" in fleet.take_news()[1]
    world.faults = ["die", "die"]
    with pytest.raises(GenerationError, match=r"sampler 2.*, the last one, failed while starting: no start"):
        fleet(requests(2), SETTINGS, policy_version=1)


def test_other_numbers_than_were_sent_stop_the_run() -> None:
    world = World()
    fleet = world.fleet(2)
    world.faults = ["", "wrong hash"]
    with pytest.raises(GenerationError, match=r"sampler 2 \(m2\) applied weights with the hash of something.*was sent"):
        fleet.publish(weights(1))


def test_only_the_published_version_is_sampled() -> None:
    fleet = World().fleet(1)
    with pytest.raises(GenerationError, match="policy_version=0: the samplers hold no weights"):
        fleet(requests(1), SETTINGS, policy_version=0)
    fleet.publish(weights(2))
    with pytest.raises(GenerationError, match="policy_version=1: the samplers hold version 2"):
        fleet(requests(1), SETTINGS, policy_version=1)


def test_other_weights_of_the_same_version_are_taken() -> None:
    world = World()
    fleet = world.fleet(1)
    fleet.publish(weights(2))
    taken = world.clock.now
    fleet.publish(weights(2, 0.5))
    assert world.clock.now > taken


def test_a_member_that_cannot_start_ends_the_start() -> None:
    world = World()
    made = [world.make, lambda again: _failing()]
    with pytest.raises(ServingError, match="sampler 2 cannot be started: no room"):
        Fleet(made, unit_size=2, wait=world.clock.wait, clock=world.clock)
    world.run_out()
    assert world.stopped == ["m1"]  # that one came when nobody waited any more


def _failing() -> Future[Member]:
    future: Future[Member] = Future()
    future.set_exception(MemberError("no room"))
    return future


def test_weights_are_copied_before_the_update_changes_them() -> None:
    world = World()
    fleet = world.fleet(1)
    published = weights(1)
    fleet.publish(published)
    before = fleet._held
    assert before is not None
    held = next(iter(before.weights.adapter.tensors.values()))  # type: ignore[union-attr]
    next(iter(published.adapter.tensors.values()))[:] = 99.0  # type: ignore[union-attr]
    assert (held == 1.0).all()


def test_it_starts_anew_after_it_was_closed() -> None:
    world = World()
    fleet = world.fleet(2)
    fleet.publish(weights(1))
    fleet.close()
    assert world.stopped == ["m1", "m2"]
    asked = requests(4)
    assert bits(fleet(asked, SETTINGS, policy_version=1)) == alone(asked, 1)
    assert world.made == 4
