"""ALFWorld's games: read from both kinds of folders, and played as TextWorld plays them."""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from household import GOAL, PLAN, PROBLEM, row

from covey.environments import EnvironmentPool, Observation, Outcome, World, get_world
from covey.errors import ConfigError, DataError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("alfworld") is None, reason="pip install 'covey[alfworld]'; see make test-worlds"
)

# In a process of its own: TextWorld as it comes, before anything of ours has been imported.
_THEIRS = """
import json, random, sys
import textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
from textworld.envs.pddl import PddlEnv

problem, goal, plan = json.load(sys.stdin)
grammar = open(ALFRED_TWL2_PATH).read().replace("UNKNOWN GOAL", goal)
game = {"pddl_domain": open(ALFRED_PDDL_PATH).read(), "grammar": grammar, "pddl_problem": problem}
env = AlfredDemangler(PddlEnv(textworld.EnvInfos(admissible_commands=True)))
env.load(game)
state = env.reset()
seen = [(state.feedback, state["admissible_commands"], False)]
draw = random.Random(7)
for turn in range(60):
    command = plan[turn] if turn < len(plan) else draw.choice(state["admissible_commands"])
    state, _, won = env.step(command)
    seen.append((state.feedback, state["admissible_commands"], won))
json.dump(seen, sys.stdout)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    train = [row(f"train-{i}") for i in range(4)] + [row("look", "look_at_obj_in_light")]
    for split, rows in (("train", train), ("valid_seen", [row("held-out")])):
        with gzip.open(tmp_path / f"{split}.jsonl.gz", "wt") as out:
            out.writelines(json.dumps(each) + "\n" for each in rows)
    return tmp_path


def _world(folder: Path, **options: Any) -> World:
    return get_world("alfworld", data=str(folder), **options)


def _then(pool: EnvironmentPool) -> Any:
    ((_, found),) = pool.wait()
    return found


def test_plays_as_textworld_does() -> None:
    from fast_downward import load_lib

    from covey.environments.alfworld_game import Game

    played = subprocess.run(
        [sys.executable, "-c", _THEIRS],
        input=json.dumps([PROBLEM, GOAL, PLAN]),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    (first, commands, _), *theirs = json.loads(played.stdout)
    game = Game.begin(load_lib(), PROBLEM, GOAL)
    assert game.introduction() == first.removeprefix("-= Welcome to TextWorld, ALFRED! =-").strip()
    assert list(game.commands) == commands
    draw = random.Random(7)
    for turn, (said, commands, won) in enumerate(theirs):
        assert game.do(PLAN[turn] if turn < len(PLAN) else draw.choice(list(game.commands))) == said
        assert list(game.commands) == commands
        assert game.won == won
    assert [won for _, _, won in theirs[: len(PLAN)]] == [False] * (len(PLAN) - 1) + [True]


def test_the_planner_solves_it_in_a_process_of_its_own(folder: Path) -> None:
    world = _world(folder)
    with EnvironmentPool(world, 1) as pool:
        for task in world.eval_tasks() * 2:  # an environment plays one game after another
            pool.reset(0, task, 0)
            seen = _then(pool)
            assert isinstance(seen, Observation)
            assert seen.text.endswith(f"Your task is to: {GOAL}.")
            actions = []
            outcome: Any = None
            while outcome is None or not outcome.done:
                actions.append(pool.expert_action(0))
                assert actions[-1] in seen.actions
                pool.step(0, actions[-1])
                outcome = _then(pool)
                seen = outcome.observation
            assert actions == PLAN
            assert (outcome.success, outcome.reward) == (True, 1.0)


def test_what_is_not_possible_changes_nothing(folder: Path) -> None:
    world = _world(folder)
    environment = world.make()
    before = environment.reset(world.eval_tasks()[0], 0)
    assert isinstance(before, Observation)
    seen, reward, done, info = environment.step("open the drawer with your teeth")
    assert isinstance(seen, Observation)
    assert (seen.text, seen.actions) == ("Nothing happens.", before.actions)
    assert (reward, done, info["valid"], info["success"]) == (0.0, False, False, False)


def test_tasks(folder: Path) -> None:
    world = _world(folder, num_train=2)
    assert [task["uid"] for task in world.train_tasks(1)] == [task["uid"] for task in world.train_tasks(1)]
    assert len(world.train_tasks(1)) == 2
    assert {task["type"] for task in _world(folder).train_tasks(0)} == {"pick_and_place_simple", "look_at_obj_in_light"}
    (look,) = _world(folder, types="look_at_obj_in_light").train_tasks(0)
    assert look["uid"] == "look"
    assert _world(folder).eval_tasks()[0]["goal"] == GOAL
    assert _world(folder, goals="human").eval_tasks()[0]["goal"] == "File the book"


def test_a_downloaded_folder(folder: Path) -> None:
    def trial(name: str, **game: Any) -> None:
        place = folder / "valid_unseen" / name
        place.mkdir(parents=True)
        grammar = 'grammar :: """{"task": [{"rhs": "Your task is to: ' + GOAL + '."}]}"""'
        (place / "game.tw-pddl").write_text(
            json.dumps({"grammar": grammar, "pddl_problem": PROBLEM, "solvable": True, **game})
        )
        said = {"anns": [{"task_desc": "File the book."}]}
        (place / "traj_data.json").write_text(
            json.dumps({"task_type": "pick_and_place_simple", "turk_annotations": said})
        )

    trial("book/trial_1")
    trial("book/trial_2", solvable=False)
    trial("movable_book/trial_3")
    (task,) = _world(folder, eval_split="valid_unseen").eval_tasks()
    assert (task["uid"], task["goal"]) == ("book/trial_1", GOAL)
    assert task["problem"] == _world(folder).eval_tasks()[0]["problem"]


def test_mistakes(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'pick_and_plaice' is none of pick_and_place_simple"):
        _world(folder, types="pick_and_plaice")
    with pytest.raises(ConfigError, match="num_train=0"):
        _world(folder, num_train=0)
    with pytest.raises(ConfigError, match="must be template or human"):
        _world(folder, goals="animal")
    with pytest.raises(DataError, match=r"neither train\.jsonl\.gz nor a folder train"):
        _world(tmp_path / "nowhere").train_tasks(0)
    with pytest.raises(DataError, match="no games of pick_heat_then_place_in_recep"):
        _world(folder, types="pick_heat_then_place_in_recep").train_tasks(0)
    (folder / "train.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="not one ALFWorld game in each line"):
        _world(folder).train_tasks(0)


def test_a_broken_game_costs_its_own_episode(folder: Path) -> None:
    world = _world(folder)
    good = world.eval_tasks()[0]
    with EnvironmentPool(world, 1) as pool:
        pool.reset(0, {**good, "problem": "bm9uc2Vuc2U="}, 0)
        assert "failed in reset" in str(_then(pool))
        pool.reset(0, good, 0)
        assert isinstance(_then(pool), Observation)
        pool.step(0, "look")
        assert isinstance(_then(pool), Outcome)
