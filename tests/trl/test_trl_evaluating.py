"""Evaluations as transformers' users know them: a loss, sets by name, streams, early stopping, the best of several."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model, tiny_tokenizer
from transformers import EarlyStoppingCallback, TrainerCallback
from trl_runs import ROWS, Seen, Stream, trained, unique_letters

from covey.errors import ConfigError, DataError
from fakes import raises

HELD_OUT = [{"prompt": text} for text in ["Sparse is", "Readability", "Complex"]]
EVERY_STEP: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 3}
SETS = {"data1": HELD_OUT[:1], "data2": HELD_OUT[1:]}
BEST: dict[str, Any] = {**EVERY_STEP, "save_steps": 1, "load_best_model_at_end": True}


def constant(completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


class TestEvaluations:
    @pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
    def test_the_loss_of_an_evaluation(self, make: Any, loss_type: str) -> None:
        """On the policy's own completions every ratio is 1, so that a token's loss is minus its advantage."""
        seen = Seen(unique_letters)
        metrics = make(seen, loss_type=loss_type, scale_rewards="none").evaluate(HELD_OUT)
        found = [*zip(unique_letters(seen.all("completions")), map(len, seen.all("completion_ids")), strict=True)]
        groups = [found[at : at + 3] for at in range(0, 9, 3)]
        rows = [(r - sum(x for x, _ in group) / 3, length) for group in groups for r, length in group]
        tokens, by_token = sum(length for _, length in rows), -sum(advantage * length for advantage, length in rows)
        expected = {"grpo": 0.0, "dr_grpo": by_token / (9 * 8), "dapo": by_token / tokens}
        assert metrics["eval_loss"] == pytest.approx(expected[loss_type], abs=1e-5)

    def test_the_loss_has_its_kl_and_its_entropy(self, make: Any) -> None:
        """The reference is the policy before training: its KL is 0. Of equal rewards the entropy alone is left."""
        assert make(constant, beta=0.5).evaluate(HELD_OUT)["eval_loss"] == pytest.approx(0.0, abs=1e-5)
        assert make(constant, entropy_coef=0.5).evaluate(HELD_OUT)["eval_loss"] < -1.0
        assert make(constant, num_generations_eval=1).evaluate(HELD_OUT)["eval_loss"] == pytest.approx(0.0)

    def test_early_stopping_by_the_default_metric(self, make: Any) -> None:
        """The default, the loss, means the reward: one that stays as it is stops the run after one evaluation more."""
        trainer = make(constant, held_out=HELD_OUT, callbacks=[EarlyStoppingCallback(1)], **BEST)
        assert trainer.train().global_step == 2
        assert (trainer.args.metric_for_best_model, trainer.args.greater_is_better) == ("eval_reward", True)
        assert trainer.state.best_metric == 1.0
        rising = map(float, range(100))
        better = Seen(lambda completions, **_: [next(rising)] * len(completions))
        trainer = make(better, held_out=HELD_OUT, callbacks=[EarlyStoppingCallback(1)], **BEST)
        assert trainer.train().global_step == trainer.state.best_global_step == 3
        by_name = {"metric_for_best_model": "eval_reward", "max_steps": 9, "save_total_limit": 1}
        trainer = make(constant, held_out=HELD_OUT, callbacks=[EarlyStoppingCallback(2)], **(BEST | by_name))
        assert trainer.train().global_step == 3
        kept = Path(trainer.args.output_dir) / "checkpoint-1"
        assert (trainer.state.best_model_checkpoint, kept.is_dir()) == (str(kept), True)

    @pytest.mark.parametrize(("limit", "kept"), [(1, {2, 4}), (2, {2, 4}), (3, {2, 3, 4})])
    def test_evaluations_come_before_checkpoints(self, make: Any, tmp_path: Path, limit: int, kept: set[int]) -> None:
        """As in TRL: also in `trainer_state.json`; and of step 0, which nothing was learned in, there is none."""
        told: list[tuple[str, int, Any]] = []

        class Watching(TrainerCallback):
            def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                told.append(("evaluate", state.global_step, state.best_global_step))

            def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                told.append(("save", state.global_step, state.best_global_step))

        left = iter((0.125, 0.25, 1.0, 0.5, 0.5))
        score = Seen(lambda completions, **_: [next(left) if len(completions) == 9 else 0.0] * len(completions))
        options = {"max_steps": 4, "eval_on_start": True, "save_total_limit": limit, "callbacks": [Watching()]}
        trainer = trained(make(score, held_out=HELD_OUT, **(BEST | options)))
        begun, *after = told[:5]
        assert (begun, after[::2]) == (("evaluate", 0, None), [("evaluate", 1, 0), ("evaluate", 2, 1)])
        assert after[1::2] == [("save", 1, 1), ("save", 2, 2)]
        assert {int(path.name[11:]) for path in tmp_path.glob("checkpoint-*")} == kept
        state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
        assert (state["log_history"][-1]["step"], state["log_history"][-1]["eval_reward"]) == (2, 1.0)
        assert (state["best_metric"], state["best_model_checkpoint"]) == (1.0, str(tmp_path / "checkpoint-2"))
        assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")

    def test_an_evaluation_has_the_metrics_of_a_step(self, make: Any) -> None:
        trainer = trained(make(beta=0.1, max_completion_length=1, logging_steps=3))
        found = trainer.evaluate(HELD_OUT)
        names = "reward reward_std kl frac_reward_zero_std rewards/unique_letters/std completions/max_length"
        assert {f"eval_{name}" for name in names.split()} <= set(found)
        for metrics, prefix in ((found, "eval_"), (trainer.state.log_history[0], "")):
            lengths = [metrics[f"{prefix}completions/{name}_terminated_length"] for name in ("mean", "min", "max")]
            assert set(lengths) <= {0.0, 1.0}  # 0 where none has ended

    def test_a_metric_that_a_function_logs_chooses_the_best(self, make: Any) -> None:
        """What is logged in an evaluation stays in it."""
        values = iter([0.2, 0.9, 0.5, 0.4])

        def logs(completions: list[str], log_metric: Any, **columns: Any) -> list[float]:
            log_metric("rows", float(len(completions)))
            if len(completions) == 9:  # of an evaluation
                log_metric("accuracy", next(values))
            return unique_letters(completions)

        def forwards(completions: list[str], **columns: Any) -> list[float]:
            return logs(completions, **columns)

        trainer = trained(make(logs, held_out=HELD_OUT, metric_for_best_model="accuracy", **BEST))
        history = trainer.state.log_history
        assert (trainer.state.best_metric, trainer.state.best_global_step) == (0.9, 2)
        assert [record["eval_accuracy"] for record in history if "eval_accuracy" in record] == [0.2, 0.9, 0.5]
        assert "accuracy" not in history[-1]
        assert [record["rows"] for record in history if "rows" in record] == [3.0]
        assert trainer.evaluate(HELD_OUT)["eval_rows"] == 9.0
        assert make(forwards, held_out=HELD_OUT, metric_for_best_model="accuracy", **EVERY_STEP)

    def test_the_best_are_saved_only_where_a_metric_that_is_measured_says_which(self, make: Any) -> None:
        said = "save_strategy='best' and metric_for_best_model=None: nothing says which"
        raises(ConfigError, said, make, held_out=HELD_OUT, save_strategy="best", **EVERY_STEP)
        trainer = make(held_out=HELD_OUT, save_strategy="best", metric_for_best_model="loss", **EVERY_STEP)
        assert trainer.args.metric_for_best_model == "eval_reward"
        said = r"metric_for_best_model=.*(no evaluation has it|there is no such reward)"
        for metric in ("accuracy", "eval_f1", "eval_rewards/other/mean"):
            raises(ConfigError, said, make, held_out=HELD_OUT, metric_for_best_model=metric, **EVERY_STEP)

    def test_several_sets_at_the_start_and_with_the_best_at_the_end(self, make: Any, tmp_path: Path) -> None:
        told: list[set[str]] = []

        class Watching(TrainerCallback):
            def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
                told.append({name.split("_")[1] for name in metrics})

        more = {"metric_for_best_model": "eval_data2_reward", "eval_on_start": True, "callbacks": [Watching()]}
        trainer = trained(make(held_out=SETS, **BEST, **more, save_total_limit=1))
        for name in SETS:
            key = f"eval_{name}_reward"
            found = {record["step"]: record[key] for record in trainer.state.log_history if key in record}
            assert list(found) == [0, 1, 2, 3]
        assert (told, trainer.state.best_metric) == ([{"data2"}, {"data1"}] * 4, max(found.values()))
        best = trainer.state.best_global_step
        assert found[best] == trainer.state.best_metric
        assert best == 0 or trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
        assert trainer.run.state.best_step == best

    def test_several_sets_are_read_before_training_and_one_is_compared(self, make: Any) -> None:
        with pytest.raises(ConfigError, match="names none; give one of 'eval_data1_reward', 'eval_data2_reward'"):
            make(held_out=SETS, **BEST)
        named = make(held_out=SETS, metric_for_best_model="data1_loss", **BEST).args.metric_for_best_model
        assert named == "eval_data1_reward"
        with pytest.raises(DataError, match=r"eval_dataset\['data2'\]: .*no column 'prompt'"):
            make(held_out={"data1": HELD_OUT, "data2": [{"question": "Sparse is"}]}, **EVERY_STEP)

    def test_streams_are_held_out_rows_too(self, make: Any) -> None:
        trainer = trained(make(unique_letters, Stream(ROWS), Stream(HELD_OUT), **EVERY_STEP))
        evaluated = [record for record in trainer.state.log_history if "eval_loss" in record]
        assert [record["eval_num_completions"] for record in evaluated] == [9.0] * 3
        assert trainer.evaluate(Stream(HELD_OUT[:1]))["eval_num_completions"] == 3.0
        metrics = trainer.evaluate({name: Stream(rows) for name, rows in SETS.items()})
        assert {"eval_data1_loss", "eval_data2_loss", "eval_data1_reward"} <= set(metrics)

    def test_the_settings_of_a_loader_say_how_streams_are_read(self, make: Any) -> None:
        trainer = make(rows=Stream(ROWS), dataloader_num_workers=4)
        assert trainer.args.dataloader_num_workers == 0
        assert trainer.args.accelerator_config.dispatch_batches is False
        assert make(held_out=Stream(HELD_OUT), dataloader_num_workers=4).args.dataloader_num_workers == 4
        with pytest.raises(ConfigError, match="`dispatch_batches=False`"):
            make(rows=Stream(ROWS), accelerator_config={"dispatch_batches": True}, max_steps=-1)

    def test_the_latest_generation_and_the_entropy_s_weight_as_it_moves_are_there_to_be_read(self, make: Any) -> None:
        def reward(completions: list[str], log_extra: Any, **columns: Any) -> list[float]:
            log_extra("first", [completion[:1] for completion in completions])
            return unique_letters(completions)

        trainer = make(reward, entropy_coef=0.1)
        assert trainer._logs["completion"] == []
        trainer.train()
        assert (trainer.entropy_coef, trainer.state.log_history[-1]["entropy_coef"]) == (0.1, pytest.approx(0.1))
        logs = trainer._logs
        assert logs["extra"]["first"] == [completion[:1] for completion in logs["completion"]]
        assert logs["rewards"] == {"reward": unique_letters(logs["completion"])}
        assert len(logs["prompt"]) == len(logs["advantages"]) == 3
        trainer = make(entropy_coef=0.01, use_adaptive_entropy=True, entropy_target=15.0, entropy_coef_delta=0.005)
        trainer.train()
        assert trainer.entropy_coef == pytest.approx(0.01 + 3 * 0.005)

    def test_losses_of_which_something_is_said(self, make: Any, caplog: pytest.LogCaptureFixture) -> None:
        """TRL adds a balance loss by default to a model that has one; 0 asks for none. Some losses sum tokens."""
        mixture = {"model": tiny_model("qwen3_moe"), "processing_class": tiny_tokenizer()}
        off = {"router_aux_loss_coef": 0.0}
        for options, says in ((mixture, True), (mixture | off, False), ({}, False), (off, False)):
            caplog.clear()
            assert make(**options).aux_loss_enabled is False
            assert ("this model has a balance loss, which is not computed" in caplog.text) == says
        for loss_type in ("grpo", "dapo", "bnpo", "cispo"):
            caplog.clear()
            make(importance_sampling_level="sequence", loss_type=loss_type)
            assert ("weights each sequence by its completion length" in caplog.text) == (loss_type != "grpo")
