"""Environments in processes of their own: trouble costs one episode and nothing else."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import NoRoom, Together, Trouble, Unimportable, Waiting, answers, ask, begun

from covey.environments import EnvironmentPool, Observation, Outcome
from covey.errors import ConfigError, EpisodeError
from covey.recipes.house.house import House
from fakes import raises


@pytest.fixture
def pool() -> Iterator[EnvironmentPool]:
    with EnvironmentPool(Trouble(), places=4, step_seconds=1.0, reset_seconds=1.0) as pool:
        yield pool


def process_of(observation: Any) -> int:
    return int(observation.text.rsplit(" ", 1)[1])


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def until(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 5.0
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


def gone(*pids: int) -> bool:
    """Whether all of these processes end before long."""
    return until(lambda: not any(map(exists, pids)))


def test_a_house_is_played() -> None:
    world = House()
    task = world.eval_tasks()[0]
    with EnvironmentPool(world, places=1) as house:
        (seen,) = begun(house, task)
        assert seen.text.startswith(f"Find the {task['thing']}. You are in the hall.")
        rewards = []
        for _ in range(3):
            house.step(0, str(house.expert_action(0)))
            outcome = answers(house, 1)[0]
            rewards.append(outcome.reward)
        assert (rewards, outcome.done, outcome.success) == ([0.0, 0.0, 1.0], True, True)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("raise", r"the environment failed in step: RuntimeError: the world is broken at .*worlds.py:\d+, in step"),
        ("exit", "the environment's process ended in step"),
        ("nan", "the reward nan; it must be a finite number"),
        ("three", "it must return observation, reward, done and info"),
        ("no info", "None as info"),
        ("hang", "longer than 1 s in step; it was stopped"),
    ],
)
def test_trouble_costs_one_episode(pool: EnvironmentPool, action: str, message: str) -> None:
    first = begun(pool, {}, {}, {})
    for place, what in enumerate(("well", action, "win")):
        pool.step(place, what)
    found = answers(pool, 3)
    assert isinstance(found[1], EpisodeError)
    assert re.search(message, str(found[1]))
    assert (found[0].reward, found[2].success) == (0.5, True)
    # the place is good for the next episode; the others kept their processes
    again = begun(pool, {}, {}, {})
    assert process_of(again[0]) == process_of(first[0])
    assert again[0].text.startswith("episode 2")
    assert again[1].text.startswith("episode 1")


def test_resets_that_answer_nothing_of_use(pool: EnvironmentPool) -> None:
    late, wrong, long, unsaid = begun(pool, {"reset": "hang"}, {"reset": "bad"}, {"reset": "long"}, {"uid": object()})
    assert "longer than 1 s in reset" in str(late)
    assert "reset returned 3 as observation" in str(wrong)
    assert "its answer is a message of" in str(long)
    assert "could not be asked" in str(unsaid)


def test_a_slow_world_does_not_hold_up_the_others(pool: EnvironmentPool) -> None:
    begun(pool, {}, {})
    pool.step(0, "slow")
    pool.step(1, "quick")
    began = time.monotonic()
    assert [place for place, _ in pool.wait()] == [1]
    assert time.monotonic() - began < 0.25
    assert (pool.wait(0.0), [place for place, _ in pool.wait()]) == ([], [0])
    assert pool.wait() == []  # nothing is open


def test_worlds_that_cannot_be_made_sent_or_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    with EnvironmentPool(Unimportable(), places=1) as pool:
        assert "ImportError: no such game engine" in str(begun(pool, {})[0])
    world = House()
    world.system_prompt = lambda: "x"  # type: ignore[assignment]
    raises(ConfigError, "House cannot be sent to another process", EnvironmentPool, world, places=1)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).name != "environments"])
    with EnvironmentPool(Trouble(), places=1) as pool, pytest.raises(ConfigError, match="No module named 'worlds'"):
        begun(pool, {})


def test_one_question_at_a_time_which_can_be_forgotten(pool: EnvironmentPool) -> None:
    ask(pool, {"reset": "hang"}, {})
    raises(ValueError, "place 0 has not answered yet", pool.step, 0, "x")
    answers(pool, 1)
    pool.cancel(0)
    pool.cancel(1)  # nothing is open there
    assert pool.wait() == []
    ask(pool, {})
    pool.step(1, "x")
    assert set(answers(pool, 2)) == {0, 1}
    ask(pool, {"uid": object()})
    pool.cancel(0)
    assert pool.wait() == []


@pytest.mark.slow
def test_resets_wait_for_their_turn_and_not_on_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.environments.pool._RESETS_AT_ONCE", 2)
    with EnvironmentPool(Trouble(), places=7, reset_seconds=1.5) as pool:
        began = time.monotonic()
        ask(pool, *[{"reset": "slow"}] * 5, {"uid": object()}, {})
        pool.cancel(6)
        raises(ValueError, "place 4 has not answered yet", pool.reset, 4, {"uid": "t"}, 0)
        found = answers(pool, 6)
        assert time.monotonic() - began > 1.0  # three times 0.4 s: more than two at once would be quicker
        assert all(isinstance(found[place], Observation) for place in range(5))
        assert "could not be asked" in str(found[5])
        assert pool.wait() == []
        late, _, after = begun(pool, {"reset": "hang"}, {"reset": "hang"}, {})  # its turn comes when theirs is over
        assert "longer than 1.5 s in reset" in str(late)
        assert isinstance(after, Observation)
        ask(pool, {"reset": "hang"}, {"reset": "hang"}, {})
        pool.cancel(0)
        assert [place for place, _ in pool.wait()] == [2]  # before it is over for 1


def test_resets_begin_while_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.environments.pool._RESETS_AT_ONCE", 2)
    with EnvironmentPool(Trouble(), places=5) as pool:
        ask(pool, *[{"reset": "slow"}] * 5)
        time.sleep(2.5)
        began = time.monotonic()
        assert len(answers(pool, 5)) == 5
        assert time.monotonic() - began < 0.35  # less than one reset


def test_environments_give_back_what_they_hold(tmp_path: Path) -> None:
    """In order at the end; what one leaves behind is ended, also where it was killed or ended itself."""
    log = tmp_path / "log"
    with EnvironmentPool(Trouble(), places=4, step_seconds=0.5) as pool:
        children = [int(one.text.split(" with ")[1].split()[0]) for one in begun(pool, *[{"child": str(log)}] * 4)]
        assert all(map(exists, children))
        pool.step(0, "hang")
        pool.step(1, "exit")
        answers(pool, 2)
        assert gone(*children[:2])
        assert all(map(exists, children[2:]))
        assert not log.exists()
    assert log.read_text() == "closed\nclosed\n"
    assert gone(*children)


def test_closing_leaves_no_process_not_even_one_that_hangs_in_it() -> None:
    pool = EnvironmentPool(Trouble(), places=3)
    pids = [process_of(seen) for seen in begun(pool, {"child": "hang"}, {}, {})]
    pool.step(1, "hang")
    assert all(map(exists, pids))
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 10
    assert gone(*pids)


def test_processes_that_end_between_episodes_cost_none(pool: EnvironmentPool) -> None:
    """Also that of the template, with which its places end."""
    (seen,) = begun(pool, {"uid": "a"})
    for uid in "bc":
        os.kill(process_of(seen), signal.SIGKILL)
        assert gone(process_of(seen))
        if uid == "c":
            raises(EpisodeError, "could not be asked for expert_action", pool.expert_action, 0)
        (seen,) = begun(pool, {"uid": uid})
        assert f"episode 1 of {uid}" in seen.text
    assert pool.wait() == []
    template: Any = pool._template._process
    template.kill()
    template.wait()
    assert gone(process_of(seen))
    assert all(isinstance(one, Observation) for one in begun(pool, {}, {}))


def test_more_places_than_select_can_take(pool: EnvironmentPool) -> None:
    held = [os.dup(2) for _ in range(1100)]
    try:
        assert isinstance(begun(pool, {})[0], Observation)
    finally:
        for descriptor in held:
            os.close(descriptor)


def test_gymnasiums_five_values_are_an_answer(pool: EnvironmentPool) -> None:
    begun(pool, {}, {})
    pool.step(0, "solved")
    pool.step(1, "out of time")
    outcomes = answers(pool, 2)
    assert [(outcomes[place].done, outcomes[place].success) for place in (0, 1)] == [(True, True), (True, False)]
    assert outcomes[0].reward == outcomes[1].reward == 1.0


@pytest.mark.slow
def test_environments_that_end_together_cost_only_their_own_episodes() -> None:
    """Six times 64 processes end at once, by themselves and by `kill -9`: the other place and the template live on."""
    with EnvironmentPool(Together(), places=65) as pool:
        for turn in range(6):
            seen = begun(pool, *[{}] * 65)
            assert [one for one in seen if not isinstance(one, Observation)] == []
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
            assert gone(*pids)


_FORKS = """
import os, signal, sys, time
from covey.environments.forks import _Forks

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
    command = [sys.executable, "-c", _FORKS, waitid]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("nobody is left\n", "")


def test_a_fork_that_the_system_refuses_costs_one_episode() -> None:
    with EnvironmentPool(NoRoom(), places=2) as pool:
        refused, seen = begun(pool, {}, {})
        assert "no process came up: no room for a process" in str(refused)
        assert isinstance(seen, Observation)


def test_what_the_template_has_started_itself_stays_the_worlds_to_wait_for() -> None:
    with EnvironmentPool(Waiting(), places=1) as pool:
        (seen,) = begun(pool, {})
        pool.step(0, "exit")
        answers(pool, 1)
        begun(pool, {})
        assert until(Path(seen.text).exists)
        assert Path(seen.text).read_text() == "7"
