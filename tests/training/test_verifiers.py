"""Tasksets of verifiers as a world: its programs sample from the trainer's engine, and what they say is not believed.

A script that speaks the driver's lines stands in for verifiers; COVEY_VERIFIERS_PYTHON names one that has it.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_runs import Settings, build, steps_of, trained

from covey.environments import get_world
from covey.environments.verifiers import Driver, Told
from covey.errors import ConfigError, DataError, EpisodeError
from covey.observe.run_folder import RunFolder
from covey.training.driven import trajectory_of
from covey.types import Completion
from fakes import ends, raises, slow

EXAMPLES = Path(__file__).parents[2] / "examples"
PYTHON = os.environ.get("COVEY_VERIFIERS_PYTHON")


@pytest.fixture
def python(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name('fake_verifiers.py')}\n")
    path.chmod(0o755)
    return path


def playing(settings: Settings, python: Path, does: str, more: str = "") -> Settings:
    world = f"verifiers:taskset={does},python={python},path={python.parent},seconds=20{more}"
    return settings | {"world": world, "parallel_episodes": 4, "max_conversation_tokens": 100, "beta": 0.0}


def test_it_trains_on_what_was_sampled(settings: Settings, python: Path) -> None:
    run = trained(playing(settings, python, "plays"), max_steps=2, keep_sampling_mask=True, top_k=20)
    steps = steps_of(run)
    for record in steps:
        assert (record["agent/turns"], record["agent/branches"], record["agent/failed_episodes"]) == (2, 1, 0)
        assert record["sampling/sampling_logp_difference/max"] < 1e-3
    rows = RunFolder.read(run.args.output_dir).read_completions(1)
    assert {row["reward"] for row in rows} <= {0.0, 1.0}
    assert [row["turns"] for row in rows] == [2] * 8
    assert [row["uid"] for row in run.data.held_out] == ["0000000atrain"]  # one in ten, by the hash
    run.close()


def test_equal_seeds_sample_the_same_one_at_a_time(settings: Settings, python: Path) -> None:
    def texts() -> Any:
        run = build(playing(settings, python, "plays") | {"parallel_episodes": 1})
        groups = run.rollout().groups
        run.close()
        return [episode.token_ids.tolist() for group in groups for episode in group.episodes]

    assert texts() == texts()


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("not ok", "no dice"),
        ("other tokens", "branch 0: its tokens 3 to 11 are not what was sampled after the others"),
        ("untrainable", "not trainable"),
        ("dies", "the process of verifiers ended"),
        ("asks otherwise", "temperature=0.5: this run samples with 1.0"),
        ("too long", "max_conversation_tokens=100 leaves no room"),
    ],
)
def test_a_failure_costs_its_own_episodes(settings: Settings, python: Path, does: str, words: str) -> None:
    run = build(playing(settings, python, does), prompts_per_step=1, parallel_episodes=1)
    (group,) = run.rollout().groups
    run.close()
    failed = [trajectory.ended == "failed" for trajectory in group.trajectories]
    assert np.isnan(group.rewards).tolist() == failed
    assert failed[3]
    assert len(group.episodes) == failed.count(False) > 0
    assert words in group.trajectories[3].error


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("no number", ["its reward is inf; it must be a finite number", "its reward is nan"]),
        ("huge ids", ["branches.0.0.4\n  Input should be gr.* to 0", "branches.0.0.4\n  Input should be less than"]),
        ("broken lines", ["cannot be read: .*Invalid JSON: expected ident", "cannot be read: .*hex escape"]),
    ],
)
def test_what_is_no_trace_costs_its_episode_alone(
    settings: Settings, python: Path, does: str, words: list[str]
) -> None:
    run = build(playing(settings, python, does), prompts_per_step=2)
    groups = run.rollout().groups
    run.close()
    errors = filter(None, [trajectory.error for group in groups for trajectory in group.trajectories])
    for error, each in zip(sorted(errors), words, strict=True):  # of episodes 3 to 7: 4 and 5
        assert re.search(f"(?s){each}", error)
    assert [int(np.isnan(group.rewards).sum()) for group in groups] == [0, 2]


def test_what_hangs_is_ended_with_all_that_it_has_started(settings: Settings, python: Path) -> None:
    changes = playing(settings, python, "hangs")
    run = build(changes | {"world": changes["world"].replace("seconds=20", "seconds=0.5")}, prompts_per_step=1)
    (group,) = run.rollout().groups
    assert "had not ended 10 s after twice its limit of 0.5 s" in group.trajectories[3].error
    run.close()
    assert ends(int((python.parent / "child").read_text()))


def test_a_process_that_hears_nothing_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "deaf").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "deaf").chmod(0o755)
    driver = Driver(tmp_path / "deaf", {"PATH": os.defpath})
    driver.send({"more than a pipe holds": "x" * 10**6})
    assert driver.runs
    driver.end(at_once=True)
    assert (driver.runs, driver.first.get(timeout=10)) == (False, None)


def test_variables_with_keys_do_not_reach_it(settings: Settings, python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("HF_TOKEN", "OPENAI_API_KEY", "COVEY_SERVER_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "WANTED")
    for name in names:
        monkeypatch.setenv(name, "secret")
    run = build(playing(settings, python, "tells its variables", ",variables=WANTED"), prompts_per_step=1)
    (group,) = run.rollout().groups
    run.close()
    told = group.trajectories[3].error.split()
    assert [name for name in names if name in told] == ["WANTED"]
    assert len(told) < 20


def test_branches_are_trained_on_once_and_told_of_once(settings: Settings, python: Path, caplog: Any) -> None:
    run = build(playing(settings, python, "two branches"), prompts_per_step=1)
    (group,) = run.rollout().groups
    run.rollout()
    run.close()
    assert caplog.text.count("an episode has several sequences") == 1
    first, second = group.trajectories[3].episodes
    shared = first.token_ids[3:][first.sampled[3:]][: int(np.argmin(first.sampled[3:]))]
    assert second.token_ids[3 : 3 + len(shared)].tolist() == shared.tolist()
    assert not second.sampled[: 3 + len(shared) + 1].any()
    assert [(turn.row, turn.segment) for turn in group.trajectories[3].turns] == [(0, 0), (0, 1), (1, 0)]


def test_a_trace_by_hand() -> None:
    """[1 2] -> 3, then [1 2 3 4] -> 5 6; the reward is the last turn's."""

    def completion(*ids: int) -> Completion:
        return Completion(np.array(ids), -np.array(ids, np.float32), "stop", 7)

    sampled = [(np.array([1, 2]), completion(3)), (np.array([1, 2, 3, 4]), completion(5, 6))]
    told = Told(id=0, ok=True, reward=0.5, stop="max_turns", branches=[([1, 2, 3, 4, 5, 6, 9], [0, 0, 1, 0, 1, 1, 0])])
    found = trajectory_of(told, sampled, str, success=0.5)
    (episode,) = found.episodes
    assert episode.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert episode.logprobs.tolist() == [0, 0, -3, 0, -5, -6]
    assert [(turn.observation, turn.said, turn.reward) for turn in found.turns] == [
        ("[1, 2]", "[3]", 0.0),
        ("[4]", "[5, 6]", 0.5),
    ]
    assert (found.ended, found.success, episode.policy_version) == ("turns", True, 7)
    for branches in ([([1, 2, 3, 4, 5, 7], [0, 0, 1, 0, 1, 1])], [([1, 3], [0, 1])], [([1, 2], [0])], []):
        raises(EpisodeError, None, trajectory_of, told.model_copy(update={"branches": branches}), sampled, str, 0.5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("taskset=a,runtime=prime", "rents machines"),
        ("taskset=a,runtime=modal", "rents machines"),
        ("taskset=a,runtime=e2b", "rents machines"),
        ("taskset=a,harness=bash", "runs the model's commands on this machine"),
        ("taskset=a,python=/no/python", "no program that can be run"),
        ("taskset=a,python=/tmp", "python=/tmp: no program that can be run"),
        ("taskset=a,seconds=0", "verifiers: seconds=0: write a number above 0"),
        ("", "lacks its option 'taskset'; write verifiers:taskset="),
    ],
)
def test_what_costs_or_runs_here_is_refused(options: str, words: str) -> None:
    raises(ConfigError, words, get_world, f"verifiers:{options}")
    if "rents" in words or "commands" in words:
        get_world(f"verifiers:{options},unsafe=true")


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("cannot be loaded", "ValueError: no such file"),
        ("ends", "its process ended: no verifiers here$"),
        ("never loads", "taskset never loads, .* did not load within 0.5 s; correct it, or raise seconds=0.5"),
    ],
)
def test_a_taskset_that_cannot_be_loaded(python: Path, does: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if does == "never loads":
        monkeypatch.setattr("covey.environments.verifiers._LOAD_SECONDS", 0.5)
    world = get_world(f"verifiers:taskset={does},python={python},seconds=0.5")
    raises(DataError, words, world.train_tasks, 0)


def test_a_python_without_verifiers() -> None:
    world = get_world(f"verifiers:taskset=a,python={sys.executable}")
    raises(DataError, "No module named 'verifiers'; .*-m pip install verifiers==0.4.0 uv$", world.train_tasks, 0)


@pytest.mark.skipif(PYTHON is None, reason="COVEY_VERIFIERS_PYTHON names no Python with verifiers")
def test_an_error_while_loading_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "broken_v1.py").write_text("import json\n\njson.loads('no')\n")
    world = get_world(f"verifiers:taskset=broken_v1,python={PYTHON},path={tmp_path}")
    raises(DataError, f"JSONDecodeError: .* at {tmp_path / 'broken_v1.py'}:3$", world.train_tasks, 0)


WRONG = """
import verifiers.v1 as vf


class Data(vf.TaskData):
    does: str


class Wrong(vf.Task[Data]):
    async def setup(self, trace, runtime):
        if self.data.does == "setup":
            raise ValueError("no dice")

    @vf.reward
    async def one(self, trace: vf.Trace) -> float:
        if self.data.does == "score":
            raise ValueError("half a \\ud800 pair")
        if self.data.does == "other tokens":
            trace.nodes[-1].token_ids[0] += 1
        return 1.0


class Tasks(vf.Taskset[Wrong, vf.TasksetConfig]):
    def load(self):
        for does in ("nothing", "setup", "score", "other tokens"):
            yield Wrong(Data(prompt="Do " + does, does=does), self.config.task)


__all__ = ["Tasks"]
"""
TOOLS = """
import verifiers.v1 as vf


class Desk(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, a: int, b: int) -> str:
        return str(a + b)


class Sum(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config):
        return [Desk(vf.ToolsetConfig())]


class Tasks(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        yield Sum(vf.TaskData(prompt="Add 2 and 3."), self.config.task)


__all__ = ["Tasks"]
if __name__ == "__main__":
    Desk.run()
"""


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="COVEY_VERIFIERS_PYTHON names no Python with verifiers")
def test_tools_need_a_form_in_which_calls_are_written(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "desk_v1.py").write_text(TOOLS)
    world = f"verifiers:taskset=desk_v1,python={PYTHON},path={tmp_path}"
    run = build(settings | {"world": world, "max_conversation_tokens": 200, "beta": 0.0}, prompts_per_step=1)
    raises(EpisodeError, "the taskset has tools: add tool_parser=", run.rollout)
    run.close()


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="COVEY_VERIFIERS_PYTHON names no Python with verifiers")
def test_what_a_taskset_does_wrong_costs_its_own_episodes(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "wrong_v1.py").write_text(WRONG)
    (tmp_path / "sums_v1.py").write_text((EXAMPLES / "addsub_v1.py").read_text())
    world = f"verifiers:taskset=wrong_v1,eval_taskset=sums_v1,python={PYTHON},path={tmp_path}"
    run = build(settings | {"world": world, "max_conversation_tokens": 200, "beta": 0.0}, prompts_per_step=4)
    groups = run.rollout().groups
    run.close()
    found = {str(trajectory.error)[:60] for group in groups for trajectory in group.trajectories}
    assert len(found) == 4, found
    for words in ("^$", "TaskError: task setup: ValueError: no dice", "cannot be read", "are not what was sampled"):
        assert any(re.search(words, error) for error in found), words


def test_settings_of_other_worlds_are_refused(settings: Settings, python: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(python.parent))
    for change in ({"max_turns": 3}, {"failed_episodes": "score"}, {"system_prompt": "Be good."}):
        raises(ConfigError, next(iter(change)), build, playing(settings, python, "plays"), **change)
    build(playing(settings, python, "plays"), action_format="text", step_seconds=20.0).close()  # as a run writes them
    assert not list(python.parent.glob("covey-verifiers-*"))


@pytest.mark.skipif(PYTHON is None, reason="COVEY_VERIFIERS_PYTHON names no Python with verifiers")
@pytest.mark.parametrize(("taskset", "turns"), [slow("addsub_v1", 1), slow("guess_v1", 3)])
def test_the_examples_with_verifiers_itself(settings: Settings, taskset: str, turns: int) -> None:
    world = f"verifiers:taskset={taskset},python={PYTHON},path={EXAMPLES},max_turns={turns},num_eval=2"
    changes = {"world": world, "parallel_episodes": 4, "max_conversation_tokens": 600, "beta": 0.0}
    run = trained(settings | changes, max_steps=1, num_generations=2, prompts_per_step=2)
    (record,) = steps_of(run)
    run.close()
    assert record["agent/failed_episodes"] == 0
    assert 1 <= record["agent/turns"] <= turns
    assert record.get("sampling/sampling_logp_difference/max", 0.0) < 1e-3  # of a step that was not skipped
