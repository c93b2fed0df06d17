"""TextWorld's games: made once, played to their end, and shown without the interpreter's decoration."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from covey.environments import EnvironmentPool, Observation, Outcome, get_world
from covey.environments.textworld import TextWorldEnvironment, _tidy
from covey.errors import ConfigError

needs_textworld = pytest.mark.skipif(
    importlib.util.find_spec("textworld") is None, reason="pip install 'covey[textworld]'; see make test-worlds"
)


def test_tidy() -> None:
    assert _tidy("\n\nYou take it.\n\n\n\n>        -= Study =-0/3") == "You take it."
    assert _tidy("Done.\n\n\n      *** The End ***\n\nYou scored 1.\n\nWould you like to RESTART?\n> x") == "Done."
    assert _tidy("-= Attic =-\nDust.\n\n\n\nAn exit.") == "-= Attic =-\nDust.\nAn exit."


@needs_textworld
def test_several_processes_make_a_game_once_and_its_solution_solves_it(tmp_path: Path) -> None:
    world = get_world("textworld", rooms=2, objects=3, quest_length=2, cache=str(tmp_path))
    task = world.eval_tasks()[0]
    with EnvironmentPool(world, 3) as pool:
        for place in range(3):
            pool.reset(place, task, 0)
        seen: dict[int, Any] = {}
        while len(seen) < 3:
            seen |= dict(pool.wait())
        assert seen[0] == seen[1] == seen[2]
        assert isinstance(seen[0], Observation)
        assert seen[0].actions is not None
        assert "\n\n" not in seen[0].text
        (made,) = tmp_path.glob("*.z8")
        assert sorted(path.name for path in tmp_path.iterdir()) == [made.with_suffix(".json").name, made.name]
        outcomes = []
        while not outcomes or not outcomes[-1].done:
            pool.step(0, str(pool.expert_action(0)))
            ((_, outcome),) = pool.wait()
            assert isinstance(outcome, Outcome)
            outcomes.append(outcome)
        assert [o.reward for o in outcomes] == [0.0, 1.0]
        assert outcomes[-1].success
        pool.step(1, "sing a song")
        ((_, outcome),) = pool.wait()
        assert isinstance(outcome, Outcome)
        assert (outcome.valid, outcome.done) == (False, False)


@needs_textworld
def test_progress_is_shared_out(tmp_path: Path) -> None:
    game = {"nb_rooms": 1, "nb_objects": 3, "quest_length": 3}
    environment = TextWorldEnvironment(tmp_path, game, "last", "progress")
    environment.reset({"seed": 5}, 0)
    rewards = []
    while (action := environment.expert_action()) is not None:
        _, reward, done, _ = environment.step(action)
        rewards.append(reward)
        if done:
            break
    assert rewards == pytest.approx([1 / 3] * 3)


@needs_textworld
def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="rooms=0"):
        get_world("textworld", rooms=0)
    with pytest.raises(ConfigError, match="must be all or last"):
        get_world("textworld", instructions="none")
    for turns in (0, -1):
        with pytest.raises(ConfigError, match=f"max_turns={turns}"):
            get_world("textworld", max_turns=turns)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'covey\[textworld\]'"):
        get_world("textworld")
    with pytest.raises(ConfigError, match=r"pip install 'covey\[alfworld\]'"):
        get_world("alfworld")
