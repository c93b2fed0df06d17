"""TextWorld's games: made once, played to their end, and shown without the interpreter's decoration."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from worlds import answers, begun

from covey.environments import EnvironmentPool, get_world
from covey.environments.textworld import TextWorldEnvironment, _tidy
from covey.errors import ConfigError
from fakes import raises


def test_tidy() -> None:
    assert _tidy("\n\nYou take it.\n\n\n\n>        -= Study =-0/3") == "You take it."
    assert _tidy("Done.\n\n\n      *** The End ***\n\nYou scored 1.\n\nWould you like to RESTART?\n> x") == "Done."
    assert _tidy("-= Attic =-\nDust.\n\n\n\nAn exit.") == "-= Attic =-\nDust.\nAn exit."


def test_several_processes_make_a_game_once_and_its_solution_solves_it(tmp_path: Path) -> None:
    pytest.importorskip("textworld", reason="see make test-worlds")
    world = get_world("textworld", rooms=2, objects=3, quest_length=2, cache=str(tmp_path))
    task = world.eval_tasks()[0]
    with EnvironmentPool(world, 3) as pool:
        seen = begun(pool, task, task, task)
        assert seen[0] == seen[1] == seen[2]
        assert "\n\n" not in seen[0].text
        (made,) = tmp_path.glob("*.z8")
        assert sorted(path.name for path in tmp_path.iterdir()) == [made.with_suffix(".json").name, made.name]
        outcomes: list[Any] = []
        while not outcomes or not outcomes[-1].done:
            pool.step(0, str(pool.expert_action(0)))
            outcomes.append(answers(pool, 1)[0])
        assert [o.reward for o in outcomes] == [0.0, 1.0]
        assert outcomes[-1].success
        pool.step(1, "sing a song")
        outcome = answers(pool, 1)[1]
        assert (outcome.valid, outcome.done) == (False, False)


def test_progress_is_shared_out(tmp_path: Path) -> None:
    pytest.importorskip("textworld", reason="see make test-worlds")
    game = {"nb_rooms": 1, "nb_objects": 3, "quest_length": 3}
    environment = TextWorldEnvironment(tmp_path, game, "last", "progress")
    environment.reset({"seed": 5}, 0)
    steps = [environment.step(str(environment.expert_action())) for _ in range(3)]
    assert [reward for _, reward, _, _ in steps] == pytest.approx([1 / 3] * 3)
    assert [done for _, _, done, _ in steps] == [False, False, True]


def test_mistakes() -> None:
    pytest.importorskip("textworld", reason="see make test-worlds")
    wrong: list[Any] = [({"rooms": 0}, "rooms=0"), ({"instructions": "none"}, "must be all or last")]
    wrong += [({"max_turns": turns}, f"max_turns={turns}") for turns in (0, -1)]
    for options, message in wrong:
        raises(ConfigError, message, get_world, "textworld", **options)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("textworld", "alfworld"):
        raises(ConfigError, rf"pip install 'covey\[{name}\]'", get_world, name)
