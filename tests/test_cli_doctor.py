"""`covey doctor` and what `covey plan` says of several processes, called as a user would."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from command import Command
from covey.observe.doctor import diagnose, findings
from covey.observe.run_folder import RunFolder

GOOD = {"reward_std": 0.3, "frac_reward_zero_std": 0.1, "grad_norm": 0.5, "loss": 0.1, "completions/mean_length": 9.0}


def run_of(path: Path, records: list[dict[str, Any]]) -> Path:
    with RunFolder.create(path) as folder:
        for step, record in enumerate(records, 1):
            folder.append_metrics(step, GOOD | {"reward": 0.4 + 0.01 * (step % 7)} | record)
    return path


def test_a_run_is_judged_by_its_end(tmp_path: Path, covey: Command) -> None:
    well = run_of(tmp_path / "well", [{}] * 12)
    status, shown, _ = covey("doctor", well)
    assert status == 0
    assert "12 steps, the last one 12\nnothing is wrong" in shown
    ill = run_of(tmp_path / "ill", [{}] * 10 + [{"kl": 0.9}] * 10)
    status, shown, _ = covey("doctor", ill)
    assert status == 1
    assert "kl_high, since step 11" in shown
    assert "the KL from the reference is 0.90 nats" in shown
    assert "Raise algorithm.beta" in shown
    better = run_of(tmp_path / "better", [{"kl": 0.9}] * 10 + [{"kl": 0.01}] * 20)
    status, shown, _ = covey("doctor", better)
    assert status == 0
    assert "earlier: kl_high, steps 5 to 14" in shown
    found = json.loads(covey("doctor", ill, "--json")[1])
    assert [(one["code"], one["since"], one["until"], one["present"]) for one in found["findings"]] == [
        ("kl_high", 11, 20, True)
    ]


def test_a_run_that_has_just_begun(tmp_path: Path, covey: Command) -> None:
    assert covey("doctor", run_of(tmp_path / "new", []))[:2] == (
        0,
        f"{tmp_path / 'new'}: 0 steps; there is nothing to judge yet\n",
    )
    assert "as far as so few steps say" in covey("doctor", run_of(tmp_path / "three", [{}] * 3))[1]


ODD = [1e308, -1e308, 10**400, float("nan"), float("inf"), None, "text", True, [1], {}, 5e-324]


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_no_number_breaks_the_doctor(odd: Any) -> None:
    for name in [*GOOD, "reward", "kl", "time/samplers_waiting", "mask/x", "learning_rate", "step"]:
        history = [{"step": step, **GOOD, "reward": 0.4, "time/sampling": 1e-300} | {name: odd} for step in range(40)]
        for one in [*diagnose(history), *(finding.diagnosis for finding in findings(history))]:
            assert one.message
    broken = [{"loss": odd, "reward": 0.1 * step} for step in range(12)]
    number = isinstance(odd, int | float) and not isinstance(odd, bool)
    bad = odd is None or (number and not (abs(odd) < 1e100 and math.isfinite(odd)))
    assert ("not_finite" in [one.code for one in diagnose(broken)]) == bad


def test_numbers_as_large_as_they_get(tmp_path: Path, covey: Command) -> None:
    odd = [{"reward": 1e308}, {"reward": -1e308, "kl": 1e308}, {"grad_norm": None}, {"reward": 10**308, "x": {"y": 1}}]
    folder = run_of(tmp_path / "run", [*([{}] * 6), *odd * 10])
    status, shown, _ = covey("doctor", folder)
    assert status == 1
    assert "not_finite" in shown
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 47, "reward": "text"}\n')
    status, _, told = covey("doctor", folder)
    assert status == 2
    assert "line 47 is none of this file's lines; remove that line" in told


def test_what_is_no_target(tmp_path: Path, covey: Command, recipe_folder: Path) -> None:
    assert "is neither the folder of a run" in covey("doctor", tmp_path / "none")[2]
    (tmp_path / "bad.toml").write_text("[[[")
    assert covey("doctor", tmp_path / "bad.toml")[0] == 2
    run = run_of(tmp_path / "run", [{}] * 6)
    assert "--cluster and settings go with a recipe" in covey("doctor", "--cluster", run)[2]
    status, _, told = covey("doctor", "--cluster", recipe_folder)
    assert status == 2
    assert "nothing of this run is placed on a Ray cluster" in told


def test_a_recipe_is_tried(recipe_folder: Path, tmp_path: Path, covey: Command) -> None:
    status, shown, _ = covey("doctor", recipe_folder, f"run.output_dir={tmp_path / 'run'}")
    assert status == 1  # a random model never ends its answers
    assert "data: 7 of 7 rows are prompts of" in shown
    assert "3 held-out prompts" in shown
    assert shown.count("reward 0.") + shown.count("reward 1:") >= 3
    assert "completions_truncated\n" in shown
    assert "Raise sampling.max_completion_length" in shown
    assert "memory by formula" in shown
    assert not (tmp_path / "run").exists()
    status, _, told = covey("doctor", recipe_folder, "rewards.functions=nothing.py:f")
    assert status == 2
    assert "nothing.py" in told


def test_rewards_that_are_all_equal_are_found(recipe_folder: Path, tmp_path: Path, covey: Command) -> None:
    (tmp_path / "zero.py").write_text("def zero(completions, **columns):\n    return [0.0] * len(completions)\n")
    status, shown, _ = covey("doctor", recipe_folder, f"rewards.functions={tmp_path / 'zero.py'}:zero")
    assert status == 1
    assert "reward_never_nonzero" in shown
    assert "for every completion of the last 2 steps" in shown


def test_rows_that_are_left_out_are_found(recipe_folder: Path, covey: Command) -> None:
    limits = ("data.max_prompt_length=9", "data.long_prompts=drop")
    status, shown, told = covey("doctor", recipe_folder, *limits)
    assert status == 1, told
    assert "prompts_left_out" in shown
    assert "rows are left out: their prompts are too long" in shown


def test_a_plan_of_several_processes_measures_one(recipe_folder: Path, covey: Command) -> None:
    several = ("distributed.samplers=3", "distributed.learners=2", "distributed.groups_per_unit=1")
    status, shown, told = covey("plan", recipe_folder, *several)
    assert status == 0, told
    assert "layout: 2 processes train (started by " in shown
    assert "), 3 Ray actors sample, in units of 1 x 4 completions" in shown
    assert shown.index("each of 3 samplers") < shown.index("one step of one process")
    assert "a sync: 0.0 MB to each of 3" in shown
    found = json.loads(covey("plan", recipe_folder, *several, "--json")[1])
    learner, sampler = found["forecast"]["processes"]
    assert (learner["count"], sampler["count"]) == (2, 3)
    assert [part["name"] for part in learner["learning"]][-1] == "exact sum of gradients"
    assert not learner["sampling"]
    assert found["forecast"]["receivers"] == 3
