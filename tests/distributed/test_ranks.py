"""Ranks: whole models have the same bits on any number of them, shards and slices what one process has.

The fixture `found` is one start of torchrun that is looked at in many ways: few cases on two ranks in `make test`, all
of them, on three ranks and on two machines too, among the slow ones.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import rank_cases
import sharded_cases
import slice_cases
import torch
from runs import HERE, assert_near, covey, ended_well, events, finished, kill_one, learned, torchrun, train
from tiny_models import tiny_model

from covey import GRPOConfig, GRPOTrainer
from covey.distributed import sharded_learner
from covey.distributed.ranks import Ranks
from covey.distributed.sharded_learner import parts, training_bytes
from covey.errors import CheckpointError, ConfigError, ModelError
from covey.files import folder_problem
from covey.pytorch.models.slices import ModelFiles, NotSlicedError, replace_parameters
from covey.training import launch
from covey.training.checkpoint import list_checkpoints, load_checkpoint
from covey.training.launch import RanksBackend
from fakes import ends, raises

SCRIPT = Path(__file__).parent / "rank_cases.py"
PAIR = ("tied, all weights", "untied, LoRA")
OTHERS: dict[str, Iterable[str]] = {"wrongly": ("",), "made": ("damaged", "odd")}


def cases(**kinds: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{kind}:{case}" for kind, names in kinds.items() for case in names)


FEW = cases(replicated=("grpo", "agents", "memory", "a fault"), sharded=PAIR, slices=PAIR, **OTHERS)
ALL = cases(replicated=rank_cases.CASES, sharded=sharded_cases.CASES, slices=slice_cases.CASES, **OTHERS)
SPLIT = cases(sharded=(*PAIR, "a moving reference"), wrongly=("",), slices=(*PAIR, "bfloat16, LoRA"))


class Found(NamedTuple):
    """What came out of cases on so many ranks, and the folder that they have written to."""

    world: int
    folder: Path
    cases: dict[str, dict[str, Any]]

    def of(self, kind: str) -> dict[str, Any]:
        return self.cases.get(kind, {})


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, FEW), id="few"),
        pytest.param((2, ALL), id="two", marks=pytest.mark.slow),
        pytest.param((3, cases(replicated=rank_cases.CASES) + SPLIT), id="three", marks=pytest.mark.slow),
        pytest.param((4, SPLIT), id="two machines", marks=pytest.mark.slow),
    ],
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    (world, cases), folder = request.param, tmp_path_factory.mktemp("found")
    slice_cases.write_models(folder / "models")
    ended_well(torchrun(world, SCRIPT, folder, *cases, MACHINE=str(world if world < 4 else 2)))
    return Found(world, folder, json.loads((folder / "found.json").read_text()))


def test_whole_models_have_the_same_bits_on_any_number_of_ranks(found: Found) -> None:
    for name, case in found.of("replicated").items():
        if name != "a fault":
            assert case["alone"]["steps"] >= 3
            assert case["together"] == case["alone"], name
        if name == "memory":  # ran out on one rank, and all began again with smaller packs
            assert case["together"]["budget"] == 50


def test_a_fault_on_another_rank_is_named_and_all_go_on(found: Found) -> None:
    if case := found.of("replicated").get("a fault"):
        (first, *rest), (alone, *others) = case["together"]["metrics"], case["alone"]["metrics"]
        assert first["error"].startswith(f"rank 1 of {found.world} failed: ArithmeticError: injected")
        assert alone["error"].startswith("injected")
        assert rest == others
        assert case["together"]["steps"] == case["alone"]["steps"] == 2


def test_loss_gradients_and_weights_are_those_of_one_process(found: Found) -> None:
    for name, case in found.of("sharded").items():
        near = 2e-2 if "bfloat16" in name else 1e-5
        assert case["sharded"], name
        assert case["part"] < 0.37 + 0.14 * (found.world != 3), name
        assert case["steps"] >= 3
        assert (case["packs"] == 1) == (name == "one pack")  # else five, which no number of ranks shares equally
        assert case["names"]
        for what in ("gradients", "metrics", "norm", "reference", "optimizer", "after"):
            assert case[what] < near, (name, what)
        # GPT-2's key biases have gradient 0, of which AdamW divides the rounding by itself
        assert case["policy"] < (1e-3 if "GPT-2" in name else near), name


def test_what_is_saved_is_whole_and_what_is_restored_has_the_same_bits(found: Found) -> None:
    for name, case in found.of("sharded").items():
        assert case["restored"] is True, name
        assert case["read"] is True, name
        assert case["saved"] is True or case["saved"] == 0.0, name
        assert case["merged"] == 0.0, name
        assert "belongs to another model" in case["refusal"]


def test_the_probe_sees_a_gradient_that_lacks_the_heads_part(found: Found) -> None:
    for wrong in found.of("wrongly").values():
        assert wrong["loss"] < 1e-6
        assert wrong["difference"] > 0.2
        assert "the gradient of model.embed_tokens.weight differs by" in wrong["said"]


def test_what_a_rank_has_written_is_checked(found: Found, tmp_path: Path) -> None:
    folder = tmp_path / "step_000003"
    shutil.copytree(found.folder / "untied, LoRA" / "checkpoints" / "step_000003", folder)
    _, other, *_ = sorted((folder / "shards").iterdir())
    content = other.read_bytes()
    other.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    raises(CheckpointError, "has changed since it was written", load_checkpoint, folder)
    other.unlink()
    raises(CheckpointError, "is missing", load_checkpoint, folder)


@pytest.mark.slow
def test_a_checkpoint_keeps_its_bits_on_two_one_three_and_two_ranks(tmp_path: Path) -> None:
    cases = ("tied, all weights", "untied, LoRA", "a moving reference")
    for world in (2, 1, 3, 2):
        ended_well(torchrun(world, SCRIPT, tmp_path, *(f"move:{case}" for case in cases)))
    for case in cases:
        paths = [tmp_path / case / str(number) / "step_000002" for number in range(4)]
        assert [(path / "shards").is_dir() for path in paths] == [True, False, True, True]
        first, *others = [load_checkpoint(path).tensors for path in paths]
        assert first["optimizer"]
        names = {name: set(group) for name, group in first.items()}
        for other in others:
            assert {name: set(group) for name, group in other.items()} == names
            assert all(torch.equal(group[n], other[name][n]) for name, group in first.items() for n in group)


@pytest.mark.slow
def test_all_end_when_memory_runs_out_on_one(tmp_path: Path) -> None:
    started, process = time.monotonic(), torchrun(2, SCRIPT, tmp_path, "fail:0")
    printed = finished(process)
    assert process.returncode != 0
    assert time.monotonic() - started < 250  # not by the deadline of 300 s
    for said in (
        "rank 0 of 2 failed beside others that wait for it",
        "OutOfMemoryError: injected;",
        "tokens_per_micro_batch=48: set a smaller optim.tokens_per_micro_batch",
        "and is not asked again",
    ):
        assert said in printed, printed[-3000:]


def test_what_is_not_served_is_named(settings: dict[str, Any]) -> None:
    for changes, message in (
        ({"max_staleness": 1}, "nothing is sampled ahead"),
        ({"autocast": "bfloat16"}, r"optim\.autocast='bfloat16': is not served"),
        ({"offload": True}, r"optim\.offload=True: is not served"),
        ({"optimizer": "adamw_8bit"}, r"optim\.optimizer='adamw_8bit': is not served"),
        ({"quantization": "nf4"}, r"model\.quantization='nf4': is not served"),
        ({"lora_dropout": 0.1}, r"model\.lora_dropout=0\.1: is not served"),
        ({"beta": 0.1, "kl_estimator": "exact", "use_peft": False}, r"algorithm\.kl_estimator='exact': is not served"),
    ):
        config = GRPOConfig(**(settings | changes), learner_kind="sharded")
        raises(ConfigError, message, RanksBackend(Ranks()).check, config)


def test_auto_shards_what_would_fill_the_memory(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config, cpu = GRPOConfig(**settings, use_peft=False, beta=0.04), torch.device("cpu")
    model = RanksBackend(Ranks()).make_policy(config).model
    needed = training_bytes(model, keeps_copy=True)
    numbers = sum(p.numel() for p in model.parameters())
    assert needed == numbers * (4 * (1 + 3 + 1) + 8)  # weights, gradients, moments, reference; the sum
    sharded, replicated = (config.replace(learner_kind=kind) for kind in ("sharded", "replicated"))
    for world, local_world, memory, over in (
        (2, 2, 1.1, 1),  # memory of a rank, in parts of what the training state needs in four fifths of it
        (2, 2, 0.9, 2),
        (4, 2, 0.9, 2),  # two ranks hold it together, each machine has a copy
        (4, 2, 0.51, 2),
        (4, 2, 0.49, 4),  # nor does a machine hold it
        (4, 1, 0.9, 4),
        (3, 2, 0.9, 3),  # two on one machine and one on another
    ):
        held = int(memory * local_world * needed / 0.8)
        monkeypatch.setattr(sharded_learner, "total_memory", lambda held=held: held)
        ranks: Any = SimpleNamespace(world=world, local_world=local_world, gather=lambda own, n=world: [own] * n)
        found = [parts(each, needed, cpu, ranks) for each in (config, sharded, replicated)]
        assert found == [over, over if over > 1 else local_world, 1], (world, local_world, memory)
        assert parts(sharded, needed, cpu, Ranks()) == 1


def test_slices_have_the_bits_of_whole_models(found: Found) -> None:
    for name, case in found.of("slices").items():
        for what in ("names", "trained", "weights", "buffers", "reference", "merged", "ends"):
            assert case[what] is True, (name, what)
        assert case["part"] < 0.37 + 0.14 * (found.world != 3), name
        assert case["scores"] < 1e-5, name
        assert case["runner"][0] == case["runner"][1], name
        assert case["drawn"][0] == case["drawn"][1], name
        assert case["resident"] <= 4, name


def test_a_damaged_weight_is_an_error_on_all_ranks_and_odd_files_are_read_whole(found: Found) -> None:
    if made := found.of("made"):
        assert sum("holds NaN or infinity; the file is damaged" in said for said in made["damaged"]) == found.world
        said = "each learner reads the whole model before it is sharded: it has no safetensors files"
        assert sum(said in each for each in made["odd"]) == 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama", tie_word_embeddings=False).save_pretrained(tmp_path / "model", max_shard_size="20KB")
    return tmp_path / "model"


def find(folder: Path, dtype: torch.dtype = torch.float32) -> ModelFiles:
    return ModelFiles.find(str(folder), dtype=dtype)


def test_a_hollow_model_has_shapes_and_no_memory(folder: Path) -> None:
    files = find(folder, torch.bfloat16)
    for parameter in files.hollow().parameters():
        assert parameter.dtype == torch.bfloat16
        assert not parameter.is_meta
        assert parameter.untyped_storage().nbytes() == 2
    assert files.read("lm_head.weight", (slice(90, 95), slice(0, 3))).shape == (5, 3)
    assert torch.equal(files.read("lm_head.weight", (slice(90, 95),)), files.read("lm_head.weight")[90:95])


def test_the_first_layers_have_one_of_each_type(tmp_path: Path) -> None:
    tiny_model("gemma3", num_layers=5).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["layer_types"] = ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert len(find(tmp_path).few_layers().model.layers) == 4


def test_tied_parameters_stay_tied() -> None:
    model = replace_parameters(tiny_model("llama"), lambda parameter: parameter.detach() + 1)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda name, tensor: {f"other.{name}": tensor}, "its files hold no "),
        (lambda name, tensor: {name: tensor[:-1].contiguous()}, " in its files, not "),
        (lambda name, tensor: {name: tensor.to(torch.int8)}, "of I8 in its files"),
    ],
)
def test_files_of_another_form_are_read_whole(folder: Path, edit: Any, message: str) -> None:
    slice_cases.change(folder, lambda tensors: tensors.update(edit(name := max(tensors), tensors.pop(name))))
    raises(NotSlicedError, message, find, folder)


def test_files_that_are_missing_or_damaged_are_left_to_whole_loading(folder: Path, tmp_path: Path) -> None:
    index = folder / "model.safetensors.index.json"
    for damage in ("{", '{"weight_map": {"a": "nowhere.safetensors"}}', '{"weight_map": 1}'):
        index.write_text(damage)
        raises(NotSlicedError, None, find, folder)
    index.unlink()
    raises(NotSlicedError, "no safetensors files", find, folder)
    raises(ModelError, "there is no such file or folder", find, tmp_path / "no where")


SHARDED = {"distributed.learner_kind": "sharded"}
TWO = {"distributed.learners": 2, "distributed.ray_address": "local"}


@pytest.fixture(scope="module")
def one(recipe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's run in one process, by itself."""
    run = tmp_path_factory.mktemp("one") / "run"
    ended_well(train(0, recipe_folder, run, **{"distributed.samplers": 0}))
    return run


@pytest.mark.slow
def test_one_command_starts_all_ranks_and_starts_them_again(recipe_folder: Path, one: Path, tmp_path: Path) -> None:
    process = train(0, recipe_folder, tmp_path / "run", **TWO)
    ranks, printed = kill_one(process, tmp_path / "run", rank=1)
    assert process.returncode == 0, printed
    assert "all are started again (1 of 3)" in printed
    assert all(map(ends, ranks))
    assert learned(tmp_path / "run", without=("samplers/",)) == learned(one, without=("samplers/",))


@pytest.mark.slow
def test_killed_on_two_ranks_the_command_goes_on_on_one(recipe_folder: Path, one: Path, tmp_path: Path) -> None:
    process = train(2, recipe_folder, tmp_path / "run")
    ranks, printed = kill_one(process, tmp_path / "run", rank=0)
    assert process.returncode != 0, printed
    assert all(map(ends, ranks)), "a rank outlives the run"
    ended_well(train(1, recipe_folder, tmp_path / "run"))
    assert learned(tmp_path / "run", without=("samplers/",)) == learned(one, without=("samplers/",))
    ended_well(covey("eval", tmp_path / "run"))  # needs no other ranks


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["model.model=/nowhere", 'rewards.functions=["/nowhere.py:f"]'])
def test_what_is_refused_is_said_once_and_not_started_again(recipe_folder: Path, tmp_path: Path, mistake: str) -> None:
    """By all ranks, or by rank 0 while the others are still loading."""
    settings = (f"run.output_dir={tmp_path / 'run'}", "distributed.learners=2", mistake, HERE)
    process = covey("train", recipe_folder / "recipe.toml", *settings)
    printed = finished(process)
    assert process.returncode == 2, printed
    assert "/nowhere" in printed[printed.rindex("covey: ") :]
    assert printed.count("covey: ") == 1
    assert "started again" not in printed


@pytest.mark.slow
def test_killed_on_two_ranks_a_run_in_shards_goes_on_on_one_and_on_three(recipe_folder: Path, tmp_path: Path) -> None:
    every = {"model.use_peft": "false", "optim.learning_rate": "0.001", "evaluation.load_best_model_at_end": "true"}
    ended_well(train(0, recipe_folder, tmp_path / "one", **every, **{"distributed.samplers": 0}))
    kill_one(train(2, recipe_folder, tmp_path / "run", **every, **SHARDED), tmp_path / "run", rank=0)
    shutil.copytree(tmp_path / "run", tmp_path / "before")
    for world in (1, 3):
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "before", tmp_path / "run")
        ended_well(train(world, recipe_folder, tmp_path / "run", **every, **SHARDED))
        assert "resumed" in (tmp_path / "run" / "events.jsonl").read_text()
        assert_near(tmp_path / "one", tmp_path / "run")


@pytest.mark.slow
def test_killed_at_each_moment_of_a_checkpoint(recipe_folder: Path, one: Path, tmp_path: Path) -> None:
    moments = "1 before its part,1 in its part,0 after its part,0 before the hashes,0 before the name"
    fault = {"FAULT": f"kill {tmp_path} {moments}"}
    process = train(2, recipe_folder, tmp_path / "run", "--max-restarts", "5", environment=fault, **SHARDED)
    ended_well(process, seconds=1200)  # six starts
    assert {path.name for path in tmp_path.glob("killed *")} == {f"killed {moment}" for moment in moments.split(",")}
    assert events(tmp_path / "run", "run").count("resumed at step 2") == 5
    assert_near(one, tmp_path / "run")
    assert all(folder_problem(path) == "" for path in list_checkpoints(tmp_path / "run" / "checkpoints"))


@pytest.mark.slow
def test_packs_are_halved_for_good_when_memory_runs_out(recipe_folder: Path, one: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = SHARDED | {"optim.tokens_per_micro_batch": 256, "environment": {"FAULT": "memory 1 70"}}
    printed = ended_well(train(2, recipe_folder, tmp_path / "run", "--max-restarts", "2", **more))
    assert_near(one, tmp_path / "run")
    said = events(tmp_path / "run", "memory")
    assert [each.rpartition("with ")[2] for each in said] == ["128", "64"]
    assert "memory ran out on rank 1 of 2 with tokens_per_micro_batch=128 (injected: " in said[1]
    assert all(printed.count(each) >= 1 for each in said)
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "step_000006").state["tokens_per_micro_batch"] == 64


@pytest.mark.slow
def test_one_command_halves_packs_too_and_says_when_that_is_no_help(recipe_folder: Path, tmp_path: Path) -> None:
    settings = TWO | SHARDED | {"distributed.max_restarts": 0, "optim.tokens_per_micro_batch": 128}
    process = train(0, recipe_folder, tmp_path / "run", environment={"FAULT": "memory 1 30"}, **settings)
    printed = finished(process)
    assert process.returncode == 2, printed
    assert "all are started again with packs of at most 64 tokens" in printed
    assert "tokens_per_micro_batch=64: set a smaller" in " ".join(printed[printed.rindex("covey: ") :].split())


def lengths(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


DATA: dict[str, Any] = {"reward_funcs": lengths, "train_dataset": [{"prompt": "say one: "}, {"prompt": "say two: "}]}


def test_several_learners_need_a_launcher(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"distributed\.learners=3: this is one process; .*--nproc-per-node 3"):
        GRPOTrainer(args=GRPOConfig(**settings, learners=3), **DATA)


SCRIPTS = """
import sys
import covey
from covey import trl
from covey.errors import ConfigError

model, folder = sys.argv[1:]
rows, reward = [{"prompt": "say one: "}], lambda completions, **columns: [0.0] * len(completions)
native, like_trl = covey.GRPOConfig(output_dir=folder), trl.GRPOConfig(folder, per_device_train_batch_size=8)
for make, args in ((covey.GRPOTrainer, native), (trl.GRPOTrainer, like_trl)):
    try:
        make(model, reward_funcs=reward, args=args, train_dataset=rows)
    except ConfigError as error:
        print("refused:", error)
"""


@pytest.mark.slow
def test_a_script_started_by_torchrun_is_told_how_to_train_on_several(model_folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS)
    printed = ended_well(torchrun(2, script, model_folder, tmp_path / "out"))
    why = "refused: WORLD_SIZE=2: torchrun or accelerate has started 2 processes, but a trainer made in Python"
    assert printed.count(why) == 4, printed
    assert "torchrun --nproc-per-node 2 -m covey train RECIPE" in printed
    assert not (tmp_path / "out").exists()


def test_learners_and_torchrun_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for world, learners, message in (
        ("1", 2, r"distributed\.learners=2: torchrun has started 1"),
        ("2", 1, "MASTER_ADDR='': torchrun sets them"),
        ("one", 1, "WORLD_SIZE='one'"),
    ):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", world)
        raises(ConfigError, message, launch.run, GRPOConfig(learners=learners))


def test_it_is_refused_before_ranks_are_started(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("ranks were started"))
    with pytest.raises(ConfigError, match="nothing is sampled ahead"):
        launch.start_ranks(GRPOConfig(**settings, learners=2, max_staleness=1), ["train"])


def test_an_optimiser_of_ones_own_is_refused(settings: dict[str, Any]) -> None:
    trainer = GRPOTrainer(args=GRPOConfig(**settings), backend=RanksBackend(Ranks()), **DATA)
    raises(ConfigError, "in one process only", trainer.learner.use_optimizer, None)
