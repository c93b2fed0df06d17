"""Runs that are killed (SIGKILL) and resumed, or whose steps are done again, give the same numbers bit for bit."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from training_runs import HOUSE, ROWS, Settings, few_vowels, rewarding, same_weights, steps_of
from typer.testing import CliRunner

from command import Command
from covey import GRPOConfig, GRPOTrainer
from covey.cli.app import app
from covey.distributed.ranks import Ranks
from covey.errors import CheckpointError, ConfigError, RunFolderError
from covey.files import publishing
from covey.observe.folder_lock import FolderLock
from covey.observe.run_folder import RunFolder
from covey.training.launch import RanksBackend
from covey.training.replay import Report, replay
from fakes import SMALL, raises, slow

# Sleeps where it is told to, so that the kill lands in the phase that is tested.
DRIVER = """
import itertools, sys, time
from covey.cli.app import main
from covey.rollout import collect
from covey.training import checkpoint
from covey.pytorch import learner

where, at = sys.argv[1], int(sys.argv[2])
owner, name = {
    "sampling": (collect.AnswerCollector, "__call__"),
    "update": (learner.Learner, "optim_step"),
    "checkpoint": (checkpoint, "_save_group"),
}[where]
calls, function = itertools.count(1), getattr(owner, name)

def paused(*args, **kwargs):
    if next(calls) == at:
        print("PAUSED", flush=True)
        time.sleep(60)
    return function(*args, **kwargs)

setattr(owner, name, paused)
sys.argv = ["covey", *sys.argv[3:]]
main()
"""
VOLATILE = ("agent/waiting_share", "eval/agent/waiting_share", "time/", "memory/", "step_time", "eval/seconds")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ARCHIVE = Path(__file__).parents[1] / "fixtures" / "run-of-0.1.0.tar.gz"
"""Two runs of four steps by version 0.1.0 that were stopped after the checkpoint of step 2 (single answers, and agents
in the house), what their last two steps gave, and that version's recipes."""
STEP_4, AFTER_4 = "batches/step_000004.parquet", "weights after step 4 against its checkpoint"
Change = Callable[[Any], Any]
varied = rewarding("varied", lambda text: len(set(text)) / 8 if text else None)


def run(*arguments: object) -> str:
    """A command in this process, where everything is imported already; only what is killed needs its own."""
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def killed(where: str, at: int, *arguments: object) -> None:
    """A command in a process of its own, which is killed at its `at`-th time in a phase."""
    command = [sys.executable, "-c", DRIVER, where, *map(str, (at, *arguments))]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as it:
        try:
            assert it.stdout.readline().strip() == "PAUSED"
        finally:
            it.kill()


def numbers(folder: Path) -> list[dict[str, Any]]:
    records = RunFolder.read(folder).read_metrics()
    return [{k: v for k, v in record.items() if not k.startswith(VOLATILE)} for record in records]


@pytest.fixture(scope="module")
def unbroken(recipe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    run("train", recipe_folder, f"run.output_dir={folder}")
    return folder


# The checkpoint of step 4 (its second file), the third sampling, and the update of step 5.
@pytest.mark.parametrize(("where", "at"), [("checkpoint", 5), slow("sampling", 3), slow("update", 5)])
def test_a_killed_run_resumes_exactly(where: str, at: int, recipe_folder: Path, unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed(where, at, "train", recipe_folder, f"run.output_dir={folder}")
    assert not (folder / "adapter").exists()
    run("resume", folder)
    assert numbers(folder) == numbers(unbroken)
    assert same_weights(*(load_file(each / "adapter" / "adapter_model.safetensors") for each in (folder, unbroken)))


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
def test_killed_at_random_moments_again_and_again(recipe_folder: Path, unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for delay in (0.3, 1.1, 0.7, 1.6):
        arguments = ("resume", folder) if folder.exists() else ("train", recipe_folder, f"run.output_dir={folder}")
        before, end = len(lines_of(folder / "events.jsonl")), time.monotonic() + 60
        command = [sys.executable, "-m", "covey", *map(str, arguments)]
        with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL) as process:
            while len(lines_of(folder / "events.jsonl")) <= before and time.monotonic() < end:
                time.sleep(0.02)  # until it has started or resumed
            time.sleep(delay)
            process.kill()
    run("resume", folder)
    assert numbers(folder) == numbers(unbroken)


def test_a_finished_run_resumes_to_itself_and_a_corrupt_checkpoint_falls_back(unbroken: Path, tmp_path: Path) -> None:
    assert [json.loads(line)["step"] for line in lines_of(unbroken / "metrics.jsonl")] == [0, 1, 2, 3, 3, 4, 5, 6, 6]
    folder = Path(shutil.copytree(unbroken, tmp_path / "run"))
    run("resume", folder)
    assert numbers(folder) == numbers(unbroken)
    last = folder / "checkpoints" / "step_000006" / "policy.safetensors"
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    run("resume", folder)
    assert numbers(folder) == numbers(unbroken)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    for path in (*folder.rglob("*.toml"), *folder.rglob("adapter_config.json")):
        path.write_text(path.read_text().replace("/tmp/FIXTURE", str(folder)))  # where it was when they were written
    return folder


@pytest.mark.parametrize("names", [("run", "adapter", "metrics"), ("agents", "agents", "agents_metrics")])
def test_a_run_of_an_earlier_version_resumes_to_its_numbers(earlier: Path, names: tuple[str, str, str]) -> None:
    name, weights, metrics = names
    run("resume", earlier / name)
    ours = load_file(earlier / name / "adapter/adapter_model.safetensors")
    theirs = load_file(earlier / f"expected/{weights}.safetensors")
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)  # another processor rounds otherwise
    before = [line for line in map(json.loads, lines_of(earlier / f"expected/{metrics}.jsonl")) if "loss" in line]
    after = steps_of(earlier / name)
    assert [record["step"] for record in after] == [1, 2, 3, 4]
    for number in ("loss", "grad_norm", "reward"):
        assert [r[number] for r in after] == pytest.approx([r[number] for r in before], rel=1e-3, abs=1e-6)


def test_adapters_and_recipes_of_an_earlier_version_are_loaded(earlier: Path) -> None:
    run("sample", earlier / "model", "say one: ", "--adapter", earlier / "run" / "adapter")
    recipes = list((earlier / "recipes").rglob("*.toml"))
    assert len(recipes) == 12
    for path in recipes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = GRPOConfig.from_toml(path)
        assert GRPOConfig(**config.to_dict()) == config, path


def train(folder: Path, model: Path, *, backend: Any = None, **settings: Any) -> Path:
    """A run of four steps with checkpoints after the second and the last."""
    four = {"max_steps": 4, "save_steps": 2, "model": str(model), "output_dir": str(folder)}
    args = GRPOConfig(**(SMALL | four | settings))
    given = {} if args.environment.world else {"reward_funcs": [few_vowels, varied], "train_dataset": ROWS}
    GRPOTrainer(args=args, backend=backend, **given).train()
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("replayed") / "run"
    return train(folder, model_folder, beta=0.04, reward_weights=[1.0, 0.5], ledger="all")


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """A copy of a run, elsewhere, to be changed."""
    return Path(shutil.copytree(finished, tmp_path / "copied"))


def wrong(report: Report) -> list[str]:
    return [check.name for check in report.checks if check.wrong]


def is_exact(report: Report) -> bool:
    assert wrong(report) == []
    return report.exact


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return list(pq.read_table(path).to_pylist())


def change_rows(path: Path, change: Change) -> None:
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path, store_schema=False)


def test_a_step_is_what_was_recorded_bit_for_bit_and_the_folder_is_left_alone(finished: Path, copy: Path) -> None:
    lock = FolderLock(finished)  # as a run in progress holds it
    before = snapshot(finished)
    try:
        report = replay(finished, 4, tolerance=0)
        assert snapshot(finished) == before
    finally:
        lock.release()
    names = {check.name: check.compared for check in report.checks}
    assert is_exact(report)
    assert report.agrees
    assert min(names["metrics of step 3, done again on the way"], names[AFTER_4]) > 10
    assert "weights: checkpoints/step_000002" in report.notes
    assert set(report.numbers) >= {"loss", "grad_norm", "kl", "learning_rate"}
    assert replay(finished).step == 4
    shutil.rmtree(copy / "checkpoints" / "step_000002")  # from the beginning: steps 1 to 3 are done again
    whole = replay(copy, 4, tolerance=0)
    assert whole.exact
    assert "metrics of step 1, done again on the way" in {check.name for check in whole.checks}
    rows = rows_of(finished / "completions" / "step_000001.parquet")
    for row in rows:
        rewards = [other["reward"] for other in rows if other["group"] == row["group"]]
        assert (row["group_mean"], row["group_std"]) == pytest.approx((np.mean(rewards), np.std(rewards)))
        assert row["group_tied"] == (len(set(rewards)) == 1)


EXACT: list[Settings] = [
    {"max_generations": 12, "down_sampling": "max_variance:3"},
    {"dynamic_sampling": 3, "adaptive_entropy": {}, "entropy_coef": 0.1, "adv_estimator": "remax"},
    {
        **{"use_peft": False, "beta": 0.1, "reference_ema_decay": 0.99, "reference_update_steps": 1},
        **{"kl_estimator": "exact", "adv_estimator": "optimal_token_baseline"},
    },
    {"max_staleness": 1, "lr_scheduler_type": "linear", "loss_type": "gspo", "save_steps": 0},
    {
        **{"num_iterations": 2, "num_minibatches": 2, "importance_sampling_correction": "token_truncate"},
        **{"top_k": 5, "keep_sampling_mask": True, "validity_min_length": 3},
        **{"off_policy_mask_threshold": 0.5, "top_entropy_quantile": 0.5, "lora_dropout": 0.1},
    },
]


@pytest.mark.parametrize("settings", [*map(slow, EXACT[:-1]), EXACT[-1]], ids=lambda settings: next(iter(settings)))
def test_whatever_was_trained_with(settings: Settings, tmp_path: Path, model_folder: Path) -> None:
    assert is_exact(replay(train(tmp_path / "run", model_folder, **settings), 4, tolerance=0))


def test_several_ranks_add_up_to_what_one_process_adds_up(tmp_path: Path, model_folder: Path) -> None:
    """And the ledger of some groups has no others, and is chosen the same way again."""
    settings = {"ledger": "sampled:1,all:4", "prompts_per_step": 3}
    run = train(tmp_path / "run", model_folder, backend=RanksBackend(Ranks()), **settings)
    assert json.loads(rows_of(run / STEP_4)[0]["facts"])["learner"] != "Learner"
    assert replay(run, 4, tolerance=0).exact
    groups = [len({row["group"] for row in rows_of(run / "ledger" / f"step_{n:06d}.parquet")}) for n in (1, 2, 3, 4)]
    assert groups[:3] == [1, 1, 1]
    assert groups[3] > 1
    assert replay(run, 3, tolerance=0).exact
    raises(ConfigError, r"run\.ledger='some': must be one of off, sampled:N", GRPOConfig, ledger="some")


@pytest.mark.slow
@pytest.mark.parametrize("context", [{}, {"history_length": 1}], ids=["growing", "steps"])
def test_agents(context: Settings, tmp_path: Path, model_folder: Path) -> None:
    settings = HOUSE | context | {"invalid_action_penalty": 0.1, "max_steps": 2, "adv_estimator": "gigpo"}
    run = train(tmp_path / "run", model_folder, **settings)
    assert is_exact(replay(run, 2, tolerance=0))
    for row in rows_of(run / "completions" / "step_000002.parquet"):
        assert row["reward"] == pytest.approx(row["rewards/world"] + row["rewards/invalid_actions"])
        assert row["reward"] == pytest.approx(sum(json.loads(row["turn_rewards"])))
        assert (len(json.loads(row["turn_advantages"])), row["masked_by"], row["logp"] <= 0) == (row["turns"], "", True)
    change_rows(run / "batches" / "step_000002.parquet", lambda rows: rows[0]["turns"][0].update(reward=5.0))
    assert "metrics" in wrong(replay(run, 2))


def edit_batch(step: int, change: Change) -> Change:
    return lambda run: change_rows(run / "batches" / f"step_{step:06d}.parquet", change)


def other_part(rows: list[dict[str, Any]]) -> None:
    rows[0]["rewards/few_vowels"] += 0.5


def other_token(rows: list[dict[str, Any]]) -> None:
    ids = rows[3]["episodes"][0]["token_ids"]
    ids[-1] = (ids[-1] + 1) % 20


def huge_token(rows: list[dict[str, Any]]) -> None:
    rows[0]["episodes"][0]["token_ids"][0] = 2**31 - 1


def edit_line(name: str, factor: float) -> Change:
    def change(run: Path) -> None:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        lines[3][name] *= factor
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    return change


def edit_weight(step: int, *, hashed_anew: bool) -> Change:
    def change(run: Path) -> None:
        folder = run / "checkpoints" / f"step_{step:06d}"
        tensors = load_file(folder / "policy.safetensors")
        tensors[min(name for name in tensors if "lora_B" in name)].view(-1)[0] += 0.01
        if not hashed_anew:
            save_file(tensors, folder / "policy.safetensors", metadata={"aliases": "{}"})
            return
        with publishing(folder) as aside:
            for path in folder.iterdir():
                if path.name != "COMPLETE":
                    shutil.copy(path, aside)
            save_file(tensors, aside / "policy.safetensors", metadata={"aliases": "{}"})

    return change


CHANGES: dict[str, tuple[Change, set[str]]] = {
    "reward": (edit_batch(4, other_part), {"metrics", AFTER_4}),
    "token": (edit_batch(4, other_token), {"metrics", AFTER_4}),
    "earlier step": (edit_batch(3, other_part), {"metrics", AFTER_4}),
    "loss": (edit_line("loss", 1.01), {"metrics"}),
    "grad_norm": (edit_line("grad_norm", 1.01), {"metrics"}),
    "weight before": (edit_weight(2, hashed_anew=True), {"metrics of step 3, done again on the way"}),
    "damaged weight before": (edit_weight(2, hashed_anew=False), {"checkpoints", AFTER_4.replace("4", "2")}),
    "weight": (edit_weight(4, hashed_anew=True), {AFTER_4}),
    "damaged weight": (edit_weight(4, hashed_anew=False), {AFTER_4}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_is_found(copy: Path, name: str) -> None:
    change, found = CHANGES[name]
    change(copy)
    report = replay(copy, 4)
    assert not report.agrees
    assert found <= set(wrong(report))
    if len(found) == 1 and "way" not in next(iter(found)):
        assert set(wrong(report)) == found


def test_steps_that_are_missing_or_cannot_be_reached(copy: Path, tmp_path: Path, model_folder: Path) -> None:
    run = train(tmp_path / "run", model_folder, keep_batches=False, max_steps=1)
    assert not (run / "batches").exists()
    raises(RunFolderError, r"run\.keep_batches=true", replay, run, 1)
    raises(RunFolderError, "step 9 is not in batches/, which has 4 steps from 1 to 4", replay, copy, 9)
    (copy / "batches" / "step_000003.parquet").unlink()
    unreached = r"step 4 is reached from the weights after step 2.* 3 of the steps between"
    raises(CheckpointError, unreached, replay, copy, 4)
    with pytest.raises(ConfigError, match=r"run\.seed=1: a step is computed again with the settings that it had"):
        replay(copy, 2, ["run.seed=1"])


def first_episode(**values: Any) -> Change:
    return edit_batch(4, lambda rows: rows[0]["episodes"][0].update(values))


DAMAGE: dict[str, tuple[Change, str]] = {
    "zeros": (lambda run: (run / STEP_4).write_bytes(b"PAR1" + bytes(200)), "is damaged"),
    "a bit": (lambda run: flip(run / STEP_4), "is damaged"),
    "columns": (lambda run: pq.write_table(pa.table({"group": [0]}), run / STEP_4), "is damaged"),
    "step": (lambda run: shutil.copy(run / STEP_4.replace("4.", "2."), run / STEP_4), "it is of step 2, not of 4"),
    "runs": (first_episode(runs=[3, 1]), "is damaged"),
    "order": (edit_batch(4, lambda rows: rows.reverse()), "is damaged"),
    "facts": (edit_batch(4, lambda rows: rows[0].update(facts='{"format": 1}')), "is damaged"),
    "depth": (edit_batch(4, lambda rows: rows[0].update(facts="[" * 100_000)), "is damaged"),
    "token": (edit_batch(4, huge_token), "has the token id 2147483647"),
}


def flip(path: Path) -> None:
    """Change one bit of the first page."""
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_batch_is_one_clear_error(copy: Path, name: str) -> None:
    change, said = DAMAGE[name]
    change(copy)
    raises(RunFolderError, said, replay, copy, 4)


def test_the_command(copy: Path, tmp_path: Path, covey: Command) -> None:
    moved = shutil.copytree(GRPOConfig.from_toml(copy / "config.toml").model.model, tmp_path / "moved")
    out = covey.done("doctor", copy, "--step", 4, f"model.model={moved}")
    assert "step 4 equals the recorded step, bit for bit" in out
    told = json.loads(covey.done("doctor", copy, "--step", 4, "--json"))
    assert told["agrees"] is told["exact"] is True
    assert told["metrics"]["loss"]["recorded"] == told["metrics"]["loss"]["replayed"]
    edit_line("loss", 2.0)(copy)
    status, out, _ = covey("doctor", copy, "--step", 4)
    assert (status, "metrics: metrics.jsonl loss: recorded" in out) == (1, True)
    assert "step 4 differs from the recorded step: metrics" in out
    assert "covey doctor RUN --step N" in covey("replay", copy)[2]
    (copy / "checkpoints" / "step_000002" / "state.json").write_text("{}")
    assert wrong(replay(copy, 4)) == ["checkpoints", "weights after step 2 against its checkpoint", "metrics"]
