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

from covey import GRPOConfig, GRPOTrainer
from covey.errors import ConfigError, DataError, ModelError, RewardError, RunFolderError
from covey.observe import describe_metric
from covey.observe.run_folder import RunFolder
from covey.pytorch.backend import BACKEND

GMPO_FILE = Path(__file__).parents[2] / "recipes" / "gmpo" / "gmpo.py"
GMPO = f"{GMPO_FILE}:gmpo"
ROWS = [{"prompt": f"say {word}: "} for word in ("one", "two", "three", "four", "five")]


def share_of_letters(completions: list[str], **columns: Any) -> list[float]:
    return [sum(c.isalpha() for c in text) / 8 for text in completions]


def build(settings: dict[str, Any], reward: Any = share_of_letters, **changes: Any) -> GRPOTrainer:
    return GRPOTrainer(reward_funcs=reward, args=GRPOConfig(**(settings | changes)), train_dataset=ROWS)


def test_learns_and_leaves_everything_behind(settings: dict[str, Any]) -> None:
    trainer = GRPOTrainer(
        reward_funcs=share_of_letters,
        args=GRPOConfig(**(settings | {"max_steps": 15, "num_generations": 8, "beta": 0.0, "learning_rate": 0.03})),
        train_dataset=ROWS,
        eval_dataset=ROWS[:2],
    )
    result = trainer.train()
    folder = RunFolder.read(settings["output_dir"])
    steps = [record for record in folder.read_metrics() if "loss" in record]
    assert result.global_step == len(steps) == 15
    assert steps[-1]["policy_version"] == 15  # sampled by the weights after 14 updates, the first being version 1
    early = np.mean([record["reward"] for record in steps[:4]])
    late = np.mean([record["reward"] for record in steps[-4:]])
    assert late > early + 0.1
    # One program with itself: the sampler's log-probabilities are the trainer's.
    assert max(record["sampling/sampling_logp_difference/max"] for record in steps) < 1e-4
    assert trainer.state.log_history == folder.read_metrics()
    rows = folder.read_completions(3)
    assert len(rows) == 16
    assert {row["completion"] for row in rows}
    for name in ("config.toml", "versions.json", "learning_curve.png", "adapter/adapter_config.json"):
        assert (folder.path / name).is_file(), name
    assert folder.read_evaluation(15)[0]["completion"] is not None
    fresh = PeftModel.from_pretrained(tiny_model("llama"), str(folder.adapter))
    saved = trainer.policy.state_dict()
    for name, parameter in fresh.named_parameters():
        if "lora_" in name:
            assert torch.equal(parameter, saved[name])


def test_a_backend_of_ones_own_makes_all_parts(settings: dict[str, Any]) -> None:
    asked: list[str] = []

    class Mine:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(BACKEND, name)

    args = GRPOConfig(**(settings | {"max_steps": 1}))
    trainer = GRPOTrainer(reward_funcs=share_of_letters, args=args, train_dataset=ROWS, backend=Mine())
    assert trainer.train().global_step == 1
    assert asked == ["check", "make_policy", "make_sampler", "make_learner", "expect"]
    assert trainer.only_in_memory


def test_first_step_has_no_kl_and_ratio_one(settings: dict[str, Any]) -> None:
    trainer = build(settings, beta=0.5, num_iterations=2)
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["ratio/mean"] != 1.0  # the second pass over the batch is off-policy
    single = build(settings, beta=0.5, output_dir=settings["output_dir"] + "-1", max_steps=1)
    single.train()
    assert single.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-9)
    assert single.state.log_history[0]["ratio/mean"] == pytest.approx(1.0, abs=1e-4)


FAST: list[dict[str, Any]] = [
    {"loss_type": "dapo", "kl_estimator": "exact", "soft_overlong_cache": 4, "lr_scheduler_type": "cosine"},
    {"loss_type": GMPO, "loss_parameters": {"clip": 0.3}, "num_iterations": 2, "keep_sampling_mask": True, "top_k": 5},
    {"use_peft": False, "reference_update_steps": 1, "beta": 0.1},
]
SLOW: list[dict[str, Any]] = [
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


@pytest.mark.parametrize("changes", [*FAST, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)], ids=str)
def test_every_variant_trains(settings: dict[str, Any], changes: dict[str, Any]) -> None:
    trainer = build(settings, **changes)
    before = trainer.policy.state_dict()
    trainer.train()
    steps = [record for record in trainer.state.log_history if "loss" in record]
    assert len(steps) == 2
    assert all(np.isfinite(record["loss"]) and np.isfinite(record["grad_norm"]) for record in steps)
    assert steps[-1]["grad_norm"] > 0
    undefined = [name for record in steps for name in record if describe_metric(name) is None]
    assert undefined == []
    after = trainer.policy.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_micro_batches_do_not_change_the_run(settings: dict[str, Any]) -> None:
    states = []
    for budget in (10_000, 16):
        trainer = build(
            settings, tokens_per_micro_batch=budget, output_dir=f"{settings['output_dir']}-{budget}", loss_type="dapo"
        )
        trainer.train()
        states.append(trainer.policy.state_dict())
    for name in states[0]:
        torch.testing.assert_close(states[0][name], states[1][name], atol=2e-4, rtol=0)


def test_out_of_memory_halves_the_budget_and_repeats_the_step(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = build(settings, tokens_per_micro_batch=1024, max_steps=1)
    score = trainer.policy.score
    calls = []

    def sometimes(pack: Any, **options: Any) -> Any:
        calls.append(pack.num_tokens)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 1 GiB")
        return score(pack, **options)

    monkeypatch.setattr(trainer.policy, "score", sometimes)
    trainer.train()
    assert trainer.learner.tokens_per_micro_batch == 512
    assert "tokens_per_micro_batch=512" in caplog.text
    assert trainer.state.log_history[0]["grad_norm"] > 0


def test_tied_step_trains_nothing_says_so_and_goes_on(settings: dict[str, Any]) -> None:
    trainer = build(settings, reward=lambda completions, **columns: [1.0] * len(completions), beta=0.0)
    before = trainer.policy.state_dict()
    trainer.train()
    after = trainer.policy.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert trainer.state.global_step == 2
    assert trainer.state.policy_version == 1
    events = RunFolder.read(settings["output_dir"]).read_events()
    assert any("rewards in every group are equal" in event["message"] for event in events)


def test_rewards_of_all_kinds_in_one_run(settings: dict[str, Any]) -> None:
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

    trainer = build(settings, reward=[share_of_letters, length], reward_weights=[1.0, 0.5], max_steps=1)
    trainer.train()
    first = trainer.state.log_history[0]
    expected = first["rewards/share_of_letters/mean"] + 0.5 * first["rewards/length/mean"]
    assert first["reward"] == pytest.approx(expected)

    settings["output_dir"] += "-none"
    trainer = build(settings, reward=sometimes)
    trainer.train()
    told = trainer.state.log_history[0]
    assert told["frac_reward_none"] == 0.25
    assert np.isfinite(told["loss"])
    assert seen == [0, 1]
    assert (told["words"], told["logged/step"], told["logged/reward"]) == (3.0, 3.0, 3.0)
    assert told["step"] == 1
    assert told["reward"] != 3.0
    for row in RunFolder.read(settings["output_dir"]).read_completions(1):
        assert row["first letter"] == row["completion"][:1]


def test_a_task_brings_prompts_rewards_and_length(settings: dict[str, Any]) -> None:
    del settings["max_completion_length"]
    trainer = GRPOTrainer(args=GRPOConfig(**settings, task="arithmetic:kinds=sum,digits=1,num_eval=5"))
    assert trainer.args.max_completion_length == 32
    assert trainer.data.scorer.names == ("correct_number",)
    assert trainer.evaluate()["eval/accuracy"] == 0.0  # random weights
    questions = {prompt.content[-1]["content"] for prompt in trainer.prompts}
    assert questions.isdisjoint(prompt.content[-1]["content"] for prompt in trainer.eval_prompts)
    assert trainer.prompts[0].content[0] == {"role": "system", "content": "Answer with the number only."}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"quantization": "nf4", "optimizer": "adamw_8bit"}, marks=pytest.mark.slow),
        pytest.param({"use_peft": False, "autocast": "float16"}, marks=pytest.mark.slow),
    ],
    ids=["plain", "quantised", "float16"],
)
def test_reward_error_names_function_and_run_is_resumable(settings: dict[str, Any], changes: dict[str, Any]) -> None:
    settings = settings | changes
    calls = []

    def fragile(completions: list[str], **columns: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError("no such luck")
        return share_of_letters(completions)

    trainer = build(settings, reward=fragile)
    with pytest.raises(RewardError, match="fragile"):
        trainer.train()
    again = build(settings)
    again.train(resume_from_checkpoint=True)
    assert [record["step"] for record in again.state.log_history] == [1, 2]
    unbroken = build(settings, output_dir=settings["output_dir"] + "-whole")
    unbroken.train()
    whole, resumed = unbroken.policy.state_dict(), again.policy.state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_phases_change_settings(settings: dict[str, Any]) -> None:
    phases = [
        {"name": "warm-up", "steps": 1, "temperature": 0.7, "num_generations": 2, "learning_rate": 1e-3},
        {"name": "main", "steps": 1, "beta": 0.0},
    ]
    trainer = build(settings, phases=phases, max_steps=-1)
    trainer.train()
    first, second = trainer.state.log_history
    folder = RunFolder.read(settings["output_dir"])
    assert [len(folder.read_completions(step)) for step in (1, 2)] == [4, 8]
    assert first["learning_rate"] == 1e-3
    assert (first["phase"], second["phase"]) == (0, 1)
    assert "kl" in first
    assert "kl" not in second


def test_early_stop_and_best_model(settings: dict[str, Any]) -> None:
    # Learning rate so high that the policy breaks: the first evaluations are the best.
    args = GRPOConfig(
        **(settings | {"max_steps": 12, "eval_steps": 1, "early_stopping_patience": 2, "load_best_model_at_end": True})
    )
    constant = iter([0.5, 0.9] + [0.1] * 20)

    class Judge:
        def __call__(self, completions: list[str], kind: list[str], **columns: Any) -> list[float]:
            if kind[0] == "held out":
                value = next(constant)
                return [value] * len(completions)
            return share_of_letters(completions)

    trainer = GRPOTrainer(
        reward_funcs=Judge(),
        args=args,
        train_dataset=[row | {"kind": "train"} for row in ROWS],
        eval_dataset=[row | {"kind": "held out"} for row in ROWS[:2]],
    )
    trainer.train()
    assert trainer.state.best_step == 1
    assert trainer.state.global_step == 3
    best = PeftModel.from_pretrained(tiny_model("llama"), str(Path(settings["output_dir"]) / "best"))
    kept = trainer.policy.state_dict()
    assert all(torch.equal(p, kept[name]) for name, p in best.named_parameters() if "lora_" in name)


def test_loaded_model_peft_config_and_callbacks(settings: dict[str, Any]) -> None:
    seen: list[str] = []

    class Stop:
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append("begin")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(f"step {state.global_step}")
            control.should_training_stop = True

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(f"reward {'reward' in logs}")

    trainer = GRPOTrainer(
        model=tiny_model("qwen2"),
        reward_funcs=share_of_letters,
        args=GRPOConfig(**settings),
        train_dataset=ROWS,
        processing_class=tiny_tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj"]),
        callbacks=[Stop],
    )
    trainer.train()
    assert seen == ["begin", "step 1", "reward True"]
    assert all(".q_proj." in name for name in trainer.policy.state_dict())
    saved = trainer.save_model(Path(settings["output_dir"]) / "mine")
    assert (saved / "adapter_model.safetensors").is_file()


def test_bad_input_is_one_clear_error(settings: dict[str, Any], tmp_path: Path) -> None:
    def trainer(**given: Any) -> GRPOTrainer:
        arguments = {"reward_funcs": share_of_letters, "args": GRPOConfig(**settings), "train_dataset": ROWS}
        return GRPOTrainer(**(arguments | given))

    with pytest.raises(ConfigError, match=r"num_generations=1.*at least 2"):
        GRPOConfig(num_generations=1)
    with pytest.raises(DataError, match="no rows"):
        trainer(train_dataset=[])
    with pytest.raises(DataError, match="prompt"):
        trainer(train_dataset=[{"question": "?"}])
    with pytest.raises(DataError, match=r"context|longer|tokens"):
        trainer(train_dataset=[{"prompt": "x" * 600}])
    with pytest.raises(DataError, match="no training data"):
        trainer(train_dataset=None)
    with pytest.raises(ConfigError, match="reward function"):
        trainer(reward_funcs=None)
    with pytest.raises(ConfigError, match="answer"):
        trainer(reward_funcs=lambda completions, answer: [0.0])
    with pytest.raises(ModelError, match="nowhere"):
        trainer(model=str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match=r"missing: holds no adapter_config.json"):  # and no model is looked for
        trainer(model=str(tmp_path / "nowhere"), args=GRPOConfig(**settings, adapter=str(tmp_path / "missing")))
    with pytest.raises(ConfigError, match="steps"):
        trainer(args=GRPOConfig(**(settings | {"max_steps": -1, "phases": [{"minutes": 1.0}]})))
    ready = trainer()
    ready.train()
    with pytest.raises(RunFolderError, match="resume_from_checkpoint=True"):
        trainer().train()


# --- a loss from a file


class StopAtThree:
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_a_stopped_run_goes_on_to_the_same_bits(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(GMPO_FILE, "mine.py")
    settings |= {"loss_type": "mine.py:gmpo", "loss_parameters": {"clip": 0.2}, "num_iterations": 2, "max_steps": 5}
    settings |= {"adaptive_entropy": {"target": 9.0, "delta": 0.01}, "save_steps": 2}

    def trainer(run: str, callbacks: Any = ()) -> GRPOTrainer:
        args = GRPOConfig(**(settings | {"output_dir": run}))
        return GRPOTrainer(reward_funcs=share_of_letters, args=args, train_dataset=ROWS, callbacks=callbacks)

    trainer("whole").train()
    with pytest.raises(KeyboardInterrupt):
        trainer("broken", [StopAtThree()]).train()
    resumed = trainer("broken")
    resumed.train(resume_from_checkpoint=Path("broken/checkpoints/step_000002"))
    assert numbers(Path("broken")) == numbers(Path("whole"))
    one, other = (load_file(Path(run, "adapter", "adapter_model.safetensors")) for run in ("whole", "broken"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    steps = [record for record in RunFolder.read("whole").read_metrics() if "entropy_coef" in record]
    assert [round(record["entropy_coef"], 6) for record in steps] == [0.015, 0.035, 0.055, 0.075, 0.095]
    assert resumed.state.entropy_coef == pytest.approx(0.1)
    assert GRPOConfig.from_toml("broken/config.toml").loss_type == str(Path("mine.py:gmpo").resolve())


def test_a_bad_loss_is_found_before_anything_is_loaded(settings: dict[str, Any]) -> None:
    args = GRPOConfig(**(settings | {"loss_type": "nowhere.py:mine", "model": "no/such-model"}))
    with pytest.raises(ConfigError, match=r"loss_type='nowhere.py:mine': nowhere.py: no such file"):
        GRPOTrainer(reward_funcs=share_of_letters, args=args, train_dataset=ROWS)


def test_the_recipe_names_the_file_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GMPO_FILE.parents[2])
    config = GRPOConfig.from_toml(GMPO_FILE.parent / "recipe.toml")
    assert dict(config.algorithm.objective().parameters) == {"clip": 0.4}
