"""Worlds, tasks and advantage estimators of a stranger (one file outside the package), in whole runs."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_kill_and_resume import killed, numbers
from training_runs import Settings, always, build, letters, same_weights, steps_of, trained

from command import Command
from covey import GRPOConfig, GRPOTrainer
from covey.config.names import FIELDS
from covey.environments import EnvironmentPool, get_world
from covey.errors import ConfigError, CoveyError
from covey.observe.run_folder import RunFolder
from covey.recipes.house.house import House
from covey.tasks import get_task
from covey.training import setup
from covey.training.questions import QuestionHistory
from fakes import raises, slow

MAZE = '''
from covey.environments import Environment, Observation, World
DOORS = ("left", "right")
class Maze(World):
    """Two doors; the task says which one leads out."""
    max_turns, max_completion_length = 2, 8
    def __init__(self, size: int = 3): self.size = size
    def train_tasks(self, seed):
        return [{"uid": f"t{n}", "door": DOORS[n % 2]} for n in range(self.size)]
    def eval_tasks(self): return [{"uid": "e0", "door": "left"}]
    def make(self): return Rooms()
class Rooms(Environment):
    def reset(self, task, seed):
        self.door = task["door"]
        return Observation(f"The {self.door} door leads out.", actions=DOORS)
    def step(self, action):
        out = action == self.door
        return Observation("Outside." if out else "A wall.", actions=DOORS), float(out), out, {"success": out}
    def expert_action(self): return self.door
class Unfinished(World):
    def train_tasks(self, seed): return []
class NoWorld:
    def train_tasks(self, seed): return []
    def eval_tasks(self): return []
class Broken(Maze):
    def __init__(self): raise KeyError("map")
def factory(size: int = 4): return Maze(size)
made, number = Maze(5), 7
'''

RIDDLES = """
from covey.tasks.base import Task, as_prompt
def has_letters(completions, **columns):
    return [float(any(c.isalpha() for c in message["content"])) for (message,) in completions]
class Riddles(Task):
    max_completion_length = 8
    def __init__(self, count: int = 4): self.count = count
    @property
    def reward_funcs(self): return [has_letters]
    def train_rows(self, seed):
        return [{"prompt": as_prompt(f"riddle {n}"), "answer": str(n)} for n in range(self.count)]
    def eval_rows(self):
        return [{"prompt": as_prompt("a last riddle"), "answer": "x"}]
    def is_correct(self, text, row):
        return any(c.isalpha() for c in text)
"""
CORRECT, TRAIN = "return any(c.isalpha() for c in text)", "def train_rows(self, seed):"
ROW, SEEN = 'as_prompt("a last riddle"), "answer": "x"', 'as_prompt("riddle 1"), "answer": "1"'
TASKS = "def train_tasks(self, seed):"
RIDDLE, WORLD = ("task", "riddles.py", "Riddles", RIDDLES), ("world", "maze.py", "Maze", MAZE)
RECIPE = Path(__file__).parents[2] / "recipes" / "reinforce_pp"
TEACHES = "its attribute teaches raised ZeroDivisionError: division by zero at .*own.py:3"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "maze.py").write_text(MAZE)
    (tmp_path / "riddles.py").write_text(RIDDLES)
    return tmp_path


def test_a_class_a_function_or_an_object_and_what_is_wrong_is_named(folder: Path, covey: Command) -> None:
    for name, size in (("Maze", 3), ("Maze:size=2", 2), ("made", 5), ("factory:size=6", 6)):
        assert len(get_world(f"{folder}/maze.py:{name}").train_tasks(0)) == size
    assert get_task(f"{folder}/riddles.py:Riddles").max_completion_length == 8
    world = get_world(f"{folder}/maze.py:Maze")  # and its environments run in processes of their own
    with EnvironmentPool(world, places=1) as pool:
        pool.reset(0, world.eval_tasks()[0], 0)
        ((_, seen),) = pool.wait()
        assert seen.text == "The left door leads out."
    assert "solved after 1 action, reward 1" in covey.done("play", f"{folder}/maze.py:Maze", "--expert")
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
        raises(ConfigError, reason, get_world, f"{folder}/{name}")


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
def test_a_killed_run_in_a_strangers_world_is_resumed(folder: Path, recipe_folder: Path, covey: Command) -> None:
    recipe = recipe_of(folder, recipe_folder, world="maze.py:Maze:size=2")
    covey.done("train", recipe, f"run.output_dir={folder / 'whole'}")
    run = folder / "killed"
    killed("update", 2, "train", str(recipe), f"run.output_dir={run}")
    assert not RunFolder.read(run).needs_python
    covey.done("resume", run)
    assert numbers(run) == numbers(folder / "whole")
    assert "eval/accuracy" in covey.done("eval", run)


def test_a_strangers_task_trains_and_samples(folder: Path, recipe_folder: Path, covey: Command) -> None:
    recipe, run = recipe_of(folder, recipe_folder, task="riddles.py:Riddles:count=3"), folder / "run"
    covey.done("train", recipe, f"run.output_dir={run}")
    records = numbers(run)
    assert {"reward", "rewards/has_letters/mean"} <= records[1].keys()
    assert "eval/accuracy" in records[-1]
    covey.done("sample", run, "hello", "--max-tokens", 2)


@pytest.mark.parametrize(
    ("place", "old", "new", "message"),
    [
        (RIDDLE, CORRECT, "return 0.5", "is_correct returned 0.5; return True or False"),
        (RIDDLE, CORRECT, "return row['solution']", "is_correct raised KeyError: 'solution' at .*riddles.py"),
        (RIDDLE, TRAIN, TRAIN + "\n        raise OSError('gone')", "train_rows raised OSError: gone at .*riddles.py"),
        (RIDDLE, ROW, SEEN, "1 of its 1 eval_rows are"),
        (WORLD, TASKS, TASKS + "\n        1 / 0", "ZeroDivisionError: .*maze.py"),
        (WORLD, TASKS, TASKS + "\n        return ['a']", "task 'a' is not a dictionary"),
    ],
)
def test_what_errs_is_named(folder: Path, settings: Settings, place: Any, old: str, new: str, message: str) -> None:
    setting, file, name, text = place
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1))
    with pytest.raises(CoveyError, match=rf"{FIELDS[setting]}.{setting}='.*{file}:{name}': .*{message}"):
        GRPOTrainer(args=GRPOConfig(**settings, **{setting: f"{folder}/{file}:{name}"})).train()


def losses(trainer: GRPOTrainer) -> list[float]:
    return [record["loss"] for record in steps_of(trainer)]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of somebody's own, with the recipe's file in it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(RECIPE / "reinforce_pp.py", folder / "mine.py")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("function", ["kl_in_reward", slow("batch_normalised")])
def test_a_file_of_ones_own_trains_and_resumes(settings: Settings, elsewhere: Path, function: str) -> None:
    settings |= {"adv_estimator": f"mine.py:{function}", "num_generations": 1, "prompts_per_step": 4, "beta": 0.0}
    settings |= {"max_steps": 4, "adv_parameters": {"kl_coef": 0.5} if function == "kl_in_reward" else {}}
    unbroken, again = trained(settings), {"name": "again", "save_steps": 2}
    trained(settings, **again)
    resumed = trained(settings, **again, resume=2)
    assert ((len(losses(unbroken)), unbroken.state.updates), losses(resumed)) == ((4, 4), losses(unbroken))
    assert same_weights(unbroken, resumed)


def probing(settings: Settings, needs: str, *names: str, **changes: Any) -> tuple[GRPOTrainer, list[Any]]:
    """A trainer whose estimator needs something, and what each step tells it under these names."""
    told = ", ".join(f"step.{name}" for name in names)
    Path(f"{needs}.py").write_text(
        f"seen = []\ndef probe(step):\n    seen.append(({told}))\n    return step.rewards - 0.5\n"
        f"probe.group_relative = False\nprobe.{needs} = True\n"
    )
    trainer = build(settings, adv_estimator=f"{needs}.py:probe", beta=0.0, **changes)
    seen = trainer.estimator.function.__globals__["seen"]
    seen.clear()  # the small step on which it was tried
    return trainer, seen


def sample(trainer: GRPOTrainer) -> tuple[Any, Any]:
    phase = trainer.phases.at(trainer._elapsed())
    groups = trainer.sample_step(phase, 0, trainer.state.policy_version, print).rollout.groups
    return groups, trainer.make_batch(groups, phase)


def test_what_an_estimator_asks_for_is_measured(settings: Settings, elsewhere: Path) -> None:
    names = ("logprobs", "reference", "mask", "parts", "turns")
    trainer, seen = probing(settings, "needs_reference", *names, max_steps=3, learning_rate=0.1)
    trainer.train()
    for step, (logprobs, reference, mask, parts, turns) in enumerate(seen):
        assert mask.any()
        assert not logprobs[~mask].any()
        assert not reference[~mask].any()
        far = np.abs(logprobs - reference)[mask].max()
        assert (far < 1e-4) == (step == 0)  # the first step is sampled from the reference itself
        assert (parts.shape, turns) == ((1, 8), None)
    # squared probabilities are those of the plain model
    trainer, seen = probing(settings, "needs_sum_pi_squared", "sum_pi_squared", "mask", temperature=0.7, name="other")
    _, batch = sample(trainer)
    found, mask = seen[0]
    for row, episode in enumerate(batch.episodes):
        with torch.no_grad():
            logits = trainer.policy.model(torch.tensor(episode.token_ids[None])).logits[0] / 0.7
        expected = logits[torch.from_numpy(np.flatnonzero(episode.sampled) - 1)].double().softmax(-1).square().sum(-1)
        np.testing.assert_allclose(found[row][mask[row]], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("step.logprobs[:] = -50.0", "read-only at .*own.py:2, in mine"),
        ("step.rewards -= 1", "read-only at .*own.py:2, in mine"),
        ("return step.rewards[:1]", r".*shape \(1,\) for 4 completions"),
        ("return step.rewards * float('nan')", ".*not finite"),
        ("return step.nothing", r".*AttributeError.*own\.py:2, in mine"),
        ("return step.rewards - 0.5\nmine.teaches = lambda group: 1 / 0", TEACHES),
    ],
)
def test_what_an_estimator_may_not_do_is_named(settings: Settings, elsewhere: Path, body: str, message: str) -> None:
    (elsewhere / "own.py").write_text(f"def mine(step):\n    {body}\n")
    with pytest.raises(ConfigError, match=rf"adv_estimator='.*own.py:mine': .*{message}"):
        trained(settings, adv_estimator="own.py:mine", beta=0.0, max_steps=1)
    assert Path(settings["output_dir"]).exists() == ("shape" not in message)  # its shape is known before training


def test_from_the_command_line(elsewhere: Path, recipe_folder: Path, covey: Command) -> None:
    arguments = ("adv_estimator=mine.py:kl_in_reward", "adv_parameters={kl_coef=0.1}", "num_generations=1")
    covey.done("train", recipe_folder / "recipe.toml", *arguments, "run.output_dir=run", "max_steps=2")
    assert GRPOConfig.from_toml(elsewhere / "run" / "config.toml").adv_parameters == {"kl_coef": 0.1}
    covey.done("resume", "run", "max_steps=3")
    assert len(steps_of(elsewhere / "run")) == 3
    status, _, err = covey("train", recipe_folder / "recipe.toml", "adv_estimator=mine.py:nothing")
    assert status == 2
    assert "mine.py has no 'nothing'; it has batch_normalised" in " ".join(err.split())


def test_equal_rewards_teach_where_nothing_is_compared_within_groups(settings: Settings) -> None:
    """Completions of 5 questions, all right but for one question's: every group is tied."""

    def by_question(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return [float("t" in prompt) for prompt in prompts]

    settings |= {"beta": 0.0, "dynamic_sampling": 3, "prompts_per_step": 4}
    for estimator, updates, tied, sentence in (
        ("grpo", 0, 1.0, "the rewards in every group are equal"),
        ("reinforce_plus_plus", 2, 0.0, "all advantages are 0"),
    ):
        trainer = trained(settings, by_question, adv_estimator=estimator, name=estimator)
        assert (trainer.state.updates, trainer.state.log_history[-1]["frac_reward_zero_std"]) == (updates, tied)
        silent = {"adv_estimator": estimator, "max_steps": 1, "dynamic_sampling": False, "name": estimator + "-silent"}
        run = trained(settings, always, **silent).args.output_dir
        assert any(sentence in event["message"] for event in RunFolder.read(run).read_events())
    assert "dynamic_sampling/discarded_groups" not in trainer.state.log_history[-1]


def test_remax_asks_for_the_greedy_completion(settings: Settings) -> None:
    asked: list[int] = []

    def reward(completions: list[str], **columns: Any) -> list[float]:
        asked.append(len(completions))
        return letters(completions)

    trainer = trained(settings, reward, adv_estimator="remax", num_generations=1, beta=0.0)
    assert asked == [2, 2, 2, 2]  # the sampled ones, then one greedy one for each prompt
    groups, batch = sample(trainer)
    greedy, prompts = [group.greedy_reward for group in groups], [group.prompt for group in groups]
    sampling = setup.sampling_settings(trainer.args, trainer.policy, 0.0)
    how = {"num_generations": 1, "streams": [(9, 9, 9), (8, 8, 8)]}  # greedy completions do not depend on the streams
    again = trainer.collect(prompts, sampling, **how, policy_version=trainer.state.policy_version)
    assert greedy == [float(group.rewards[0]) for group in again.groups]
    rewards = np.concatenate([group.rewards for group in groups])
    np.testing.assert_allclose(batch.advantages[:, 0], rewards - greedy, atol=1e-6)


def test_what_does_not_fit_is_said_early(settings: Settings, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.pytorch.policy.Policy.load", None)  # would be too late
    (elsewhere / "own.py").write_text("def own(step, *, a=1):\n    return step.rewards\n")
    for changes, message in (
        ({"adv_estimator": "gigpo"}, r"adv_estimator='gigpo'.*environment\.world"),
        ({"adv_estimator": "own.py:own", "num_generations": 1}, "num_generations=1: a group needs at least 2"),
        ({"adv_estimator": "own.py:own", "adv_parameters": {"b": 1}}, "it takes a"),
        ({"adv_estimator": "gone.py:own"}, "gone.py: no such file"),
    ):
        raises(ConfigError, message, build, settings, **changes)
    with pytest.raises(ConfigError, match=r"data\.task='arithmetic'.*come from its world"):
        GRPOTrainer(args=GRPOConfig(**settings, task="arithmetic"), world=House(rooms=2, num_train=6, num_eval=2))


def test_questions_that_are_always_right_keep_their_weight_where_the_batch_is_the_baseline() -> None:
    within, beyond = (QuestionHistory(["new", "solved", "failed"], relative) for relative in (True, False))
    for history in (within, beyond):
        history.add({"solved": [8, 8], "failed": [0, 8]})
    assert within.weights()[1:] == pytest.approx([0.49, 0.49], abs=0.01)
    # mean over questions 1/2: (1/2)^2 for every reward
    assert beyond.weights() == pytest.approx([1.0, 1.0, 1.0])
    beyond.add({"solved": [8, 8], "new": [8, 8]})
    assert beyond.weights()[2] > 1.0 > beyond.weights()[1]
