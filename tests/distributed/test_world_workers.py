"""Worlds on workers answer as those in this process's own places, whatever happens to the workers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from restless_world import Restless

from covey import GRPOConfig, GRPOTrainer
from covey.distributed import start
from covey.distributed.members import MemberError, done, in_thread
from covey.distributed.world_workers import Script, Seats, WorldHost, Worlds, WorldWorkers
from covey.environments import World, get_world
from covey.environments.base import Outcome
from covey.environments.pool import EnvironmentPool, Places
from covey.errors import ConfigError, EpisodeError, GenerationError
from covey.observe.run_folder import RunFolder

LIMITS = {"reset_seconds": 60.0, "step_seconds": 60.0}


class LocalWorker:
    """A host in this process, whose calls are made in threads; `dies` says which call of all it does not survive."""

    def __init__(self, worlds: Worlds, office: Office) -> None:
        self.host, self.office, self.gone, self.name = WorldHost(worlds), office, False, f"w{len(office.hosts)}"
        self.host.start(str)
        office.hosts.append(self)

    def play(self, place: int, script: Script) -> Future[Any]:
        self.office.calls += 1
        if self.office.calls in self.office.dies or self.office.always:
            self.gone = True
        return in_thread(lambda: self._play(place, script))

    def _play(self, place: int, script: Script) -> Any:
        found = None if self.gone else self.host.play(place, script)
        if self.gone:  # by now
            raise MemberError("ActorDiedError: gone")
        return found

    def watch(self) -> None: ...

    def stop(self, *, failed: bool) -> None:
        self.gone = True
        self.host.close()


class Office:
    def __init__(self, dies: Sequence[int] = (), always: bool = False) -> None:
        self.dies, self.always, self.calls = set(dies), always, 0
        self.hosts: list[LocalWorker] = []

    def workers(self, world: World, places: int, count: int = 2, **options: Any) -> WorldWorkers:
        sent = Worlds.of(world, -(-places // count), **LIMITS)
        seats = Seats(lambda again: done(LocalWorker(sent, self)), count)
        return WorldWorkers(seats, places, **options)


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    opened: list[Any] = []
    yield lambda pool: opened.append(pool) or pool
    for pool in opened:
        pool.close()


def play(pool: Places, world: World, episodes: int, turns: int = 4) -> list[list[Any]]:
    """What each episode of random actions was told."""
    task, told = world.train_tasks(0)[0], [list[Any]() for _ in range(episodes)]
    at, waiting = dict[int, int](), list(range(episodes))
    for place in range(len(pool)):
        at[place] = waiting.pop(0)
        pool.reset(place, task, at[place])
    while at:
        for place, found in pool.wait():
            number = at[place]
            told[number].append(found)
            seen = found.observation if isinstance(found, Outcome) else found
            over = isinstance(found, EpisodeError) or (isinstance(found, Outcome) and found.done)
            if not over and len(told[number]) <= turns:
                luck = random.Random(100 * number + len(told[number]))
                pool.step(place, luck.choice(seen.actions or ("wait",)))
                continue
            del at[place]
            if waiting:
                at[place] = waiting.pop(0)
                pool.reset(place, task, at[place])
    return told


def test_deaths_change_nothing(closing: Any) -> None:
    """A worker dies in a reset and another one in steps, with all that they play."""
    world = get_world("house:rooms=3")
    alone = play(closing(EnvironmentPool(world, 4, **LIMITS)), world, 7)
    assert sum(map(len, alone)) > 20
    office = Office((2, 9))
    pool = closing(office.workers(world, 4, max_restarts=10))
    assert play(pool, world, 7) == alone
    assert len(office.hosts) > 2
    counted, news = pool.take_metrics(), pool.take_news()
    assert counted["world_workers/restarts"] >= 2
    assert counted["world_workers/reissued_units"] >= 2
    assert len(news) == len({sentence.partition("(")[2].partition(")")[0] for sentence in news}) == 2


def test_a_world_that_does_not_repeat_itself_loses_its_episode(closing: Any) -> None:
    world = Restless()
    pool = closing(Office((3,)).workers(world, 1, 1))
    ((first,),) = [told[-1:] for told in play(pool, world, 1)]
    assert isinstance(first, EpisodeError)
    assert "the world does not repeat itself" in str(first)
    (told,) = play(pool, world, 1)
    assert len(told) == 5  # the next episode is played


def test_what_is_only_told_beside_it_may_differ(closing: Any) -> None:
    world = Restless(info_only=True)
    (told,) = play(closing(Office((3,)).workers(world, 1, 1)), world, 1)
    assert len(told) == 5


def test_what_ends_every_worker_costs_its_episode_and_then_the_run(closing: Any) -> None:
    office = Office((1, 2, 3))
    pool = closing(office.workers(Restless(), 1, 1))
    (told,) = play(pool, Restless(), 1)
    assert "its worker has ended each time that it was played" in str(told[-1])
    with pytest.raises(GenerationError, match=r"world worker 1 .*the last one, failed while playing"):
        play(closing(Office(always=True).workers(Restless(), 1, 1, max_restarts=1)), Restless(), 1)


def test_a_question_that_nobody_waits_for(closing: Any) -> None:
    world = get_world("house:rooms=2")
    pool = closing(Office().workers(world, 2, 1))
    first, second = world.train_tasks(0)[:2]
    pool.reset(0, first, 0)
    pool.cancel(0)
    pool.reset(0, second, 0)
    with pytest.raises(ValueError, match="place 0 has not answered yet"):
        pool.step(0, "look")
    (answer,) = pool.wait()
    with EnvironmentPool(world, 1) as other:
        other.reset(0, second, 0)
        assert other.wait() == [answer]
    assert pool.wait() == []


def test_a_step_on_workers(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One episode at a time is exact."""
    world = {
        "world": "house:rooms=2,num_train=6,num_eval=3",
        "max_conversation_tokens": 600,
        "max_completion_length": 16,
        "action_format": "choice",
        "parallel_episodes": 1,
        "max_steps": 1,
        "eval_on_start": False,
        "eval_at_end": False,
    }
    office = Office((4, 9))

    def on_workers(config: GRPOConfig, world: World) -> WorldWorkers:
        return office.workers(world, config.environment.parallel_episodes, 1)

    said = []
    for name, where in (("here", start.make_worlds), ("there", on_workers)):
        monkeypatch.setattr("covey.training.setup.make_worlds", where)
        trainer = GRPOTrainer(args=GRPOConfig(**(settings | world | {"output_dir": str(tmp_path / name)})))
        trainer.train()
        folder = RunFolder.read(tmp_path / name)
        said.append([(row["completion"], row["reward"]) for row in folder.read_completions(1)])
    assert said[0] == said[1]
    (record,) = [record for record in trainer.state.log_history if "loss" in record]
    assert record["world_workers/restarts"] == 2
    assert all(host.gone for host in office.hosts)


def test_a_world_that_cannot_be_sent() -> None:
    world = Restless()
    world.lambda_ = lambda: 0  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="Restless cannot be sent to another process"):
        Worlds.of(world, 1, **LIMITS)
