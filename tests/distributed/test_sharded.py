"""Learning in shards against one process; what is wrapped wrongly; ranks that fail; the command under torchrun."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from test_ranks import finished, kill_one, torchrun, without_times

from covey import GRPOConfig
from covey.distributed import sharded_learner
from covey.distributed.launch import RanksBackend
from covey.distributed.ranks import Ranks
from covey.distributed.sharded_learner import learns_in_shards
from covey.errors import ConfigError
from covey.pytorch.policy import Policy

SCRIPT = Path(__file__).parent / "sharded_cases.py"
ON_THREE = ("tied, all weights", "untied, LoRA", "a moving reference")


@pytest.fixture(scope="module")
def by_world(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What `sharded_cases.py` found on two and three ranks."""
    found = {}
    for world, cases in ((2, ()), (3, ON_THREE)):
        file = tmp_path_factory.mktemp("sharded") / "found.json"
        process = torchrun(world, SCRIPT, file, *cases)
        printed = finished(process)
        assert process.returncode == 0, printed[-3000:]
        found[world] = json.loads(file.read_text())
    return found


def test_loss_gradients_and_weights_are_those_of_one_process(by_world: dict[int, dict[str, Any]]) -> None:
    for world, cases in by_world.items():
        assert len(cases) > len(ON_THREE)
        for name, case in cases.items():
            if name == "wrong":
                continue
            near = 2e-2 if "bfloat16" in name else 1e-5
            assert case["sharded"], name
            assert case["part"] < 0.37 + 0.14 * (world == 2), name
            assert case["steps"] >= 3
            assert (case["packs"] == 1) == (name == "one pack")  # else five, which no number of ranks shares equally
            assert case["names"]
            for what in ("gradients", "metrics", "norm", "reference", "optimizer", "after"):
                assert case[what] < near, (world, name, what)
            # GPT-2's key biases have gradient 0, of which AdamW divides the rounding by itself
            assert case["policy"] < (1e-3 if "GPT-2" in name else near), (world, name)


def test_what_is_saved_is_whole_and_what_is_restored_has_the_same_bits(by_world: dict[int, dict[str, Any]]) -> None:
    for cases in by_world.values():
        for name, case in cases.items():
            if name != "wrong":
                assert case["restored"] is True, name
                assert case["saved"] is True or case["saved"] == 0.0, name
                assert case["merged"] == 0.0, name
                assert "belongs to another model" in case["refusal"]


def test_the_probe_sees_a_gradient_that_lacks_the_heads_part(by_world: dict[int, dict[str, Any]]) -> None:
    for cases in by_world.values():
        wrong = cases["wrong"]
        assert wrong["loss"] < 1e-6
        assert wrong["difference"] > 0.2
        assert "the gradient of model.embed_tokens.weight differs by" in wrong["said"]


@pytest.mark.parametrize("rank", [0, 1])
def test_all_end_when_memory_runs_out_on_one(rank: int) -> None:
    started = time.monotonic()
    process = torchrun(2, SCRIPT, "fail", rank)
    printed = finished(process)
    assert process.returncode != 0
    assert time.monotonic() - started < 250  # not by the deadline of 300 s
    assert f"rank {rank} of 2 failed beside others that wait for it" in printed, printed[-3000:]
    assert "OutOfMemoryError: injected; set a smaller optim.tokens_per_micro_batch" in printed
    assert rank > 0 or "and is not asked again" in printed


def train(ranks: int, recipe: Path, run: Path, *launcher: str, **settings: Any) -> Any:
    chosen = [f"{name}={value}" for name, value in settings.items()]
    command = ("-m", "covey", "train", recipe / "recipe.toml", f"run.output_dir={run}", *chosen)
    return torchrun(ranks, *launcher, *command)


def assert_near(one: Path, other: Path) -> None:
    pairs = zip(without_times(one), without_times(other), strict=True)
    for mine, theirs in pairs:
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            if isinstance(value, float):
                assert theirs[name] == pytest.approx(value, rel=1e-3, abs=1e-4), (mine["step"], name)


SHARDED = {"distributed.learner_kind": "sharded"}
ALL = {"model.use_peft": "false", "optim.learning_rate": "0.001", "evaluation.load_best_model_at_end": "true"}


def unbroken(recipe: Path, run: Path, **settings: Any) -> Path:
    process = train(1, recipe, run, **settings)
    printed = finished(process)
    assert process.returncode == 0, printed
    return run


def test_the_launcher_starts_killed_ranks_again(recipe_folder: Path, tmp_path: Path) -> None:
    one = unbroken(recipe_folder, tmp_path / "one")
    process = train(2, recipe_folder, tmp_path / "run", "--max-restarts", "1", **SHARDED)
    try:
        kill_one(process, tmp_path / "run", rank=1)
    finally:
        printed = finished(process)
    assert process.returncode == 0, printed
    assert_near(one, tmp_path / "run")


def test_killed_on_two_ranks_a_run_goes_on_on_one_and_on_three(recipe_folder: Path, tmp_path: Path) -> None:
    one = unbroken(recipe_folder, tmp_path / "one", **ALL)
    process = train(2, recipe_folder, tmp_path / "run", **ALL, **SHARDED)
    try:
        kill_one(process, tmp_path / "run", rank=0)
    finally:
        finished(process)
    shutil.copytree(tmp_path / "run", tmp_path / "before")
    for world in (1, 3):
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "before", tmp_path / "run")
        process = train(world, recipe_folder, tmp_path / "run", **ALL, **SHARDED)
        printed = finished(process)
        assert process.returncode == 0, printed
        assert "resumed" in (tmp_path / "run" / "events.jsonl").read_text()
        assert_near(one, tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"autocast": "bfloat16"}, r"optim\.autocast='bfloat16': is not served"),
        ({"lora_dropout": 0.1}, r"model\.lora_dropout=0\.1: is not served"),
        ({"samplers": 1}, r"distributed\.samplers=1: is not served"),
        ({"beta": 0.1, "kl_estimator": "exact", "use_peft": False}, r"algorithm\.kl_estimator='exact': is not served"),
    ],
)
def test_what_is_not_served_is_named(settings: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RanksBackend(Ranks()).check(GRPOConfig(**(settings | changes), learner_kind="sharded"))


class TwoRanks:
    """Of which the other one has as much memory."""

    world, local_world = 2, 2

    def gather(self, own: Any) -> list[Any]:
        return [own, own]


@pytest.mark.parametrize(("factor", "sharded"), [(0.9, True), (1.1, False)])
def test_auto_shards_what_would_fill_the_memory(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, factor: float, sharded: bool
) -> None:
    config = GRPOConfig(**settings, use_peft=False, beta=0.04)
    policy = RanksBackend(Ranks()).make_policy(config)
    assert isinstance(policy, Policy)
    numbers = sum(p.numel() for p in policy.model.parameters())
    needed = numbers * (4 * (1 + 3 + 1) + 8)  # weights, gradients, moments, reference; the sum
    monkeypatch.setattr(sharded_learner, "total_memory", lambda: int(factor * 2 * needed / 0.8))
    ranks: Any = TwoRanks()
    assert learns_in_shards(config, policy, ranks) is sharded
    assert learns_in_shards(config.replace(learner_kind="sharded"), policy, ranks)
    assert not learns_in_shards(config.replace(learner_kind="replicated"), policy, ranks)
    assert not learns_in_shards(config.replace(learner_kind="sharded"), policy, Ranks())
