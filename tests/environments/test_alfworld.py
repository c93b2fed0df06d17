"""ALFWorld's games: read from both kinds of folders, and played as TextWorld plays them."""

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from worlds import answers, begun

from covey.environments import EnvironmentPool, Observation, Outcome, World, get_world
from covey.errors import ConfigError, DataError
from fakes import raises

pytest.importorskip("alfworld", reason="pip install 'covey[alfworld]'; see make test-worlds")
TYPE = "pick_and_place_simple"
# A household of two places and three things, written by hand for ALFWorld's rules.
PROBLEM = """
(define (problem small)
(:domain alfred)
(:objects
    agent1 - agent loc_bar_1 - location loc_bar_2 - location loc_bar_3 - location DeskType - rtype DrawerType - rtype
    Desk_bar__plus_01_bar__plus_00 - receptacle Drawer_bar__plus_02_bar__plus_00 - receptacle
    BookType - otype BowlType - otype DeskLampType - otype Book_bar__plus_01_bar__plus_01 - object
    Bowl_bar__plus_01_bar__plus_02 - object DeskLamp_bar__plus_01_bar__plus_03 - object
)
(:init
    (= (total-cost) 0) (atLocation agent1 loc_bar_3) (canContain DeskType BookType) (canContain DeskType BowlType)
    (receptacleType Desk_bar__plus_01_bar__plus_00 DeskType) (canContain DrawerType BookType)
    (receptacleType Drawer_bar__plus_02_bar__plus_00 DrawerType) (pickupable Book_bar__plus_01_bar__plus_01)
    (objectType Book_bar__plus_01_bar__plus_01 BookType) (objectType Bowl_bar__plus_01_bar__plus_02 BowlType)
    (objectType DeskLamp_bar__plus_01_bar__plus_03 DeskLampType) (pickupable Bowl_bar__plus_01_bar__plus_02)
    (isReceptacleObject Bowl_bar__plus_01_bar__plus_02) (toggleable DeskLamp_bar__plus_01_bar__plus_03)
    (openable Drawer_bar__plus_02_bar__plus_00) (receptacleAtLocation Desk_bar__plus_01_bar__plus_00 loc_bar_1)
    (receptacleAtLocation Drawer_bar__plus_02_bar__plus_00 loc_bar_2)
    (objectAtLocation Book_bar__plus_01_bar__plus_01 loc_bar_1)
    (objectAtLocation Bowl_bar__plus_01_bar__plus_02 loc_bar_1)
    (objectAtLocation DeskLamp_bar__plus_01_bar__plus_03 loc_bar_1)
    (inReceptacle Book_bar__plus_01_bar__plus_01 Desk_bar__plus_01_bar__plus_00)
    (inReceptacle Bowl_bar__plus_01_bar__plus_02 Desk_bar__plus_01_bar__plus_00)
    (inReceptacle DeskLamp_bar__plus_01_bar__plus_03 Desk_bar__plus_01_bar__plus_00)
)
(:goal (exists (?r - receptacle ?o - object)
    (and (inReceptacle ?o ?r) (objectType ?o BookType) (receptacleType ?r DrawerType))))
)
"""
GOAL = "put some book on drawer"  # the book lies on the desk
PLAN = ["go to desk 1", "take book 1 from desk 1", "go to drawer 1", "open drawer 1", "move book 1 to drawer 1"]
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


def row(name: str, task_type: str = TYPE) -> dict[str, object]:
    """A line of a compact file."""
    return {"id": name, "task_type": task_type, "goal": GOAL, "anns": ["File the book."], "pddl_problem": PROBLEM}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    train = [row(f"train-{i}") for i in range(4)] + [row("look", "look_at_obj_in_light")]
    for split, rows in (("train", train), ("valid_seen", [row("held-out")])):
        with gzip.open(tmp_path / f"{split}.jsonl.gz", "wt") as out:
            out.writelines(json.dumps(each) + "\n" for each in rows)
    return tmp_path


def _world(folder: Path, **options: Any) -> World:
    return get_world("alfworld", data=str(folder), **options)


def test_plays_as_textworld_does() -> None:
    from fast_downward import load_lib

    from covey.environments.alfworld_game import Game

    told, how = json.dumps([PROBLEM, GOAL, PLAN]), {"capture_output": True, "text": True, "check": True, "timeout": 120}
    played = subprocess.run([sys.executable, "-c", _THEIRS], input=told, **how)  # type: ignore[call-overload]
    (first, commands, _), *theirs = json.loads(played.stdout)
    game = Game.begin(load_lib(), PROBLEM, GOAL)
    assert game.introduction() == first.removeprefix("-= Welcome to TextWorld, ALFRED! =-").strip()
    assert list(game.commands) == commands
    draw = random.Random(7)
    for turn, (said, commands, won) in enumerate(theirs):
        assert game.do(PLAN[turn] if turn < len(PLAN) else draw.choice(list(game.commands))) == said
        assert (list(game.commands), game.won) == (commands, won)
    assert [won for _, _, won in theirs[: len(PLAN)]] == [False] * (len(PLAN) - 1) + [True]


def test_the_planner_solves_it_in_a_process_of_its_own(folder: Path) -> None:
    world = _world(folder)
    with EnvironmentPool(world, 1) as pool:
        for task in world.eval_tasks() * 2:  # an environment plays one game after another
            (seen,) = begun(pool, task)
            assert seen.text.endswith(f"Your task is to: {GOAL}.")
            for action in PLAN:
                assert (pool.expert_action(0), action in seen.actions) == (action, True)
                pool.step(0, action)
                outcome = answers(pool, 1)[0]
                seen = outcome.observation
                assert outcome.done == (action == PLAN[-1])
            assert (outcome.success, outcome.reward) == (True, 1.0)


def test_what_is_not_possible_changes_nothing(folder: Path) -> None:
    world = _world(folder)
    environment: Any = world.make()
    before = environment.reset(world.eval_tasks()[0], 0)
    seen, reward, done, info = environment.step("open the drawer with your teeth")
    assert (seen.text, seen.actions) == ("Nothing happens.", before.actions)
    assert (reward, done, info["valid"], info["success"]) == (0.0, False, False, False)


def test_tasks(folder: Path) -> None:
    two = [_world(folder, num_train=2).train_tasks(1) for _ in range(2)]
    assert (two[0], len(two[0])) == (two[1], 2)
    assert {task["type"] for task in _world(folder).train_tasks(0)} == {TYPE, "look_at_obj_in_light"}
    (look,) = _world(folder, types="look_at_obj_in_light").train_tasks(0)
    assert (look["uid"], _world(folder).eval_tasks()[0]["goal"]) == ("look", GOAL)
    assert _world(folder, goals="human").eval_tasks()[0]["goal"] == "File the book"


def test_a_downloaded_folder(folder: Path) -> None:
    def trial(name: str, **game: Any) -> None:
        place = folder / "valid_unseen" / name
        place.mkdir(parents=True)
        grammar = 'grammar :: """{"task": [{"rhs": "Your task is to: ' + GOAL + '."}]}"""'
        whole = {"grammar": grammar, "pddl_problem": PROBLEM, "solvable": True, **game}
        said = {"task_type": TYPE, "turk_annotations": {"anns": [{"task_desc": "File the book."}]}}
        (place / "game.tw-pddl").write_text(json.dumps(whole))
        (place / "traj_data.json").write_text(json.dumps(said))

    trial("book/trial_1")
    trial("book/trial_2", solvable=False)
    trial("movable_book/trial_3")
    (task,) = _world(folder, eval_split="valid_unseen").eval_tasks()
    assert (task["uid"], task["goal"]) == ("book/trial_1", GOAL)
    assert task["problem"] == _world(folder).eval_tasks()[0]["problem"]


def test_mistakes(folder: Path, tmp_path: Path) -> None:
    for options, message in (
        ({"types": "pick_and_plaice"}, "'pick_and_plaice' is none of pick_and_place_simple"),
        ({"num_train": 0}, "num_train=0"),
        ({"goals": "animal"}, "must be template or human"),
    ):
        raises(ConfigError, message, _world, folder, **options)
    raises(DataError, r"neither train\.jsonl\.gz nor a folder train", _world(tmp_path / "nowhere").train_tasks, 0)
    with pytest.raises(DataError, match="no games of pick_heat_then_place_in_recep"):
        _world(folder, types="pick_heat_then_place_in_recep").train_tasks(0)
    (folder / "train.jsonl.gz").write_bytes(b"no gzip")
    raises(DataError, "not one ALFWorld game in each line", _world(folder).train_tasks, 0)


def test_a_broken_game_costs_its_own_episode(folder: Path) -> None:
    world = _world(folder)
    (good,) = world.eval_tasks()
    with EnvironmentPool(world, 1) as pool:
        assert "failed in reset" in str(begun(pool, {**good, "problem": "bm9uc2Vuc2U="})[0])
        assert isinstance(begun(pool, good)[0], Observation)
        pool.step(0, "look")
        assert isinstance(answers(pool, 1)[0], Outcome)
