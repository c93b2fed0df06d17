"""Environments in processes of their own: trouble costs one episode and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from covey.environments import EnvironmentPool, Observation, Outcome
from covey.errors import ConfigError, EpisodeError
from covey.recipes.house.house import House

sys.path.insert(0, str(Path(__file__).parent))
from ending_worlds import NoRoom, Together, Waiting
from worlds import Trouble, Unimportable


@pytest.fixture
def pool() -> Iterator[EnvironmentPool]:
    with EnvironmentPool(Trouble(), places=3, step_seconds=1.0, reset_seconds=1.0) as pool:
        yield pool


def answers(pool: EnvironmentPool, count: int) -> dict[int, object]:
    found: dict[int, object] = {}
    while len(found) < count:
        found |= dict(pool.wait())
    return found


def process_of(observation: object) -> int:
    assert isinstance(observation, Observation)
    return int(observation.text.rsplit(" ", 1)[1])


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_house_is_played(pool: EnvironmentPool) -> None:
    world = House()
    task = world.eval_tasks()[0]
    with EnvironmentPool(world, places=1) as house:
        house.reset(0, task, 0)
        ((place, seen),) = house.wait()
        assert place == 0
        assert isinstance(seen, Observation)
        assert seen.text.startswith(f"Find the {task['thing']}. You are in the hall.")
        rewards = []
        for _ in range(3):
            action = house.expert_action(0)
            assert action is not None
            house.step(0, action)
            ((_, outcome),) = house.wait()
            assert isinstance(outcome, Outcome)
            rewards.append(outcome.reward)
        assert rewards == [0.0, 0.0, 1.0]
        assert outcome.done
        assert outcome.success


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("raise", "the environment failed in step: RuntimeError: the world is broken at "),
        ("raise", "worlds.py:55, in step"),
        ("exit", "the environment's process ended in step"),
        ("nan", "the reward nan; it must be a finite number"),
        ("three", "it must return observation, reward, done and info"),
        ("no info", "None as info"),
        ("hang", "longer than 1 s in step; it was stopped"),
    ],
)
def test_trouble_costs_one_episode(pool: EnvironmentPool, action: str, message: str) -> None:
    for place in range(3):
        pool.reset(place, {"uid": "t"}, 0)
    first = answers(pool, 3)
    pool.step(0, "well")
    pool.step(1, action)
    pool.step(2, "win")
    found = answers(pool, 3)
    assert isinstance(found[1], EpisodeError)
    assert message in str(found[1])
    assert isinstance(found[0], Outcome)
    assert isinstance(found[2], Outcome)
    assert (found[0].reward, found[2].success) == (0.5, True)
    # the place is good for the next episode; the others kept their processes
    for place in range(3):
        pool.reset(place, {"uid": "t"}, 0)
    again = answers(pool, 3)
    assert process_of(again[0]) == process_of(first[0])
    assert again[0].text.startswith("episode 2")  # type: ignore[union-attr]
    assert again[1].text.startswith("episode 1")  # type: ignore[union-attr]


def test_a_reset_that_hangs_or_returns_nonsense(pool: EnvironmentPool) -> None:
    pool.reset(0, {"uid": "t", "reset": "hang"}, 0)
    pool.reset(1, {"uid": "t", "reset": "bad"}, 0)
    found = answers(pool, 2)
    assert "longer than 1 s in reset" in str(found[0])
    assert "reset returned 3 as observation" in str(found[1])


def test_a_slow_world_does_not_hold_up_the_others(pool: EnvironmentPool) -> None:
    for place in range(2):
        pool.reset(place, {"uid": "t"}, 0)
    answers(pool, 2)
    pool.step(0, "slow")
    pool.step(1, "quick")
    began = time.monotonic()
    ((place, _),) = pool.wait()
    assert place == 1
    assert time.monotonic() - began < 0.25
    assert pool.wait(0.0) == []
    ((place, _),) = pool.wait()
    assert place == 0
    assert pool.wait() == []  # nothing is open


def test_closing_leaves_no_process(pool: EnvironmentPool) -> None:
    pool.reset(0, {"uid": "t"}, 0)
    pool.reset(1, {"uid": "t"}, 0)
    pids = [process_of(seen) for seen in answers(pool, 2).values()]
    pool.step(0, "hang")
    assert all(map(exists, pids))
    pool.close()
    until = time.monotonic() + 5
    while any(map(exists, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(map(exists, pids))


def test_a_world_that_cannot_be_made() -> None:
    with EnvironmentPool(Unimportable(), places=1) as pool:
        pool.reset(0, {"uid": "t"}, 0)
        ((_, found),) = pool.wait()
        assert "ImportError: no such game engine" in str(found)


def test_a_world_that_cannot_be_sent() -> None:
    world = House()
    world.system_prompt = lambda: "x"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="House cannot be sent to another process"):
        EnvironmentPool(world, places=1)


def test_one_question_at_a_time(pool: EnvironmentPool) -> None:
    pool.reset(0, {"uid": "t"}, 0)
    with pytest.raises(ValueError, match="place 0 has not answered yet"):
        pool.step(0, "x")
    answers(pool, 1)


def test_a_question_can_be_forgotten(pool: EnvironmentPool) -> None:
    pool.reset(0, {"uid": "t", "reset": "hang"}, 0)
    pool.reset(1, {"uid": "t"}, 0)
    answers(pool, 1)
    pool.cancel(0)
    pool.cancel(1)  # nothing is open there
    assert pool.wait() == []
    pool.reset(0, {"uid": "t"}, 0)
    pool.step(1, "x")
    assert set(answers(pool, 2)) == {0, 1}
    pool.reset(0, {"uid": object()}, 0)
    pool.cancel(0)
    assert pool.wait() == []


@pytest.mark.slow
def test_resets_wait_for_their_turn_and_not_on_their_time() -> None:
    with EnvironmentPool(Trouble(), places=7, reset_seconds=1.5, resets_at_once=2) as pool:
        began = time.monotonic()
        for place, task in enumerate([{"uid": "t", "reset": "slow"}] * 5 + [{"uid": object()}]):
            pool.reset(place, task, 0)
        pool.reset(6, {"uid": "t"}, 0)
        pool.cancel(6)
        with pytest.raises(ValueError, match="place 4 has not answered yet"):
            pool.reset(4, {"uid": "t"}, 0)
        found = answers(pool, 6)
        assert time.monotonic() - began > 1.0  # three times 0.4 s: more than two at once would be quicker
        assert all(isinstance(found[place], Observation) for place in range(5))
        assert "could not be asked" in str(found[5])
        assert pool.wait() == []
        pool.reset(0, {"uid": "t", "reset": "hang"}, 0)
        pool.reset(1, {"uid": "t", "reset": "hang"}, 0)
        pool.reset(6, {"uid": "t"}, 0)  # its turn comes when theirs is over
        found = answers(pool, 3)
        assert "longer than 1.5 s in reset" in str(found[0])
        assert isinstance(found[6], Observation)
        pool.reset(0, {"uid": "t", "reset": "hang"}, 0)
        pool.reset(1, {"uid": "t", "reset": "hang"}, 0)
        pool.reset(6, {"uid": "t"}, 0)
        pool.cancel(0)
        ((place, _),) = pool.wait()  # before it is over for 1
        assert place == 6


def test_resets_begin_while_nobody_waits() -> None:
    with EnvironmentPool(Trouble(), places=5, resets_at_once=2) as pool:
        for place in range(5):
            pool.reset(place, {"uid": "t", "reset": "slow"}, 0)
        time.sleep(2.5)
        began = time.monotonic()
        assert len(answers(pool, 5)) == 5
        assert time.monotonic() - began < 0.35  # less than one reset


def until(true: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


def test_environments_give_back_what_they_hold(tmp_path: Path) -> None:
    """In order at the end; what one leaves behind is ended, also where it was killed or ended itself."""
    log = tmp_path / "log"
    with EnvironmentPool(Trouble(), places=4, step_seconds=0.5) as pool:
        for place in range(4):
            pool.reset(place, {"uid": "t", "child": str(log)}, 0)
        seen = answers(pool, 4)
        children = [int(str(one.text).split(" with ")[1].split()[0]) for one in seen.values()]  # type: ignore[attr-defined]
        assert all(map(exists, children))
        pool.step(0, "hang")
        pool.step(1, "exit")
        answers(pool, 2)
        assert until(lambda: not exists(children[0]) and not exists(children[1]))
        assert exists(children[2])
        assert exists(children[3])
        assert not log.exists()
    assert log.read_text() == "closed\nclosed\n"
    assert until(lambda: not any(map(exists, children)))


def test_an_environment_that_does_not_close_is_killed(tmp_path: Path) -> None:
    pool = EnvironmentPool(Trouble(), places=1)
    pool.reset(0, {"uid": "t", "child": "hang"}, 0)
    ((_, seen),) = pool.wait()
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 10
    assert not exists(process_of(seen))


def test_a_process_that_ends_between_episodes_costs_none(pool: EnvironmentPool) -> None:
    pool.reset(0, {"uid": "a"}, 0)
    ((_, seen),) = pool.wait()
    os.kill(process_of(seen), signal.SIGKILL)
    assert until(lambda: not exists(process_of(seen)))
    pool.reset(0, {"uid": "b"}, 0)
    ((_, again),) = pool.wait()
    assert "episode 1 of b" in again.text  # type: ignore[union-attr]
    os.kill(process_of(again), signal.SIGKILL)
    assert until(lambda: not exists(process_of(again)))
    with pytest.raises(EpisodeError, match="could not be asked for expert_action"):
        pool.expert_action(0)
    pool.reset(0, {"uid": "c"}, 0)
    ((place, third),) = pool.wait()
    assert (place, pool.wait()) == (0, [])
    assert "episode 1 of c" in third.text  # type: ignore[union-attr]


def test_a_template_that_has_ended_is_started_again(pool: EnvironmentPool) -> None:
    pool.reset(0, {"uid": "a"}, 0)
    ((_, seen),) = pool.wait()
    template = pool._template._process
    assert template is not None
    template.kill()
    template.wait()
    assert until(lambda: not exists(process_of(seen)))  # its places end with it
    for place in (0, 1):
        pool.reset(place, {"uid": "b"}, 0)
    assert all(isinstance(one, Observation) for one in answers(pool, 2).values())


def test_more_places_than_select_can_take() -> None:
    with EnvironmentPool(Trouble(), places=1) as pool:
        held = [os.dup(2) for _ in range(1100)]
        try:
            pool.reset(0, {"uid": "t"}, 0)
            ((_, seen),) = pool.wait()
            assert isinstance(seen, Observation)
        finally:
            for descriptor in held:
                os.close(descriptor)


def test_an_answer_that_is_too_long_says_so(pool: EnvironmentPool) -> None:
    pool.reset(0, {"uid": "t", "reset": "long"}, 0)
    ((_, found),) = pool.wait()
    assert "its answer is a message of" in str(found)


def test_what_cannot_be_said_is_a_failure(pool: EnvironmentPool) -> None:
    pool.reset(0, {"uid": object()}, 0)
    ((place, found),) = pool.wait()
    assert place == 0
    assert "could not be asked" in str(found)


def test_a_world_whose_module_cannot_be_imported_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).name != "environments"])
    with EnvironmentPool(Trouble(), places=1) as pool, pytest.raises(ConfigError, match="No module named 'worlds'"):
        pool.reset(0, {"uid": "t"}, 0)


def test_gymnasiums_five_values_are_an_answer(pool: EnvironmentPool) -> None:
    for place, (action, success) in enumerate((("solved", True), ("out of time", False))):
        pool.reset(place, {"uid": "a"}, 0)
        answers(pool, 1)
        pool.step(place, action)
        outcome = answers(pool, 1)[place]
        assert isinstance(outcome, Outcome)
        assert (outcome.done, outcome.success, outcome.reward) == (True, success, 1.0)


@pytest.mark.slow
def test_environments_that_end_together_cost_only_their_own_episodes() -> None:
    """Six times 64 processes end at once, by themselves and by `kill -9`: the other place and the template live on."""
    with EnvironmentPool(Together(), places=65) as pool:
        for turn in range(6):
            for place in range(65):
                pool.reset(place, {"uid": "t"}, 0)
            seen = answers(pool, 65)
            assert [one for one in seen.values() if not isinstance(one, Observation)] == []
            if turn == 0:
                template, other = pool._template._process, process_of(seen[64])
            assert (pool._template._process, process_of(seen[64])) == (template, other)
            pids, killed = [process_of(seen[place]) for place in range(64)], turn % 3 == 2
            when = time.time() + (60.0 if killed else 0.3)
            for place in range(64):
                pool.step(place, str(when))
            for pid in pids if killed else ():
                os.kill(pid, signal.SIGKILL)
            pool.step(64, "well")
            found = answers(pool, 65)
            assert [str(found[place]) for place in range(64)] == ["the environment's process ended in step"] * 64
            assert isinstance(found[64], Outcome)
            assert until(lambda pids=pids: not any(map(exists, pids)))  # type: ignore[misc]


_FORKS = """
import os, signal, sys, time
from covey.environments.pool import _Forks

if sys.argv[1] == "without":
    del os.waitid
forks, left, handlers = _Forks(), os.pipe(), []
for number in range(500):
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        if number % 50 == 0 and os.fork() == 0:  # stays in the group
            time.sleep(600)
        if number % 3 == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    forks.add(number, pid)
    forks.reap()
os.close(left[1])
until = time.monotonic() + 30
while forks._running and time.monotonic() < until:
    time.sleep(0.01)
    forks.reap()
assert not forks._running
assert os.read(left[0], 1) == b""  # no descendant holds the other end any more
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("nobody is left")
"""


@pytest.mark.parametrize("waitid", ["with", pytest.param("without", marks=pytest.mark.slow)])
def test_500_forks_that_end_while_others_are_added(waitid: str) -> None:
    """Also where Python has no `waitid`, as on macOS before 3.13."""
    done = subprocess.run(
        [sys.executable, "-c", _FORKS, waitid], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("nobody is left\n", "")


def test_a_fork_that_the_system_refuses_costs_one_episode() -> None:
    with EnvironmentPool(NoRoom(), places=2) as pool:
        for place in range(2):
            pool.reset(place, {"uid": "t"}, 0)
        found = answers(pool, 2)
        assert "no process came up: no room for a process" in str(found[0])
        assert isinstance(found[1], Observation)


def test_what_the_template_has_started_itself_stays_the_worlds_to_wait_for() -> None:
    with EnvironmentPool(Waiting(), places=1) as pool:
        pool.reset(0, {"uid": "t"}, 0)
        ((_, seen),) = pool.wait()
        pool.step(0, "exit")
        answers(pool, 1)
        pool.reset(0, {"uid": "t"}, 0)
        answers(pool, 1)
        assert until((Path(seen.text)).exists)  # type: ignore[union-attr]
        assert Path(seen.text).read_text() == "7"  # type: ignore[union-attr]
