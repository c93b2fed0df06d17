"""`covey doctor`, called as a user would."""

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


def shows(covey: Command, status: int, *arguments: object) -> str:
    """What `covey doctor` prints, or says where it is used wrongly."""
    found, shown, told = covey("doctor", *arguments)
    assert found == status, told
    return told if status == 2 else shown


def test_a_run_is_judged_by_its_end(tmp_path: Path, covey: Command) -> None:
    well = run_of(tmp_path / "well", [{}] * 12)
    assert "12 steps, the last one 12\nnothing is wrong" in shows(covey, 0, well)
    ill = run_of(tmp_path / "ill", [{}] * 10 + [{"kl": 0.9}] * 10)
    shown = shows(covey, 1, ill)
    assert "kl_high, since step 11" in shown
    assert "the KL from the reference is 0.90 nats" in shown
    assert "Raise algorithm.beta" in shown
    better = run_of(tmp_path / "better", [{"kl": 0.9}] * 10 + [{"kl": 0.01}] * 20)
    assert "earlier: kl_high, steps 5 to 14" in shows(covey, 0, better)
    (one,) = json.loads(shows(covey, 1, ill, "--json"))["findings"]
    assert (one["code"], one["since"], one["until"], one["present"]) == ("kl_high", 11, 20, True)
    new = run_of(tmp_path / "new", [])
    assert shows(covey, 0, new) == f"{new}: 0 steps; there is nothing to judge yet\n"
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
    assert "not_finite" in shows(covey, 1, folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 47, "reward": "text"}\n')
    assert "line 47 is none of this file's lines; remove that line" in shows(covey, 2, folder)


def test_what_is_no_target(tmp_path: Path, covey: Command, recipe_folder: Path) -> None:
    assert "is neither the folder of a run" in covey("doctor", tmp_path / "none")[2]
    (tmp_path / "bad.toml").write_text("[[[")
    shows(covey, 2, tmp_path / "bad.toml")
    run = run_of(tmp_path / "run", [{}] * 6)
    assert "and settings go with a recipe" in covey("doctor", "--cluster", run)[2]
    assert "nothing of this run is placed on a Ray cluster" in shows(covey, 2, "--cluster", recipe_folder)
    assert "nothing.py" in shows(covey, 2, recipe_folder, "rewards.functions=nothing.py:f")


def test_a_recipe_is_tried(recipe_folder: Path, tmp_path: Path, covey: Command) -> None:
    shown = shows(
        covey, 1, recipe_folder, f"run.output_dir={tmp_path / 'run'}"
    )  # a random model never ends its answers
    for words in (
        *("data: 7 of 7 rows are prompts of", "3 held-out prompts", "completions_truncated\n"),
        *("Raise sampling.max_completion_length", "peak memory of the process", "6 steps with 3 evaluations"),
    ):
        assert words in shown
    assert shown.count("reward 0.") + shown.count("reward 1:") >= 3
    assert not (tmp_path / "run").exists()


def test_what_a_trial_finds(recipe_folder: Path, tmp_path: Path, covey: Command) -> None:
    (tmp_path / "zero.py").write_text("def zero(completions, **columns):\n    return [0.0] * len(completions)\n")
    shown = shows(covey, 1, recipe_folder, f"rewards.functions={tmp_path / 'zero.py'}:zero")
    assert "reward_never_nonzero" in shown
    assert "for every completion of the last 2 steps" in shown
    limits = ("data.max_prompt_length=9", "data.long_prompts=drop")
    found = json.loads(shows(covey, 1, recipe_folder, *limits, "--json"))
    assert found["findings"][0]["code"] == "prompts_left_out"
    assert "rows are left out: their prompts are too long" in found["findings"][0]["message"]
    assert found["steps"] == 6
    assert found["step_seconds"] == pytest.approx(sum(part["amount"] for part in found["seconds"]))
    # of several processes one is measured
    several = ("distributed.samplers=3", "distributed.learners=2", "distributed.groups_per_unit=1")
    shown = shows(covey, 1, recipe_folder, *several)
    assert "layout: 2 processes train (started by " in shown
    assert "), 3 Ray actors sample, in units of 1 x 4 completions" in shown
    assert "one step of one process" in shown
    assert "the run:" not in shown
    assert "covey doctor RECIPE" in covey("plan", recipe_folder)[2]
