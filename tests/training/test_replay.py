"""Replays agree bit for bit with runs that nobody touched, and find what was changed in those that somebody did."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from command import Command
from covey import GRPOConfig, GRPOTrainer
from covey.distributed.ranks import Ranks
from covey.errors import CheckpointError, ConfigError, RunFolderError
from covey.files import publishing
from covey.observe.run_folder import FolderLock
from covey.training.launch import RanksBackend
from covey.training.replay import Report, replay

ROWS = [{"prompt": f"say {word}: "} for word in ("one", "two", "three", "four", "five")]


SLOW = pytest.mark.slow


def few_vowels(completions: list[str], **columns: Any) -> list[float]:
    return [sum(ch not in "aeiou" for ch in text) / max(len(text), 1) for text in completions]


def varied(completions: list[str], **columns: Any) -> list[float | None]:
    return [len(set(text)) / 8 if text else None for text in completions]


def train(folder: Path, model: Path, *, backend: Any = None, **settings: Any) -> Path:
    """A run of four steps with checkpoints after the second and the last."""
    known = {
        "num_generations": 4,
        "prompts_per_step": 2,
        "max_completion_length": 8,
        "max_steps": 4,
        "save_steps": 2,
        "learning_rate": 1e-2,
        "lora_r": 4,
        "progress": False,
    }
    args = GRPOConfig(**(known | {"model": str(model), "output_dir": str(folder)} | settings))
    if args.environment.world is not None:
        GRPOTrainer(args=args, backend=backend).train()
        return folder
    rewards = [few_vowels, varied]
    GRPOTrainer(reward_funcs=rewards, args=args, train_dataset=ROWS, backend=backend).train()
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


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


def change_rows(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Write a table again with other values."""
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path, store_schema=False)


# ---------------------------------------------------------------------- runs that nobody touched


def test_a_step_is_what_was_recorded_bit_for_bit_and_the_folder_is_left_alone(finished: Path, copy: Path) -> None:
    lock = FolderLock(finished)  # as a run in progress holds it
    before = snapshot(finished)
    try:
        report = replay(finished, 4, tolerance=0)
        after = snapshot(finished)
    finally:
        lock.release()
    assert after == before
    names = {check.name: check.compared for check in report.checks}
    assert wrong(report) == []
    assert report.exact
    assert report.agrees
    assert names["metrics of step 3, done again on the way"] > 10
    assert names["weights after step 4 against its checkpoint"] > 10
    assert "weights: checkpoints/step_000002" in report.notes
    assert set(report.numbers) >= {"loss", "grad_norm", "kl", "learning_rate"}
    assert replay(finished).step == 4
    # from the beginning: steps 1 to 3 are done again
    shutil.rmtree(copy / "checkpoints" / "step_000002")
    whole = replay(copy, 4, tolerance=0)
    assert whole.exact
    assert "metrics of step 1, done again on the way" in {check.name for check in whole.checks}


@pytest.mark.parametrize(
    "settings",
    [
        {
            **{"num_iterations": 2, "num_minibatches": 2, "importance_sampling_correction": "token_truncate"},
            **{"top_k": 5, "keep_sampling_mask": True, "validity_min_length": 3},
            **{"off_policy_mask_threshold": 0.5, "top_entropy_quantile": 0.5, "lora_dropout": 0.1},
        },
        pytest.param({"max_generations": 12, "down_sampling": "max_variance:3"}, marks=SLOW),
        pytest.param(
            {"dynamic_sampling": 3, "adaptive_entropy": {}, "entropy_coef": 0.1, "adv_estimator": "remax"}, marks=SLOW
        ),
        pytest.param(
            {
                **{"use_peft": False, "beta": 0.1, "reference_ema_decay": 0.99, "reference_update_steps": 1},
                **{"kl_estimator": "exact", "adv_estimator": "optimal_token_baseline"},
            },
            marks=SLOW,
        ),
        pytest.param(
            {"max_staleness": 1, "lr_scheduler_type": "linear", "loss_type": "gspo", "save_steps": 0}, marks=SLOW
        ),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_whatever_was_trained_with(settings: dict[str, Any], tmp_path: Path, model_folder: Path) -> None:
    report = replay(train(tmp_path / "run", model_folder, **settings), 4, tolerance=0)
    assert wrong(report) == []
    assert report.exact


def test_several_ranks_add_up_to_what_one_process_adds_up(tmp_path: Path, model_folder: Path) -> None:
    run = train(tmp_path / "run", model_folder, backend=RanksBackend(Ranks()))
    assert (
        json.loads(pq.read_table(run / "batches" / "step_000004.parquet")["facts"][0].as_py())["learner"] != "Learner"
    )
    assert replay(run, 4, tolerance=0).exact


@pytest.mark.slow
@pytest.mark.parametrize("context", [{}, {"history_length": 1}], ids=["growing", "steps"])
def test_agents(context: dict[str, Any], tmp_path: Path, model_folder: Path) -> None:
    run = train(
        tmp_path / "run",
        model_folder,
        world="house:rooms=2,num_train=6,num_eval=3",
        max_conversation_tokens=600,
        invalid_action_penalty=0.1,
        action_format="choice",
        max_completion_length=16,
        max_steps=2,
        adv_estimator="gigpo",
        **context,
    )
    report = replay(run, 2, tolerance=0)
    assert wrong(report) == []
    assert report.exact
    for row in pq.read_table(run / "completions" / "step_000002.parquet").to_pylist():
        assert row["reward"] == pytest.approx(row["rewards/world"] + row["rewards/invalid_actions"])
        assert row["reward"] == pytest.approx(sum(json.loads(row["turn_rewards"])))
        assert len(json.loads(row["turn_advantages"])) == row["turns"]
        assert row["masked_by"] == ""
        assert row["logp"] <= 0
    change_rows(run / "batches" / "step_000002.parquet", lambda rows: rows[0]["turns"][0].update(reward=5.0))
    assert "metrics" in wrong(replay(run, 2))


def test_a_group_s_mean_spread_and_tie_stand_in_the_table(finished: Path) -> None:
    rows = pq.read_table(finished / "completions" / "step_000001.parquet").to_pylist()
    for group in (0, 1):
        rewards = [row["reward"] for row in rows if row["group"] == group]
        for row in rows:
            if row["group"] == group:
                assert row["group_mean"] == pytest.approx(np.mean(rewards))
                assert row["group_std"] == pytest.approx(np.std(rewards))
                assert row["group_tied"] == (len(set(rewards)) == 1)


def test_the_ledger_of_some_groups_has_no_others_and_is_chosen_the_same_way_again(
    tmp_path: Path, model_folder: Path
) -> None:
    run = train(tmp_path / "run", model_folder, ledger="sampled:1,all:4", prompts_per_step=3)
    groups = [
        {row["group"] for row in pq.read_table(run / "ledger" / f"step_{n:06d}.parquet").to_pylist()}
        for n in (1, 2, 3, 4)
    ]
    assert [len(each) for each in groups[:3]] == [1, 1, 1]
    assert len(groups[3]) > 1
    assert replay(run, 3, tolerance=0).exact
    with pytest.raises(ConfigError, match=r"run\.ledger='some': must be one of off, sampled:N"):
        GRPOConfig(ledger="some")


# ---------------------------------------------------------------------- runs that somebody changed


def edit_batch(step: int, change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[Path], None]:
    return lambda run: change_rows(run / "batches" / f"step_{step:06d}.parquet", change)


def other_part(rows: list[dict[str, Any]]) -> None:
    rows[0]["rewards/few_vowels"] += 0.5


def other_token(rows: list[dict[str, Any]]) -> None:
    ids = rows[3]["episodes"][0]["token_ids"]
    ids[-1] = (ids[-1] + 1) % 20


def edit_line(name: str, factor: float) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        lines[3][name] *= factor
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    return change


def edit_weight(step: int, *, hashed_anew: bool) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        folder = run / "checkpoints" / f"step_{step:06d}"
        tensors = load_file(folder / "policy.safetensors")
        name = next(name for name in sorted(tensors) if "lora_B" in name)
        tensors[name].view(-1)[0] += 0.01
        if not hashed_anew:
            save_file(tensors, folder / "policy.safetensors", metadata={"aliases": "{}"})
            return
        with publishing(folder) as aside:
            for path in folder.iterdir():
                if path.name != "COMPLETE":
                    shutil.copy(path, aside)
            save_file(tensors, aside / "policy.safetensors", metadata={"aliases": "{}"})

    return change


AFTER_4 = "weights after step 4 against its checkpoint"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (edit_batch(4, other_part), {"metrics", AFTER_4}),
        (edit_batch(4, other_token), {"metrics", AFTER_4}),
        (edit_batch(3, other_part), {"metrics", AFTER_4}),
        (edit_line("loss", 1.01), {"metrics"}),
        (edit_line("grad_norm", 1.01), {"metrics"}),
        (edit_weight(2, hashed_anew=True), {"metrics of step 3, done again on the way"}),
        (edit_weight(2, hashed_anew=False), {"checkpoints", "weights after step 2 against its checkpoint"}),
        (edit_weight(4, hashed_anew=True), {AFTER_4}),
        (edit_weight(4, hashed_anew=False), {AFTER_4}),
    ],
    ids=[
        *("reward", "token", "earlier step", "loss", "grad_norm", "weight before", "damaged weight before"),
        *("weight", "damaged weight"),
    ],
)
def test_what_was_changed_is_found(copy: Path, change: Callable[[Path], None], found: set[str]) -> None:
    change(copy)
    report = replay(copy, 4)
    assert not report.agrees
    assert found <= set(wrong(report))
    if len(found) == 1 and "way" not in next(iter(found)):
        assert set(wrong(report)) == found


# ---------------------------------------------------------------------- what cannot be done


def test_a_run_that_keeps_no_batches(tmp_path: Path, model_folder: Path) -> None:
    run = train(tmp_path / "run", model_folder, keep_batches=False, max_steps=1)
    assert not (run / "batches").exists()
    with pytest.raises(RunFolderError, match=r"run\.keep_batches=true"):
        replay(run, 1)


def test_steps_that_are_missing_or_cannot_be_reached(copy: Path) -> None:
    with pytest.raises(RunFolderError, match="step 9 is not in batches/, which has 4 steps from 1 to 4"):
        replay(copy, 9)
    (copy / "batches" / "step_000003.parquet").unlink()
    with pytest.raises(
        CheckpointError, match=r"step 4 is reached from the weights after step 2.* 3 of the steps between"
    ):
        replay(copy, 4)
    with pytest.raises(ConfigError, match=r"run\.seed=1: a step is computed again with the settings that it had"):
        replay(copy, 2, ["run.seed=1"])


def garbage(path: Path) -> None:
    path.write_bytes(b"PAR1" + bytes(200))


def other_columns(path: Path) -> None:
    pq.write_table(pa.table({"group": [0]}), path)


def of_another_step(path: Path) -> None:
    shutil.copy(path.with_name("step_000002.parquet"), path)


def first_episode(**values: Any) -> Callable[[Path], None]:
    return lambda path: change_rows(path, lambda rows: rows[0]["episodes"][0].update(values))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (garbage, "is damaged"),
        (other_columns, "its columns are not those of a step"),
        (of_another_step, "it is of step 2, not of 4"),
        (first_episode(runs=[3, 1]), "runs do not add up"),
        (first_episode(logprobs=[0.0]), "log-probabilities are not one a sampled token"),
        (first_episode(token_ids=[-1, 5]), "whole numbers from 0"),
        (lambda path: change_rows(path, lambda rows: rows.reverse()), "facts|out of order|Expecting"),
        (lambda path: change_rows(path, lambda rows: rows[0].update(facts='{"format": 1}')), "facts of the step"),
        (lambda path: change_rows(path, lambda rows: rows[0].update(facts="[" * 100_000)), "is damaged"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_damaged_batch_is_one_clear_error(copy: Path, damage: Callable[[Path], None], said: str) -> None:
    damage(copy / "batches" / "step_000004.parquet")
    with pytest.raises(RunFolderError, match=said):
        replay(copy, 4)


def test_a_token_that_the_model_does_not_have(copy: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[0]["episodes"][0]["token_ids"][0] = 2**31 - 1

    change_rows(copy / "batches" / "step_000004.parquet", change)
    with pytest.raises(RunFolderError, match="has the token id 2147483647"):
        replay(copy, 4)


# ---------------------------------------------------------------------- the command


def test_the_command(copy: Path, tmp_path: Path, covey: Command) -> None:
    moved = shutil.copytree(GRPOConfig.from_toml(copy / "config.toml").model.model, tmp_path / "moved")
    status, out, _ = covey("doctor", copy, "--step", 4, f"model.model={moved}")
    assert status == 0, out
    assert "step 4 is what was recorded, bit for bit" in out
    told = json.loads(covey("doctor", copy, "--step", 4, "--json")[1])
    assert told["agrees"] is told["exact"] is True
    assert told["metrics"]["loss"]["recorded"] == told["metrics"]["loss"]["replayed"]
    edit_line("loss", 2.0)(copy)
    status, out, _ = covey("doctor", copy, "--step", 4)
    assert status == 1
    assert "metrics: metrics.jsonl loss: recorded" in out
    assert "step 4 differs from what was recorded: metrics" in out
    assert "covey doctor RUN --step N" in covey("replay", copy)[2]
    (copy / "checkpoints" / "step_000002" / "state.json").write_text("{}")
    assert wrong(replay(copy, 4)) == ["checkpoints", "weights after step 2 against its checkpoint", "metrics"]
