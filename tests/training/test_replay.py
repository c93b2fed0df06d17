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
from covey.errors import CheckpointError, ConfigError, CoveyError, RunFolderError
from covey.files import publishing
from covey.observe.run_folder import FolderLock
from covey.training.launch import RanksBackend
from covey.training.replay import Report, replay

ROWS = [{"prompt": f"say {word}: "} for word in ("one", "two", "three", "four", "five")]
LOSSES = """
from covey.algorithms import Surrogate, clip_surrogate

def same(x, epsilon=0.2):
    return clip_surrogate(x.ratio, x.advantages, epsilon, epsilon)

def against(x):
    return Surrogate(x.ratio * x.advantages)
"""


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
    return [check.name for check in report.checks if not check.agrees]


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


def change_rows(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Write a table again with other values."""
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path, store_schema=False)


# ---------------------------------------------------------------------- runs that nobody touched


def test_a_step_is_what_was_recorded_bit_for_bit_and_the_folder_is_left_alone(finished: Path) -> None:
    lock = FolderLock(finished)  # as a run in progress holds it
    before = snapshot(finished)
    try:
        report = replay(finished, 4, tolerance=0)
        whole = replay(finished, 4, start=0, tolerance=0)
        after = snapshot(finished)
    finally:
        lock.release()
    assert after == before
    names = {check.name: check.compared for check in report.checks}
    assert wrong(report) == []
    assert report.exact
    assert report.agrees
    assert names["ledger"] > 500
    assert names["metrics of step 3, done again on the way"] > 10
    assert names["weights after step 4 against its checkpoint"] > 10
    assert "weights: checkpoints/step_000002" in report.notes
    assert set(report.numbers) >= {"loss", "grad_norm", "kl", "reward", "learning_rate", "policy_version"}
    # from the beginning: steps 1 to 3 are done again, and meet the checkpoint of the second
    assert whole.exact
    assert "weights after step 2 against its checkpoint" in {check.name for check in whole.checks}
    assert replay(finished).step == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"num_iterations": 2, "num_minibatches": 2, "importance_sampling_correction": "token_truncate"},
        {"off_policy_mask_threshold": 0.5, "top_entropy_quantile": 0.5, "lora_dropout": 0.1},
        {"top_k": 5, "keep_sampling_mask": True, "validity_mask": True, "validity_min_length": 3},
        {"max_generations": 12, "down_sampling": "max_variance", "down_sampling_size": 3},
        {"dynamic_sampling": True, "use_adaptive_entropy": True, "entropy_coef": 0.1, "adv_estimator": "remax"},
        {"use_peft": False, "beta": 0.1, "reference_update": "ema", "reference_update_steps": 1},
        {"max_staleness": 1, "lr_scheduler_type": "linear", "loss_type": "gspo", "save_steps": 0},
        {"adv_estimator": "optimal_token_baseline", "kl_estimator": "exact", "beta": 0.05},
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


@pytest.mark.parametrize("context", [{}, {"context_mode": "steps", "history_length": 1}], ids=["growing", "steps"])
def test_agents(context: dict[str, Any], tmp_path: Path, model_folder: Path) -> None:
    run = train(
        tmp_path / "run",
        model_folder,
        world="house:rooms=2,num_train=6,num_eval=3",
        max_conversation_tokens=600,
        max_turn_prompt_tokens=400,
        invalid_action_penalty=0.1,
        action_format="choice",
        max_completion_length=16,
        max_steps=2,
        adv_estimator="gigpo",
        **context,
    )
    report = replay(run, 2, ["environment.step_advantage_weight=0"], tolerance=0)
    assert wrong(report) == []
    assert report.exact
    assert report.changed is not None
    assert report.changed.tokens["advantages_changed"] > 0
    rows = pq.read_table(run / "completions" / "step_000002.parquet").to_pylist()
    for row in rows:
        assert row["reward"] == pytest.approx(row["rewards/world"] + row["rewards/invalid_actions"])
        assert row["reward"] == pytest.approx(sum(json.loads(row["turn_rewards"])))
        assert len(json.loads(row["turn_advantages"])) == row["turns"]
        assert row["masked_by"] == ""
        assert row["logp"] <= 0
    table = run / "completions" / "step_000002.parquet"
    whole = table.read_bytes()
    for column, check in (("turn_rewards", "rewards"), ("turn_advantages", "advantages")):
        new = {column: json.dumps([value + 1 for value in json.loads(rows[0][column])])}
        change_rows(table, lambda rows, new=new: rows[0].update(new))
        assert wrong(replay(run, 2, tolerance=0)) == [f"completions: {check}"]
        table.write_bytes(whole)
    change_rows(run / "batches" / "step_000002.parquet", lambda rows: rows[0]["turns"][0].update(reward=5.0))
    assert {"rewards from their parts", "completions: rewards"} <= set(wrong(replay(run, 2, batch_only=True)))


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
    run = train(tmp_path / "run", model_folder, ledger="sampled:1", ledger_steps=4, prompts_per_step=3)
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


def edit_reward(run: Path) -> None:
    change_rows(
        run / "completions" / "step_000004.parquet", lambda rows: rows[1].update(reward=rows[1]["reward"] + 0.01)
    )


def edit_advantage(run: Path) -> None:
    change_rows(run / "completions" / "step_000004.parquet", lambda rows: rows[2].update(advantage=0.123))


def edit_mask(run: Path) -> None:
    change_rows(run / "completions" / "step_000004.parquet", lambda rows: rows[2].update(masked_by="validity_mask"))


def edit_stored_reward(run: Path) -> None:
    change_rows(run / "batches" / "step_000004.parquet", lambda rows: rows[0].update(reward=0.9))


def edit_stored_logprob(run: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[3]["episodes"][0]["logprobs"][2] -= 0.01

    change_rows(run / "batches" / "step_000004.parquet", change)


def edit_stored_token(run: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        ids = rows[3]["episodes"][0]["token_ids"]
        ids[-1] = (ids[-1] + 1) % 20

    change_rows(run / "batches" / "step_000004.parquet", change)


def edit_earlier_step(run: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[0]["rewards/few_vowels"] += 0.5

    change_rows(run / "batches" / "step_000003.parquet", change)


def edit_ledger(run: Path) -> None:
    change_rows(run / "ledger" / "step_000004.parquet", lambda rows: rows[5].update(logp=rows[5]["logp"] - 0.001))


def empty_ledger(run: Path) -> None:
    change_rows(run / "ledger" / "step_000004.parquet", lambda rows: rows.clear())


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


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (edit_reward, {"completions: rewards"}),
        (edit_advantage, {"completions: advantages"}),
        (edit_mask, {"completions: masks"}),
        (edit_stored_reward, {"rewards from their parts", "completions: rewards", "metrics"}),
        (edit_stored_logprob, {"completions: what was sampled"}),
        (edit_stored_token, {"metrics", "ledger"}),
        (edit_earlier_step, {"metrics", "ledger", "weights after step 4 against its checkpoint"}),
        (edit_ledger, {"ledger"}),
        (empty_ledger, {"ledger"}),
        (edit_line("loss", 1.01), {"metrics"}),
        (edit_line("grad_norm", 1.01), {"metrics"}),
        (edit_line("reward", 1.01), {"metrics"}),
        (edit_weight(2, hashed_anew=True), {"ledger", "metrics of step 3, done again on the way"}),
        (edit_weight(2, hashed_anew=False), {"checkpoints", "weights after step 2 against its checkpoint"}),
        (edit_weight(4, hashed_anew=True), {"weights after step 4 against its checkpoint"}),
        (edit_weight(4, hashed_anew=False), {"weights after step 4 against its checkpoint"}),
    ],
    ids=[
        *("reward", "advantage", "mask", "stored reward", "stored logprob", "stored token", "earlier step", "ledger"),
        "empty ledger",
        *("loss", "grad_norm", "mean reward", "weight before", "damaged weight before", "weight", "damaged weight"),
    ],
)
def test_what_was_changed_is_found(copy: Path, change: Callable[[Path], None], found: set[str]) -> None:
    change(copy)
    report = replay(copy, 4)
    assert not report.agrees
    assert found <= set(wrong(report))
    if len(found) == 1 and change not in (edit_stored_logprob,):
        assert set(wrong(report)) == found


# ---------------------------------------------------------------------- other settings


def test_what_another_loss_would_have_made_of_it(finished: Path, tmp_path: Path) -> None:
    losses = tmp_path / "losses.py"
    losses.write_text(LOSSES)
    same = replay(finished, 3, [f"algorithm.loss_type={losses}:same"]).changed
    assert same is not None
    assert same.gradient["cosine"] == pytest.approx(1.0, abs=1e-6)
    assert same.step["cosine"] == pytest.approx(1.0, abs=1e-6)
    assert same.tokens["weights_changed"] == same.tokens["advantages_changed"] == 0
    against = replay(finished, 3, [f"algorithm.loss_type={losses}:against", "algorithm.beta=0"]).changed
    forward = replay(finished, 3, ["algorithm.beta=0"]).changed
    assert against is not None
    assert forward is not None
    assert against.gradient["norm_after"] == pytest.approx(forward.gradient["norm_after"], rel=1e-5)
    assert against.metrics["grad_norm"][1] == pytest.approx(against.gradient["norm_after"], rel=1e-5)
    assert against.metrics["kl"][0] is not None
    assert against.metrics["kl"][1] is None
    # dr_grpo: each token has the weight 1 / (completions * max_completion_length)
    constant = replay(finished, 3, ["algorithm.loss_type=dr_grpo"]).changed
    assert constant is not None
    assert constant.tokens["weight_max_after"] == pytest.approx(1 / (8 * 8))
    assert constant.tokens["weight_min_after"] == pytest.approx(1 / (8 * 8))
    total = sum(row["loss_before"] for row in constant.completions)
    assert total == pytest.approx(constant.metrics["loss"][0], abs=1e-6)


def test_advantages_by_hand(finished: Path) -> None:
    """Without scaling, an advantage is the reward less the mean of its group."""
    report = replay(finished, 2, ["algorithm.scale_rewards=none", "rewards.reward_weights=[0.0, 2.0]"], batch_only=True)
    assert report.agrees
    assert report.changed is not None
    rows = pq.read_table(finished / "completions" / "step_000002.parquet").to_pylist()
    rewards = np.array([2.0 * row["rewards/varied"] for row in rows]).reshape(2, 4)
    wanted = (rewards - rewards.mean(axis=1, keepdims=True)).ravel()
    found = [row["advantage_after"] for row in report.changed.completions]
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    np.testing.assert_allclose(
        [r["advantage_before"] for r in report.changed.completions], [r["advantage"] for r in rows]
    )


def test_a_reference_that_the_run_had_no_use_for(tmp_path: Path, model_folder: Path) -> None:
    run = train(tmp_path / "run", model_folder, use_peft=False, max_steps=3)
    changed = replay(run, 3, ["algorithm.beta=0.5"], tolerance=0)
    assert changed.exact
    assert changed.changed is not None
    assert changed.changed.metrics["kl"][1] > 0


# ---------------------------------------------------------------------- what cannot be


def test_without_batches_the_setting_is_named(tmp_path: Path, model_folder: Path) -> None:
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
    assert replay(copy, 4, batch_only=True).agrees
    with pytest.raises(CheckpointError, match=r"--from 1: .* it has 2, 4, and 0"):
        replay(copy, 2, start=1)
    for override in ("model.lora_r=8", "sampling.top_k=3", "run.seed=1"):
        with pytest.raises(ConfigError, match=f"--set {override}: a replay has the run's samples"):
            replay(copy, 4, [override])
    with pytest.raises(ConfigError, match="it compares turns"):
        replay(copy, 4, ["algorithm.adv_estimator=gigpo"], batch_only=True)
    with pytest.raises(ConfigError, match="compares with a greedy completion"):
        replay(copy, 4, ["algorithm.adv_estimator=remax"], batch_only=True)


def garbage(path: Path) -> None:
    path.write_bytes(b"PAR1" + bytes(200))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-300])


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
        (cut, "is damaged"),
        (other_columns, "its columns are not those of a step"),
        (of_another_step, "it is of step 2, not of 4"),
        (first_episode(runs=[3, 1]), "runs do not add up"),
        (first_episode(logprobs=[0.0]), "log-probabilities are not one a sampled token"),
        (first_episode(logprobs=[float("nan")] * 8), "is no number|not one a sampled token"),
        (first_episode(token_ids=[-1, 5]), "whole numbers from 0"),
        (first_episode(finish_reason="?"), "finish_reason"),
        (lambda path: change_rows(path, lambda rows: rows.reverse()), "facts|out of order|Expecting"),
        (lambda path: change_rows(path, lambda rows: rows[0].update(facts='{"format": 1}')), "facts of the step"),
        (lambda path: change_rows(path, lambda rows: rows[0].update(facts="[" * 100_000)), "is damaged"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_damaged_batch_is_one_clear_error(copy: Path, damage: Callable[[Path], None], said: str) -> None:
    damage(copy / "batches" / "step_000004.parquet")
    with pytest.raises(RunFolderError, match=said):
        replay(copy, 4, batch_only=True)


def test_a_token_that_the_model_does_not_have(copy: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[0]["episodes"][0]["token_ids"][0] = 2**31 - 1

    change_rows(copy / "batches" / "step_000004.parquet", change)
    with pytest.raises(RunFolderError, match="has the token id 2147483647"):
        replay(copy, 4)


# ---------------------------------------------------------------------- the command


def test_the_command(copy: Path, tmp_path: Path, covey: Command) -> None:
    file = tmp_path / "report.json"
    status, out, _ = covey("replay", copy, "--step", 4, "--json", file, "--set", "algorithm.epsilon=0.3")
    assert status == 0, out
    assert "step 4 is what was recorded, bit for bit" in out
    assert "cosine of the gradients: 1.0" in out
    told = json.loads(file.read_text())
    assert told["agrees"] is told["exact"] is True
    assert told["metrics"]["loss"]["recorded"] == told["metrics"]["loss"]["replayed"]
    assert told["changed"]["settings"] == ["algorithm.epsilon=0.3"]
    edit_line("loss", 2.0)(copy)
    status, out, _ = covey("replay", copy)
    assert status == 1
    assert "metrics.jsonl loss: recorded" in out
    assert "step 4 differs from what was recorded: metrics" in out
    status, _, err = covey("replay", copy, "--json", copy / "report.json")
    assert status == 2
    assert "it is in the run folder" in err
    assert not (copy / "report.json").exists()
    status, _, err = covey("replay", tmp_path)
    assert status == 2
    assert "holds no run" in err
    (copy / "checkpoints" / "step_000002" / "state.json").write_text("{}")
    with pytest.raises(CoveyError):
        replay(copy, 4, start=2)
