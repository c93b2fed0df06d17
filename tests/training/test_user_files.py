"""Worlds and tasks of a stranger: one file outside the package, named in a recipe or on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_kill_and_resume import killed, numbers
from test_kill_and_resume import run as covey
from training_runs import Settings

from covey import GRPOConfig, GRPOTrainer
from covey.config.names import FIELDS
from covey.environments import EnvironmentPool, get_world
from covey.errors import ConfigError, CoveyError
from covey.observe.run_folder import RunFolder
from covey.tasks import get_task

MAZE = '''
from covey.environments import Environment, Observation, World
DOORS = ("left", "right")
class Maze(World):
    """Two doors; the task says which one leads out."""
    max_turns, max_completion_length = 2, 8
    def __init__(self, size: int = 3) -> None:
        self.size = size
    def train_tasks(self, seed):
        return [{"uid": f"t{n}", "door": DOORS[n % 2]} for n in range(self.size)]
    def eval_tasks(self):
        return [{"uid": "e0", "door": "left"}]
    def make(self):
        return Rooms()

class Rooms(Environment):
    def reset(self, task, seed):
        self.door = task["door"]
        return Observation(f"The {self.door} door leads out.", actions=DOORS)
    def step(self, action):
        out = action == self.door
        return Observation("Outside." if out else "A wall.", actions=DOORS), float(out), out, {"success": out}
    def expert_action(self):
        return self.door

class Unfinished(World):
    def train_tasks(self, seed):
        return []

class NoWorld:
    def train_tasks(self, seed):
        return []
    def eval_tasks(self):
        return []

class Broken(Maze):
    def __init__(self):
        raise KeyError("map")

def factory(size: int = 4):
    return Maze(size)

made, number = Maze(5), 7
'''

RIDDLES = """
from covey.tasks.base import Task, as_prompt

def has_letters(completions, **columns):
    return [float(any(c.isalpha() for c in message["content"])) for (message,) in completions]

class Riddles(Task):
    max_completion_length = 8
    def __init__(self, count: int = 4) -> None:
        self.count = count
    @property
    def reward_funcs(self):
        return [has_letters]
    def train_rows(self, seed):
        return [{"prompt": as_prompt(f"riddle {n}"), "answer": str(n)} for n in range(self.count)]
    def eval_rows(self):
        return [{"prompt": as_prompt("a last riddle"), "answer": "x"}]
    def is_correct(self, text, row):
        return any(c.isalpha() for c in text)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "maze.py").write_text(MAZE)
    (tmp_path / "riddles.py").write_text(RIDDLES)
    return tmp_path


def test_a_class_a_function_or_an_object(folder: Path) -> None:
    for name, size in (("Maze", 3), ("Maze:size=2", 2), ("made", 5), ("factory:size=6", 6)):
        assert len(get_world(f"{folder}/maze.py:{name}").train_tasks(0)) == size
    assert get_task(f"{folder}/riddles.py:Riddles").max_completion_length == 8
    world = get_world(f"{folder}/maze.py:Maze")  # and its environments run in processes of their own
    with EnvironmentPool(world, places=1) as pool:
        pool.reset(0, world.eval_tasks()[0], 0)
        ((_, seen),) = pool.wait()
        assert seen.text == "The left door leads out."
    assert "solved after 1 actions, reward 1" in covey("play", f"{folder}/maze.py:Maze", "--expert")


def test_what_is_wrong_is_named(folder: Path) -> None:
    for name, reason in {
        "maze.py:Mase": r"maze\.py has no 'Mase'; it has .*Maze",
        "maze.py:Unfinished": r"maze\.py:Unfinished lacks eval_tasks, make",
        "maze.py:NoWorld": r"a NoWorld lacks .*make.*covey\.environments\.base\.World",
        "maze.py:Broken": r"maze\.py:Broken.*KeyError: 'map'.*maze\.py:\d+",
        "maze.py:number": r"maze\.py:number is a int",
        "maze.py:Maze:sise=3": r"no option 'sise'; did you mean 'size'",
        "maze.py:Maze:size=big": r"size='big' is str",
        "maze.py:made:size=3": r"made already and takes no options",
        "maze.py:": r"names no environment: write FILE\.py:",
        "nowhere.py:Maze": r"nowhere\.py: no such file",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            get_world(f"{folder}/{name}")


def test_a_recipe_finds_it_beside_itself_or_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, recipe = folder / "here", folder / "recipe.toml"
    here.mkdir()
    (here / "mine.py").touch()
    monkeypatch.chdir(here)
    recipe.write_text('[environment]\nworld = "maze.py:Maze:size=2"\n[rewards]\nfunctions = ["mine.py:f"]\n')
    config = GRPOConfig.from_toml(recipe)
    assert config.environment.world == f"{folder / 'maze.py'}:Maze:size=2"
    assert config.rewards.functions == (f"{here / 'mine.py'}:f",)
    assert GRPOConfig.from_toml(recipe, ["world=maze.py:Maze"]).environment.world == "maze.py:Maze"  # not here


def recipe_of(folder: Path, recipe_folder: Path, **where: str) -> Path:
    """The tests' recipe, whose task is replaced by one of these files beside it."""
    config = GRPOConfig.from_toml(recipe_folder / "recipe.toml")
    config = config.replace(task=None, dataset=None, eval_dataset=None, functions=(), correctness=None, world=None)
    ((name, value),) = where.items()
    section = f"[{FIELDS[name]}]\n"
    text = config.replace(max_steps=3, save_steps=1, eval_steps=3, progress=False).to_toml()
    assert section in text
    path = folder / "recipe.toml"
    path.write_text(text.replace(section, f'{section}{name} = "{value}"\n'))
    return path


@pytest.mark.slow
def test_a_killed_run_in_a_strangers_world_is_resumed_by_the_command(folder: Path, recipe_folder: Path) -> None:
    recipe = recipe_of(folder, recipe_folder, world="maze.py:Maze:size=2")
    covey("train", recipe, f"run.output_dir={folder / 'whole'}")
    run = folder / "killed"
    killed("update", 2, "train", str(recipe), f"run.output_dir={run}")
    assert not RunFolder.read(run).needs_python
    covey("resume", run)
    assert numbers(run) == numbers(folder / "whole")
    assert "eval/accuracy" in covey("eval", run)


def test_a_strangers_task_trains_and_samples(folder: Path, recipe_folder: Path) -> None:
    recipe, run = recipe_of(folder, recipe_folder, task="riddles.py:Riddles:count=3"), folder / "run"
    covey("train", recipe, f"run.output_dir={run}")
    records = numbers(run)
    assert {"reward", "rewards/has_letters/mean"} <= records[1].keys()
    assert "eval/accuracy" in records[-1]
    covey("sample", run, "hello", "--max-tokens", 2)


CORRECT, TRAIN = "return any(c.isalpha() for c in text)", "def train_rows(self, seed):"
ROW, SEEN = 'as_prompt("a last riddle"), "answer": "x"', 'as_prompt("riddle 1"), "answer": "1"'
TASKS = "def train_tasks(self, seed):"
RIDDLE, WORLD = ("task", "riddles.py", "Riddles", RIDDLES), ("world", "maze.py", "Maze", MAZE)


@pytest.mark.parametrize(
    ("place", "old", "new", "message"),
    [
        (RIDDLE, CORRECT, "return 0.5", "is_correct returned 0.5; return True or False"),
        (RIDDLE, CORRECT, "return row['solution']", "is_correct raised KeyError: 'solution' at .*riddles.py"),
        (RIDDLE, TRAIN, TRAIN + "\n        raise OSError('gone')", "train_rows raised OSError: gone at .*riddles.py"),
        (RIDDLE, ROW, SEEN, "1 of its 1 eval_rows are"),
        (WORLD, TASKS, TASKS + "\n        1 / 0", "ZeroDivisionError: .*maze.py"),
        (WORLD, TASKS, TASKS + "\n        return ['a']", "task 'a' is no dictionary"),
    ],
)
def test_what_errs_is_named(folder: Path, settings: Settings, place: Any, old: str, new: str, message: str) -> None:
    setting, file, name, text = place
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1))
    with pytest.raises(CoveyError, match=rf"{FIELDS[setting]}.{setting}='.*{file}:{name}': .*{message}"):
        GRPOTrainer(args=GRPOConfig(**settings, **{setting: f"{folder}/{file}:{name}"})).train()
