"""The fleet's result is one member's, whatever its members do."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from fleet_cases import SETTINGS, World, requests, sample, weights
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.distributed.fleet import Fleet
from covey.distributed.journal import Journal
from covey.distributed.members import Member, MemberError
from covey.distributed.units import make_units, unit_key
from covey.errors import GenerationError, ServingError
from covey.types import Completion, Request, SamplingSettings


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


def test_the_key_names_everything() -> None:
    asked = requests(2)
    key = unit_key(asked, SETTINGS, "w")
    other_ids = [Request(asked[0].token_ids + 1, asked[0].stream), *asked[1:]]
    other_stream = [Request(asked[0].token_ids, (9,)), *asked[1:]]
    other_choices = [Request(asked[0].token_ids, asked[0].stream, ((1, 2),)), *asked[1:]]
    keys = [unit_key(one, SETTINGS, "w") for one in (other_ids, other_stream, other_choices, asked[1:], asked[::-1])]
    keys += [unit_key(asked, SamplingSettings(max_tokens=9), "w"), unit_key(asked, SETTINGS, "v")]
    assert len({key, *keys}) == 8
    assert unit_key([Request(r.token_ids.copy(), r.stream) for r in asked], SETTINGS, "w") == key


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


# ---------------------------------------------------------------------- the journal


def test_a_unit_on_disk_has_all_bits(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "units")
    unit = sample(requests(6), SETTINGS, 5)
    assert any(one.support is None for one in unit)
    assert any(one.support is not None for one in unit)
    journal.put("ab" * 32, 5, unit)
    found = journal.get("ab" * 32, 5, len(unit))
    assert found is not None
    assert bits(found) == bits(unit)
    assert journal.get("ab" * 32, 4, len(unit)) is None
    assert journal.get("cd" * 32, 5, len(unit)) is None
    assert journal.get("ab" * 32, 5, len(unit) - 1) is None


@pytest.mark.parametrize("place", [3, 200, -1])
def test_a_damaged_unit_is_not_used(tmp_path: Path, place: int) -> None:
    journal = Journal(tmp_path / "units")
    journal.put("ab" * 32, 5, sample(requests(2), SETTINGS, 5))
    (path,) = (tmp_path / "units").iterdir()
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert journal.get("ab" * 32, 5, 4) is None
    path.write_bytes(content[:50])
    assert journal.get("ab" * 32, 5, 4) is None


def test_units_of_older_versions_go(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "units")
    for version in (1, 2, 3):
        journal.put("ab" * 32, version, sample(requests(1), SETTINGS, version))
    journal.forget(before=3)
    assert [path.name[:7] for path in (tmp_path / "units").iterdir()] == ["v000003"]
    journal.forget()
    assert not (tmp_path / "units").exists()
    journal.forget()


def test_sampled_units_are_not_sampled_again(tmp_path: Path) -> None:
    asked = requests(8)
    world = World()
    fleet = world.fleet(1)
    fleet.journal = Journal(tmp_path / "units")
    fleet.publish(weights(1))
    world.faults = ["", "", "refuses"]  # ends the call after two of its four units
    with pytest.raises(GenerationError):
        fleet(asked, SETTINGS, policy_version=1)

    later = World()
    resumed = later.fleet(2)
    resumed.journal = Journal(tmp_path / "units")
    resumed.publish(weights(1))
    assert bits(resumed(asked, SETTINGS, policy_version=1)) == alone(asked, 1)
    assert len(later.begun) == 2
    assert resumed.take_news() == ["2 of 4 units were sampled before the run was stopped: they are used"]
    resumed.publish(weights(1, 0.25))  # other weights under the same version
    resumed(asked, SETTINGS, policy_version=1)
    assert len(later.begun) == 6
