"""The fleet's result is one member's, whatever its members do, for agents too; a clock that waits for nobody."""

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import ended_well, learned, train

from covey import GRPOConfig, GRPOTrainer
from covey.adapters import Adapter
from covey.distributed import in_turns, start
from covey.distributed.fleet import Fleet
from covey.distributed.members import Held, Member, MemberError, done, in_thread
from covey.distributed.ranks import Ranks
from covey.distributed.units import make_units
from covey.environments.pool import EnvironmentPool
from covey.errors import GenerationError, ServingError
from covey.observe.run_folder import RunFolder
from covey.pytorch.backend import BACKEND
from covey.rollout.learning import TrainedPolicy, Weights
from covey.training.launch import RanksBackend
from covey.types import Completion, Request, SamplingSettings, Support
from fakes import raises, slow

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
    faults: list[str] = field(default_factory=list)  # what is met by units, loads and starts, as they are begun
    clock: Clock = field(default_factory=Clock)
    stopped: list[str] = field(default_factory=list)  # members
    begun: list[tuple[str, int]] = field(default_factory=list)  # who was asked for a unit, and its completions
    started: list[str] = field(default_factory=list)
    made: int = 0  # members that were asked for

    def fault(self) -> str:
        return self.faults.pop(0) if self.faults else ""

    def answer(self, delay: float, found: Any) -> Future[Any]:
        future: Future[Any] = Future()
        give = future.set_exception if isinstance(found, Exception) else future.set_result
        self.clock.at(delay, partial(give, found))
        return future

    def make(self, again: bool) -> Future[Member]:
        self.made += 1
        kind = self.fault() if again else ""
        if kind == "die":
            return self.answer(0.5, MemberError("no start"))
        if kind == "hang":
            return Future()
        member = FakeMember(self, f"m{self.made}")
        self.started.append(member.name)
        return self.answer(1.0, member)

    def run_out(self) -> None:
        while self.clock.agenda:
            self.clock.agenda.pop(0)[2]()

    def fleet(self, members: int, *, unit_size: int = 4, **options: Any) -> Fleet:
        options = {"timeout_seconds": 10.0, "max_restarts": 100, "wait": self.clock.wait, "clock": self.clock} | options
        return Fleet([self.make] * members, unit_size=unit_size, **options)


class FakeMember:
    context_length = 64

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.version, self.gone = world, name, -1, False

    def load(self, held: Held) -> Future[str]:
        kind = self.world.fault()
        if kind == "die":
            return self.world.answer(0.1, MemberError("died in a sync"))
        if kind == "hang":
            return Future()
        self.world.clock.at(0.3, lambda: setattr(self, "version", held.weights.version))
        return self.world.answer(0.3, "of something else" if kind == "wrong hash" else held.sha256)

    def begin(self, unit: Sequence[Request], settings: Any, version: int, progress: Any) -> Future[list[Completion]]:
        assert version == self.version
        assert not self.gone, "a member that was given up is asked"
        kind, clock, size, right = self.world.fault(), self.world.clock, len(unit), sample(unit, settings, version)
        self.world.begun.append((self.name, size))
        if kind == "hang":
            return Future()
        for second in range(1, 4) if kind == "slow" else ():
            clock.at(7.0 * second, partial(progress, second, size))
        ends = {
            "die": (0.5, MemberError("died")),
            "late": (25.0, sample(unit, settings, version + 1)),  # long after it was given up
            "slow": (24.0, right),  # longer than the deadline, and it says how far it is
            "wrong version": (0.5, sample(unit, settings, version - 1)),
            "too few": (0.5, right[:-1]),
            "refuses": (0.5, GenerationError("the prompt is too long")),
            "bug": (0.5, RuntimeError("CUDA out of memory")),
        }
        future = self.world.answer(*ends.get(kind, (0.5 + size / 10, right)))
        if not kind:
            clock.at(0.6 + size / 10, partial(progress, size, size))
        return future

    def watch(self) -> None: ...

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
    return bits([found for unit in make_units(asked, size) for found in sample(unit, SETTINGS, version)])


def ready(members: int, *faults: str, **options: Any) -> tuple[World, Fleet]:
    """A fleet that holds version 1, and what it will meet then."""
    world = World()
    fleet = world.fleet(members, **options)
    fleet.publish(weights(1))
    world.faults = list(faults)
    return world, fleet


def assert_right(fleet: Fleet, asked: Sequence[Request], version: int = 1, size: int = 4) -> None:
    assert bits(fleet(asked, SETTINGS, policy_version=version)) == alone(asked, version, size)


def test_units_are_whole_groups_in_order() -> None:
    asked = requests(5, 3)
    assert [r for unit in make_units(asked, 6) for r in unit] == asked
    threes = [6, 6, 3]  # groups are never cut
    sizes = [(asked, 6, threes), (asked, 1, [3] * 5), (asked, 4, threes), ([], 4, []), (requests(10, 1), 4, [4, 4, 2])]
    for some, size, expected in sizes:
        assert [len(unit) for unit in make_units(some, size)] == expected


FAULTS = st.sampled_from(["", "", "", "die", "hang", "late", "slow", "wrong version", "too few", "bug"])


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 9), st.lists(FAULTS, max_size=12))
def test_the_result_is_one_members(members: int, groups: int, size: int, faults: list[str]) -> None:
    world, fleet = ready(members, *faults, unit_size=size)
    error = ""
    try:
        assert_right(fleet, requests(groups), 1, size)
    except GenerationError as raised:
        error = str(raised)
    if error:
        assert "failed one after another" in error
        assert sum(kind not in ("", "slow") for kind in faults) >= 3
        return
    fleet.publish(weights(4))  # late answers of the version before arrive meanwhile
    world.faults = []
    assert_right(fleet, requests(groups, step=1), 4, size)
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
    assert_right(fleet, requests(9))


def test_units_are_shared_out_and_progress_is_told() -> None:
    world, fleet = ready(3)
    progress: list[tuple[int, int]] = []
    fleet(requests(12), SETTINGS, policy_version=1, progress=lambda done, total: progress.append((done, total)))
    assert ({name for name, _ in world.begun}, progress[-1]) == ({"m1", "m2", "m3"}, (24, 24))
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)


def test_a_death_is_told_and_counted() -> None:
    world, fleet = ready(2, "die")
    assert_right(fleet, requests(8))
    assert fleet.take_news() == ["sampler 1 (m1) failed while sampling: died; it is replaced"]
    metrics = fleet.take_metrics()
    assert metrics["samplers/reissued_units"] == metrics["samplers/restarts"] == 1
    assert metrics["time/samplers_waiting"] > 0
    assert (fleet.take_metrics()["samplers/restarts"], world.stopped) == (0, ["m1"])
    first, second = fleet.members()
    assert (first["failed"], first["left"], second["failed"], second["version"]) == (1, False, 0, 1)
    assert first["units"] + second["units"] == 4


def test_silence_has_a_deadline_and_progress_is_no_silence() -> None:
    world, fleet = ready(1, "slow")
    fleet(requests(2), SETTINGS, policy_version=1)
    assert fleet.take_news() == []
    world.faults, before = ["hang"], world.clock.now
    fleet(requests(2), SETTINGS, policy_version=1)
    assert "silent for 10 s (distributed.timeout_seconds)" in fleet.take_news()[0]
    assert world.clock.now - before < 14


def test_a_unit_that_three_members_fail_at_is_to_blame() -> None:
    _, fleet = ready(1, "die", "", "", "die", "", "", "bug")  # a unit, a start, a load, ...
    with pytest.raises(GenerationError, match=r"3 samplers failed.*\[\(7, 0, 0\), \(7, 0, 1\)\].*CUDA out of memory"):
        fleet(requests(2), SETTINGS, policy_version=1)


def test_what_the_unit_asks_for_wrongly_is_raised_at_once() -> None:
    world, fleet = ready(2, "", "refuses")
    raises(GenerationError, "the prompt is too long", fleet, requests(8), SETTINGS, policy_version=1)
    assert world.stopped == []
    assert_right(fleet, requests(5, step=2))  # what the others were doing is forgotten


def test_the_run_goes_on_with_fewer_and_ends_with_none() -> None:
    world, fleet = ready(2, "die", "", "die", max_restarts=1)
    assert_right(fleet, requests(8))
    assert "2 times in a row: the run continues with 1 of 2" in fleet.take_news()[1]
    world.faults = ["die", "die"]
    with pytest.raises(GenerationError, match=r"sampler 2.*, the last one, failed while starting: no start"):
        fleet(requests(2), SETTINGS, policy_version=1)


def test_other_numbers_than_were_sent_stop_the_run() -> None:
    world = World()
    fleet = world.fleet(2)
    world.faults = ["", "wrong hash"]
    with pytest.raises(GenerationError, match=r"sampler 2 \(m2\) applied weights with the hash of something.*was sent"):
        fleet.publish(weights(1))


def test_only_what_was_published_last_is_sampled() -> None:
    world = World()
    fleet = world.fleet(1)
    with pytest.raises(GenerationError, match="policy_version=0: the samplers hold no weights"):
        fleet(requests(1), SETTINGS, policy_version=0)
    fleet.publish(weights(2))
    with pytest.raises(GenerationError, match="policy_version=1: the samplers hold version 2"):
        fleet(requests(1), SETTINGS, policy_version=1)
    taken = world.clock.now
    fleet.publish(weights(2, 0.5))  # other weights of the same version are taken
    assert world.clock.now > taken


def test_a_member_that_cannot_start_ends_the_start() -> None:
    world, failing = World(), Future[Member]()
    failing.set_exception(MemberError("no room"))
    with pytest.raises(ServingError, match="sampler 2 cannot be started: no room"):
        Fleet([world.make, lambda again: failing], unit_size=2, wait=world.clock.wait, clock=world.clock)
    world.run_out()
    assert world.stopped == ["m1"]  # that one came when nobody waited any more


def test_weights_are_copied_before_the_update_changes_them() -> None:
    fleet, published = World().fleet(1), weights(1)
    fleet.publish(published)
    held = next(iter(fleet._held.weights.adapter.tensors.values()))  # type: ignore[union-attr]
    next(iter(published.adapter.tensors.values()))[:] = 99.0  # type: ignore[union-attr]
    assert (held == 1.0).all()


def test_it_starts_anew_after_it_was_closed() -> None:
    world, fleet = ready(2)
    fleet.close()
    assert world.stopped == ["m1", "m2"]
    assert_right(fleet, requests(4))
    assert world.made == 4


WORLD = {"world": "house:rooms=2,num_train=6,num_eval=3", "max_conversation_tokens": 600}
WORLD |= {"max_completion_length": 16, "eval_on_start": False}
CHOICE = {"action_format": "choice"}
STEPS = {"history_length": 1, "max_conversation_tokens": 400, **CHOICE}


Asked = dict[tuple[int, ...], set[int]]
"""Conversation -> members that were asked for it."""


class EngineMember:
    """An engine of its own, behind a thread; `dies` says which of all calls it does not survive."""

    def __init__(self, engine: Any, calls: Iterator[int], asked: Asked, dies: Sequence[int]) -> None:
        self.engine, self.calls, self.asked, self.dies = engine, calls, asked, dies
        self.name, self.context_length = f"engine {id(self):x}", engine.context_length

    def load(self, held: Held) -> Future[str]:
        self.engine.publish(held.weights)
        return done(held.sha256)

    def begin(
        self, requests: Sequence[Request], settings: Any, version: int, progress: Any
    ) -> Future[list[Completion]]:
        if next(self.calls) in self.dies:
            future: Future[list[Completion]] = Future()
            future.set_exception(MemberError("died"))
            return future
        for request in requests:
            self.asked.setdefault(tuple(request.stream[:-1]), set()).add(id(self))
        return in_thread(lambda: self.engine(requests, settings, policy_version=version))

    def watch(self) -> None: ...

    def stop(self, *, failed: bool) -> None: ...


@pytest.fixture
def play(settings: dict[str, Any], tmp_path: Path) -> Callable[..., GRPOTrainer]:
    def played(name: str, *, ranks: bool = False, **changes: Any) -> GRPOTrainer:
        args = GRPOConfig(**(settings | WORLD | changes | {"output_dir": str(tmp_path / name)}))
        trainer = GRPOTrainer(args=args, backend=RanksBackend(Ranks()) if ranks else None)
        trainer.train()
        return trainer

    return played


def said(trainer: GRPOTrainer) -> list[list[str]]:
    folder = RunFolder.read(trainer.args.run.output_dir)
    return [[row["completion"] for row in folder.read_completions(step)] for step in (1, 2)]


def assert_alike(here: GRPOTrainer, there: GRPOTrainer) -> None:
    """In the first step: then weights differ in their last digits."""
    ours, theirs = said(here), said(there)
    assert theirs[0] == ours[0]
    assert sum(a == b for a, b in zip(theirs[1], ours[1], strict=True)) >= 7


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Asked]:
    """Samplers are engines of this process, of which some calls die."""

    def made(*dies: int) -> Asked:
        asked, calls = Asked(), itertools.count(1)

        def actors(config: GRPOConfig, policy: TrainedPolicy) -> Fleet:
            def make(again: bool) -> Future[Member]:
                return done(EngineMember(BACKEND.make_sampler(config, policy), calls, asked, dies))

            return start._fleet(config, [make] * (config.distributed.samplers or 0))

        monkeypatch.setattr(start, "_actors", actors)
        return asked

    return made


TAGS = {"action_format": "tags", "stop_strings": ("e",)}


@pytest.mark.parametrize("how", [CHOICE, slow(TAGS), slow(STEPS)], ids=str)
def test_agents_play_as_in_one_process(play: Any, fleet: Any, how: dict[str, Any]) -> None:
    here, asked = play("here", **how), fleet()
    assert_alike(here, play("there", samplers=3, **how))
    assert {len(members) for members in asked.values()} == {1}  # a conversation stays where it is
    assert len(set.union(*asked.values())) == 3
    fleet(2, 5, 9)
    killed = play("killed", samplers=2, **how)
    assert_alike(here, killed)
    steps = [record for record in killed.state.log_history if "loss" in record]
    assert sum(record["samplers/restarts"] for record in steps) == 3
    assert all(record["agent/failed_episodes"] == 0 for record in steps)


def numbers(trainer: GRPOTrainer | Path) -> Any:
    folder = trainer if isinstance(trainer, Path) else trainer.args.run.output_dir
    return learned(folder, without=("agent/waiting_share", "eval/agent/waiting_share"))


@pytest.mark.parametrize("how", [CHOICE, STEPS, {"action_format": "tags", "parallel_episodes": 3}], ids=str)
@pytest.mark.slow
def test_speed_and_who_samples_change_nothing(play: Any, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first = play("first", ranks=True, **how)
    assert_alike(play("here", **how), first)
    wait, luck, held = EnvironmentPool.wait, random.Random(5), list[Any]()

    def one_at_a_time(pool: EnvironmentPool, seconds: float | None = None) -> list[Any]:
        if not held:
            held.extend(wait(pool, seconds))
        return [held.pop(luck.randrange(len(held)))] if held else []

    def backwards(ranks: Ranks, sizes: list[int], work: Any) -> list[Any]:
        found = {number: result for number in reversed(range(len(sizes))) for result in work([number])}
        return [found[number] for number in range(len(sizes))]

    monkeypatch.setattr(EnvironmentPool, "wait", one_at_a_time)
    monkeypatch.setattr(in_turns, "run_shared", backwards)
    again = play("again", ranks=True, **how)
    assert (numbers(again), said(again)) == (numbers(first), said(first))


@pytest.mark.slow
def test_one_and_two_ranks_have_the_same_bits(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(f'[model]\nmodel = "{model_folder}"\nlora_r = 4\n')
    chosen = {"sampling.num_generations": 4, "sampling.max_completion_length": 16, "data.prompts_per_step": 2}
    chosen |= {"environment.max_conversation_tokens": 600, "schedule.max_steps": 2, "distributed.groups_per_unit": 1}
    words = {"environment.world": WORLD["world"], "environment.action_format": "choice"}
    words |= {"evaluation.eval_on_start": "false"}
    for ranks in (1, 2):
        ended_well(train(ranks, tmp_path, tmp_path / f"run-{ranks}", **chosen, **words))
    assert numbers(tmp_path / "run-1") == numbers(tmp_path / "run-2")
