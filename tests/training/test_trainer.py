"""The trainer as a user sees it, on a tiny model."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from test_kill_and_resume import numbers
from tiny_models import tiny_model, tiny_tokenizer
from training_runs import ROWS, Settings, StopAt, build, failing_at, letters, same_weights, slow, steps_of, trained

from covey import GRPOConfig, GRPOTrainer
from covey.errors import ConfigError, DataError, ModelError, RewardError, RunFolderError
from covey.observe import describe_metric
from covey.observe.run_folder import RunFolder
from covey.pytorch.backend import BACKEND

GMPO_FILE = Path(__file__).parents[2] / "recipes" / "gmpo" / "gmpo.py"
GMPO = f"{GMPO_FILE}:gmpo"


def test_learns_and_leaves_everything_behind(settings: Settings) -> None:
    settings |= {"max_steps": 15, "num_generations": 8, "beta": 0.0, "learning_rate": 0.03}
    trainer = trained(settings, held_out=2)
    folder, steps = RunFolder.read(settings["output_dir"]), steps_of(trainer)
    assert trainer.state.global_step == len(steps) == 15
    assert steps[-1]["policy_version"] == 15  # sampled by the weights after 14 updates, the first being version 1
    early, late = (np.mean([record["reward"] for record in some]) for some in (steps[:4], steps[-4:]))
    assert late > early + 0.1
    # One program with itself: the sampler's log-probabilities are the trainer's.
    assert max(record["sampling/sampling_logp_difference/max"] for record in steps) < 1e-4
    assert trainer.state.log_history == folder.read_metrics()
    assert len(folder.read_completions(3)) == 16
    for name in ("config.toml", "versions.json", "learning_curve.png", "adapter/adapter_config.json"):
        assert (folder.path / name).is_file(), name
    assert folder.read_evaluation(15)[0]["completion"] is not None
    assert holds_adapter(trainer, folder.adapter)


def holds_adapter(trainer: GRPOTrainer, folder: Path) -> bool:
    """PEFT reads from the folder what the trainer has."""
    fresh, kept = PeftModel.from_pretrained(tiny_model("llama"), str(folder)), trainer.policy.state_dict()
    return all(torch.equal(value, kept[name]) for name, value in fresh.named_parameters() if "lora_" in name)


def test_a_backend_of_ones_own_makes_all_parts(settings: Settings) -> None:
    asked: list[str] = []

    class Mine:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(BACKEND, name)

    args = GRPOConfig(**(settings | {"max_steps": 1}))
    trainer = GRPOTrainer(reward_funcs=letters, args=args, train_dataset=ROWS, backend=Mine())
    assert trainer.train().global_step == 1
    assert asked == ["check", "make_policy", "make_sampler", "make_learner", "expect"]
    assert trainer.only_in_memory


def test_first_step_has_no_kl_and_ratio_one(settings: Settings) -> None:
    twice = trained(settings, beta=0.5, num_iterations=2)
    assert twice.state.log_history[0]["ratio/mean"] != 1.0  # the second pass over the batch is off-policy
    (single,) = trained(settings, beta=0.5, name="single", max_steps=1).state.log_history
    assert single["kl"] == pytest.approx(0.0, abs=1e-9)
    assert single["ratio/mean"] == pytest.approx(1.0, abs=1e-4)


FAST: list[Settings] = [
    {"loss_type": "dapo", "kl_estimator": "exact", "soft_overlong_cache": 4, "lr_scheduler_type": "cosine"},
    {"loss_type": GMPO, "loss_parameters": {"clip": 0.3}, "num_iterations": 2, "keep_sampling_mask": True, "top_k": 5},
    {"use_peft": False, "reference_update_steps": 1, "beta": 0.1},
]
SLOW: list[Settings] = [
    {"loss_type": "bnpo", "mask_truncated_completions": True, "gradient_checkpointing": True, "warmup_steps": 1},
    {"loss_type": "dr_grpo", "adv_estimator": "dr_grpo", "prefix_sharing": False},
    {"loss_type": "gspo", "num_iterations": 2, "importance_sampling_correction": "sequence_mask"},
    {"loss_type": "gspo_token", "lora_dropout": 0.1, "validity_min_length": 1},
    {"loss_type": "cispo", "adv_estimator": "rloo", "importance_sampling_correction": "token_truncate"},
    {"loss_type": "sapo", "scale_rewards": "batch", "reference_ema_decay": 0.99, "reference_update_steps": 1},
    {"loss_type": "reinforce", "entropy_coef": 0.01, "adv_estimator": "gdpo"},
    {"loss_type": "kl_cov", "num_iterations": 2},
    {"loss_type": "clip_cov", "loss_parameters": {"clip_cov_lb": 0.01}},
    {"adaptive_entropy": {"target": 9.0}, "dynamic_sampling": 3},
    {"kl_estimator": "exact_weighted", "beta": 0.1, "top_entropy_quantile": 0.3},
    {"kl_estimator": "k3_unbiased", "off_policy_mask_threshold": 0.0, "num_iterations": 2},
    {"reference_drift_threshold": 0.5, "reference_update_steps": 1},
    {"max_generations": 9},
    {"max_generations": 9, "dynamic_sampling": 3, "down_sampling": "max_variance:3"},
    {"use_peft": False, "embedding_lr": 1e-3},
    {"quantization": "nf4", "optimizer": "adamw_8bit"},
    {"quantization": "int8", "gradient_checkpointing": True, "beta": 0.1},
    {"quantization": "torchao_int8", "kl_estimator": "exact", "beta": 0.1},
]


@pytest.mark.parametrize("changes", [*FAST, *map(slow, SLOW)], ids=str)
def test_every_variant_trains(settings: Settings, changes: Settings) -> None:
    trainer = build(settings, **changes)
    before = trainer.policy.state_dict()
    trainer.train()
    steps = steps_of(trainer)
    assert len(steps) == 2
    assert np.isfinite([[record["loss"], record["grad_norm"]] for record in steps]).all()
    assert steps[-1]["grad_norm"] > 0
    assert [name for record in steps for name in record if describe_metric(name) is None] == []
    assert not same_weights(before, trainer)


def test_micro_batches_do_not_change_the_run(settings: Settings) -> None:
    settings["loss_type"] = "dapo"
    runs = [trained(settings, tokens_per_micro_batch=budget, name=f"{budget}") for budget in (10_000, 16)]
    torch.testing.assert_close(*(run.policy.state_dict() for run in runs), atol=2e-4, rtol=0)


def test_out_of_memory_halves_the_budget_and_repeats_the_step(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = build(settings, tokens_per_micro_batch=1024, max_steps=1)
    score, calls = trainer.policy.score, []

    def sometimes(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 1 GiB")
        return score(*arguments, **options)

    monkeypatch.setattr(trainer.policy, "score", sometimes)
    trainer.train()
    assert trainer.learner.tokens_per_micro_batch == 512
    assert "tokens_per_micro_batch=512" in caplog.text
    assert trainer.state.log_history[0]["grad_norm"] > 0


def test_tied_step_trains_nothing_says_so_and_goes_on(settings: Settings) -> None:
    trainer = build(settings, lambda completions, **columns: [1.0] * len(completions), beta=0.0)
    before = trainer.policy.state_dict()
    trainer.train()
    assert same_weights(before, trainer)
    assert (trainer.state.global_step, trainer.state.policy_version) == (2, 1)
    said = RunFolder.read(settings["output_dir"]).read_events()
    assert any("rewards in every group are equal" in event["message"] for event in said)


def test_rewards_of_all_kinds_in_one_run(settings: Settings) -> None:
    """Sync and async, with weights; None; with metrics and columns of their own; told of the run's state."""
    seen = []

    async def length(completions: list[str], **columns: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(text)) for text in completions]

    def sometimes(
        completions: list[str], trainer_state: Any = None, log_metric: Any = None, log_extra: Any = None, **columns: Any
    ) -> list[float | None]:
        seen.append(trainer_state.global_step)
        for name in ("words", "step", "reward"):  # the run has numbers of its own of two of these names
            log_metric(name, 3.0)
        log_extra("first letter", [text[:1] for text in completions])
        return [None if n % 4 == 0 else float(len(text) + n) for n, text in enumerate(completions)]

    (first,) = steps_of(trained(settings, [letters, length], reward_weights=[1.0, 0.5], max_steps=1))
    assert first["reward"] == pytest.approx(first["rewards/letters/mean"] + 0.5 * first["rewards/length/mean"])
    told = trained(settings, sometimes, name="none").state.log_history[0]
    assert (told["frac_reward_none"], seen) == (0.25, [0, 1])
    assert np.isfinite(told["loss"])
    assert (told["words"], told["logged/step"], told["logged/reward"], told["step"]) == (3.0, 3.0, 3.0, 1)
    assert told["reward"] != 3.0
    for row in RunFolder.read(Path(settings["output_dir"]).with_name("none")).read_completions(1):
        assert row["first letter"] == row["completion"][:1]


def test_a_task_brings_prompts_rewards_and_length(settings: Settings) -> None:
    del settings["max_completion_length"]
    trainer = GRPOTrainer(args=GRPOConfig(**settings, task="arithmetic:kinds=sum,digits=1,num_eval=5"))
    assert (trainer.args.max_completion_length, trainer.data.scorer.names) == (32, ("correct_number",))
    assert trainer.evaluate()["eval/accuracy"] == 0.0  # random weights
    questions = {prompt.content[-1]["content"] for prompt in trainer.prompts}
    assert questions.isdisjoint(prompt.content[-1]["content"] for prompt in trainer.eval_prompts)
    assert trainer.prompts[0].content[0] == {"role": "system", "content": "Answer with the number only."}


@pytest.mark.parametrize(
    "changes",
    [{}, slow({"quantization": "nf4", "optimizer": "adamw_8bit"}), slow({"use_peft": False, "autocast": "float16"})],
    ids=str,
)
def test_reward_error_names_function_and_run_is_resumable(settings: Settings, changes: Settings) -> None:
    with pytest.raises(RewardError, match="fragile"):
        trained(settings, failing_at(2), **changes)
    again = trained(settings, **changes, resume=True)
    assert [record["step"] for record in again.state.log_history] == [1, 2]
    assert same_weights(again, trained(settings, **changes, name="whole"))


def test_phases_change_settings(settings: Settings) -> None:
    warm_up = {"name": "warm-up", "steps": 1, "temperature": 0.7, "num_generations": 2, "learning_rate": 1e-3}
    phases = [warm_up, {"name": "main", "steps": 1, "beta": 0.0}]
    first, second = trained(settings, phases=phases, max_steps=-1).state.log_history
    folder = RunFolder.read(settings["output_dir"])
    assert [len(folder.read_completions(step)) for step in (1, 2)] == [4, 8]
    assert (first["phase"], second["phase"], first["learning_rate"]) == (0, 1, 1e-3)
    assert ("kl" in first, "kl" in second) == (True, False)


def test_early_stop_and_best_model(settings: Settings) -> None:
    settings |= {"max_steps": 12, "eval_steps": 1, "early_stopping_patience": 2, "load_best_model_at_end": True}
    held_out = iter([0.5, 0.9] + [0.1] * 20)

    def judge(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return [next(held_out)] * 2 if len(prompts) == 2 else letters(completions)

    trainer = trained(settings, judge, held_out=2)
    assert (trainer.state.best_step, trainer.state.global_step) == (1, 3)
    assert holds_adapter(trainer, Path(settings["output_dir"], "best"))


def test_loaded_model_peft_config_and_callbacks(settings: Settings) -> None:
    seen: list[str] = []

    class Stop:
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            seen.append("begin")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(f"step {state.global_step}")
            control.should_training_stop = True

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(f"reward {'reward' in logs}")

    trainer = GRPOTrainer(
        tiny_model("qwen2"), letters, GRPOConfig(**settings), ROWS, processing_class=tiny_tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj"]), callbacks=[Stop],
    )  # fmt: skip
    trainer.train()
    assert seen == ["begin", "step 1", "reward True"]
    assert all(".q_proj." in name for name in trainer.policy.state_dict())
    assert (trainer.save_model(Path(settings["output_dir"], "mine")) / "adapter_model.safetensors").is_file()


def test_bad_input_is_one_clear_error(settings: Settings, tmp_path: Path) -> None:
    def trainer(**given: Any) -> GRPOTrainer:
        args = GRPOConfig(**(settings | given.pop("settings", {})))
        return GRPOTrainer(**({"reward_funcs": letters, "args": args, "train_dataset": ROWS} | given))

    nowhere, minutes = str(tmp_path / "nowhere"), {"max_steps": -1, "phases": [{"minutes": 1.0}]}
    bad_loss, missing = {"loss_type": "nowhere.py:mine", "model": "no/such"}, {"adapter": str(tmp_path / "missing")}
    for given, error, words in (
        ({"settings": bad_loss}, ConfigError, r"loss_type='nowhere.py:mine': nowhere.py: no such file"),
        ({"settings": minutes}, ConfigError, "steps"),
        ({"train_dataset": []}, DataError, "no rows"),
        ({"train_dataset": [{"question": "?"}]}, DataError, "prompt"),
        ({"train_dataset": [{"prompt": "x" * 600}]}, DataError, r"context|longer|tokens"),
        ({"train_dataset": None}, DataError, "no training data"),
        ({"reward_funcs": None}, ConfigError, "reward function"),
        ({"reward_funcs": lambda completions, answer: [0.0]}, ConfigError, "answer"),
        ({"model": nowhere}, ModelError, "nowhere"),
        # and no model is looked for
        ({"model": nowhere, "settings": missing}, ModelError, r"missing: holds no adapter_config.json"),
    ):
        with pytest.raises(error, match=words):
            trainer(**given)
    trainer().train()
    with pytest.raises(RunFolderError, match="resume_from_checkpoint=True"):
        trainer().train()


def test_a_stopped_run_goes_on_to_the_same_bits(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(GMPO_FILE, "mine.py")
    settings |= {"loss_type": "mine.py:gmpo", "loss_parameters": {"clip": 0.2}, "num_iterations": 2, "max_steps": 5}
    settings |= {"adaptive_entropy": {"target": 9.0, "delta": 0.01}, "save_steps": 2}
    whole = trained(settings, output_dir="whole")
    with pytest.raises(KeyboardInterrupt):
        trained(settings, output_dir="broken", callbacks=[StopAt(3)])
    resumed = trained(settings, output_dir="broken", resume=2)
    assert numbers(Path("broken")) == numbers(Path("whole"))
    assert same_weights(*(load_file(f"{run}/adapter/adapter_model.safetensors") for run in ("whole", "broken")))
    assert [round(record["entropy_coef"], 6) for record in steps_of(whole)] == [0.015, 0.035, 0.055, 0.075, 0.095]
    assert resumed.state.entropy_coef == pytest.approx(0.1)
    assert GRPOConfig.from_toml("broken/config.toml").loss_type == str(Path("mine.py:gmpo").resolve())
    recipe = GRPOConfig.from_toml(GMPO_FILE.parent / "recipe.toml")  # names the file beside it
    assert dict(recipe.algorithm.objective().parameters) == {"clip": 0.4}
