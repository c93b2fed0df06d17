"""Learning in shards against one process; what is wrapped wrongly; ranks that fail; the command under torchrun."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import events
from test_ranks import finished, kill_one, started, torchrun, without_times

from covey import GRPOConfig
from covey.distributed import sharded_learner
from covey.distributed.ranks import Ranks
from covey.distributed.sharded_learner import parts, training_bytes
from covey.errors import CheckpointError, ConfigError
from covey.files import folder_problem
from covey.training.checkpoint import list_checkpoints, load_checkpoint
from covey.training.launch import RanksBackend

SCRIPT = Path(__file__).parent / "sharded_cases.py"
ON_THREE = ("tied, all weights", "untied, LoRA", "a moving reference")


@pytest.fixture(scope="module")
def by_world(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What `sharded_cases.py` found on two and three ranks, and on two machines with two ranks each."""
    found = {}
    for world, cases, environment in ((2, (), {}), (3, ON_THREE, {}), (4, ON_THREE, {"MACHINE": "2"})):
        file = tmp_path_factory.mktemp("sharded") / "found.json"
        process = torchrun(world, SCRIPT, file, *cases, **environment)
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
            assert case["part"] < 0.37 + 0.14 * (world != 3), name
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
                assert case["read"] is True, name
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
    assert "OutOfMemoryError: injected;" in printed
    assert "tokens_per_micro_batch=48: set a smaller optim.tokens_per_micro_batch" in printed
    assert rank > 0 or "and is not asked again" in printed


def train(
    ranks: int, recipe: Path, run: Path, *launcher: str, environment: dict[str, str] | None = None, **settings: Any
) -> Any:
    chosen = [f"{name}={value}" for name, value in settings.items()]
    command = ("-m", "covey", "train", recipe / "recipe.toml", f"run.output_dir={run}", *chosen)
    return torchrun(ranks, *launcher, *command, **(environment or {}))


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


@pytest.fixture(scope="module")
def one(recipe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's run in one process."""
    return unbroken(recipe_folder, tmp_path_factory.mktemp("one") / "run")


def test_the_launcher_starts_killed_ranks_again(recipe_folder: Path, one: Path, tmp_path: Path) -> None:
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
        ({"offload": True}, r"optim\.offload=True: is not served"),
        ({"optimizer": "adamw_8bit"}, r"optim\.optimizer='adamw_8bit': is not served"),
        ({"quantization": "nf4"}, r"model\.quantization='nf4': is not served"),
        ({"lora_dropout": 0.1}, r"model\.lora_dropout=0\.1: is not served"),
        ({"beta": 0.1, "kl_estimator": "exact", "use_peft": False}, r"algorithm\.kl_estimator='exact': is not served"),
    ],
)
def test_what_is_not_served_is_named(settings: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RanksBackend(Ranks()).check(GRPOConfig(**(settings | changes), learner_kind="sharded"))


class Machines:
    """Ranks that all have as much memory."""

    def __init__(self, world: int, local_world: int) -> None:
        self.world, self.local_world = world, local_world

    def gather(self, own: Any) -> list[Any]:
        return [own] * self.world


@pytest.mark.parametrize(
    ("world", "local_world", "memory", "over"),
    [
        (2, 2, 1.1, 1),  # memory of a rank, in parts of what the training state needs in four fifths of it
        (2, 2, 0.9, 2),
        (4, 2, 0.9, 2),  # two ranks hold it together, each machine has a copy
        (4, 2, 0.51, 2),
        (4, 2, 0.49, 4),  # nor does a machine hold it
        (4, 1, 0.9, 4),
        (3, 2, 0.9, 3),  # two on one machine and one on another
    ],
)
def test_auto_shards_what_would_fill_the_memory(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, world: int, local_world: int, memory: float, over: int
) -> None:
    config, cpu = GRPOConfig(**settings, use_peft=False, beta=0.04), torch.device("cpu")
    model = RanksBackend(Ranks()).make_policy(config).model
    needed = training_bytes(model, keeps_copy=True)
    numbers = sum(p.numel() for p in model.parameters())
    assert needed == numbers * (4 * (1 + 3 + 1) + 8)  # weights, gradients, moments, reference; the sum
    monkeypatch.setattr(sharded_learner, "total_memory", lambda: int(memory * local_world * needed / 0.8))
    ranks: Any = Machines(world, local_world)
    assert parts(config, needed, cpu, ranks) == over
    assert parts(config.replace(learner_kind="sharded"), needed, cpu, ranks) == (over if over > 1 else local_world)
    assert parts(config.replace(learner_kind="replicated"), needed, cpu, ranks) == 1
    assert parts(config.replace(learner_kind="sharded"), needed, cpu, Ranks()) == 1


@pytest.mark.parametrize("case", ["tied, all weights", "untied, LoRA", "a moving reference"])
def test_a_checkpoint_keeps_its_bits_on_two_one_three_and_two_ranks(tmp_path: Path, case: str) -> None:
    source = ""
    for number, world in enumerate((2, 1, 3, 2)):
        process = torchrun(world, SCRIPT, "move", case, source, tmp_path / str(number))
        printed = finished(process)
        assert process.returncode == 0, printed[-3000:]
        source = str(tmp_path / str(number) / "step_000002")
        assert (Path(source) / "shards").is_dir() == (world > 1)
    first, *others = [load_checkpoint(tmp_path / str(number) / "step_000002").tensors for number in range(4)]
    assert first["optimizer"]
    for other in others:
        assert {name: set(group) for name, group in other.items()} == {
            name: set(group) for name, group in first.items()
        }
        assert all(torch.equal(group[n], other[name][n]) for name, group in first.items() for n in group)


def test_what_a_rank_has_written_is_checked(tmp_path: Path) -> None:
    process = torchrun(2, SCRIPT, "move", "tied, LoRA", "", tmp_path)
    printed = finished(process)
    assert process.returncode == 0, printed[-3000:]
    folder = tmp_path / "step_000002"
    _, other = sorted((folder / "shards").iterdir())
    content = other.read_bytes()
    other.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        load_checkpoint(folder)
    other.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("rank", "moment"),
    [
        (1, "before its part"),
        (1, "in its part"),
        (0, "after its part"),
        (0, "before the hashes"),
        (0, "before the name"),
    ],
)
def test_killed_in_a_checkpoint(recipe_folder: Path, tmp_path: Path, rank: int, moment: str) -> None:
    one = unbroken(recipe_folder, tmp_path / "one")
    fault = {"FAULT": f"kill {rank} {moment} {tmp_path / 'killed'}"}
    process = train(2, recipe_folder, tmp_path / "run", "--max-restarts", "1", environment=fault, **SHARDED)
    printed = finished(process)
    assert process.returncode == 0, printed
    assert (tmp_path / "killed").exists()
    assert "resumed at step 2" in events(tmp_path / "run", "run")
    assert_near(one, tmp_path / "run")
    assert all(folder_problem(path) == "" for path in list_checkpoints(tmp_path / "run" / "checkpoints"))


def test_packs_are_halved_for_the_rest_of_the_run_when_memory_runs_out(
    recipe_folder: Path, one: Path, tmp_path: Path
) -> None:
    settings = SHARDED | {"optim.tokens_per_micro_batch": 256}
    fault = {"FAULT": "memory 1 70"}
    process = train(2, recipe_folder, tmp_path / "run", "--max-restarts", "2", environment=fault, **settings)
    printed = finished(process)
    assert process.returncode == 0, printed
    assert_near(one, tmp_path / "run")
    said = events(tmp_path / "run", "memory")
    assert [each.rpartition("with ")[2] for each in said] == ["128", "64"]
    assert "memory ran out on rank 1 of 2 with tokens_per_micro_batch=128 (injected: " in said[1]
    assert all(printed.count(each) >= 1 for each in said)
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "step_000006").state["tokens_per_micro_batch"] == 64


def test_one_command_halves_packs_too_and_says_when_that_is_no_help(recipe_folder: Path, tmp_path: Path) -> None:
    settings = SHARDED | {"distributed.learners": 2, "distributed.max_restarts": 0, "optim.tokens_per_micro_batch": 128}
    settings |= {"distributed.ray_address": "local"}
    chosen = [f"{name}={value}" for name, value in (settings | {"run.output_dir": tmp_path / "run"}).items()]
    command = [sys.executable, "-m", "covey", "train", recipe_folder / "recipe.toml", *chosen]
    process = started([str(part) for part in command], FAULT="memory 1 30")
    printed = finished(process)
    assert process.returncode == 2, printed
    assert "all are started again with packs of at most 64 tokens" in printed
    assert "tokens_per_micro_batch=64: set a smaller" in " ".join(printed[printed.rindex("covey: ") :].split())
