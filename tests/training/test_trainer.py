"""The trainer as a user sees it, on a tiny model; what counts as right, and which evaluation is the best."""

import asyncio
import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_runs as runs
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from test_kill_and_resume import numbers
from tiny_models import tiny_model, tiny_tokenizer
from training_runs import ROWS, Settings, StopAt, build, failing_at, letters, same_weights, steps_of, trained

from covey import GRPOConfig, GRPOTrainer
from covey.errors import ConfigError, DataError, ModelError, RewardError, RunFolderError
from covey.observe import describe_metric
from covey.observe.observers import BaseObserver, Observers
from covey.observe.run_folder import RunFolder
from covey.pytorch.backend import BACKEND
from covey.training import recorder
from covey.training.refusals import require_measured
from covey.training.setup import load_data
from fakes import raises, slow

GMPO_FILE = Path(__file__).parents[2] / "recipes" / "gmpo" / "gmpo.py"
GMPO = f"{GMPO_FILE}:gmpo"
BEST: Settings = {"eval_steps": 1, "load_best_model_at_end": True}
has_e, has_a = (runs.rewarding(f"has_{letter}", lambda text, letter=letter: float(letter in text)) for letter in "ea")
make, ended = (partial(function, held_out=2) for function in (build, trained))
FALLING = (1.0, 0.75, 0.5, 0.25, 0.0)
"""The first evaluation is the best one."""


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
    assert (trainer.state.log_history, len(folder.read_completions(3))) == (folder.read_metrics(), 16)
    for name in ("config.toml", "versions.json", "learning_curve.png", "adapter/adapter_config.json"):
        assert (folder.path / name).is_file(), name
    assert folder.read_completions(15, "eval")[0]["completion"] is not None
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


def test_sampler_and_learner_wait_unless_making_them_may_find_a_fault(settings: Settings) -> None:
    waiting, parts = build(settings), {"engine", "learner"}
    assert not parts & vars(waiting).keys()
    early = GRPOTrainer(reward_funcs=letters, args=GRPOConfig(**settings), train_dataset=ROWS, backend=BACKEND)
    in_bytes = build(settings, sampler_dtype="int8", name="bytes", max_steps=1)
    for made in (early, in_bytes):
        assert parts <= vars(made).keys()
    in_bytes.train()
    assert 0 < in_bytes.state.log_history[0]["sampling/sampling_logp_difference/max"] < 0.2
    assert waiting.generate("one:", 2, 1.0) == early.generate("one:", 2, 1.0)
    learning = build(settings)
    _ = learning.learner
    assert parts <= vars(learning).keys()  # the sampler has the weights of before


def test_first_step_has_no_kl_and_ratio_one_and_micro_batches_do_not_change_the_run(settings: Settings) -> None:
    twice = trained(settings, beta=0.5, num_iterations=2)
    assert twice.state.log_history[0]["ratio/mean"] != 1.0  # the second pass over the batch is off-policy
    (single,) = trained(settings, beta=0.5, name="single", max_steps=1).state.log_history
    assert (single["kl"], single["ratio/mean"]) == (pytest.approx(0.0, abs=1e-9), pytest.approx(1.0, abs=1e-4))
    settings["loss_type"] = "dapo"
    both = [trained(settings, tokens_per_micro_batch=budget, name=f"{budget}") for budget in (10_000, 16)]
    torch.testing.assert_close(*(run.policy.state_dict() for run in both), atol=2e-4, rtol=0)


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
    assert [("soft_overlong_penalty" in record) == ("soft_overlong_cache" in changes) for record in steps] == [True] * 2
    assert not same_weights(before, trainer)


def test_out_of_memory_halves_the_budget_and_repeats_a_step(settings: Settings, monkeypatch: Any, caplog: Any) -> None:
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


def test_a_task_brings_prompts_rewards_and_length(settings: Settings, tmp_path: Path) -> None:
    del settings["max_completion_length"]
    trainer = GRPOTrainer(args=GRPOConfig(**settings, task="arithmetic:kinds=sum,digits=1,num_eval=5"))
    assert (trainer.args.max_completion_length, trainer.data.scorer.names) == (32, ("correct_number",))
    assert trainer.evaluate()["eval/accuracy"] == 0.0  # random weights
    questions = {prompt.content[-1]["content"] for prompt in trainer.prompts}
    assert questions.isdisjoint(prompt.content[-1]["content"] for prompt in trainer.eval_prompts)
    assert trainer.prompts[0].content[0] == {"role": "system", "content": "Answer with the number only."}
    (tmp_path / "mine.py").write_text("def same(completions, **columns):\n    return [0.5 for _ in completions]\n")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    named = {"functions": [f"{tmp_path}/mine.py:same"], "dataset": tmp_path / "rows.jsonl", "max_completion_length": 8}
    trainer = GRPOTrainer(args=GRPOConfig(**settings | named))  # rewards named in the settings
    assert trainer.data.scorer.names == ("same",)
    assert (trainer.only_in_memory, make(settings, has_e).only_in_memory) == (False, True)


@pytest.mark.parametrize(
    "changes",
    [{}, slow({"quantization": "nf4", "optimizer": "adamw_8bit"}), slow({"use_peft": False, "autocast": "float16"})],
    ids=str,
)
def test_reward_error_names_function_and_run_is_resumable(settings: Settings, changes: Settings) -> None:
    raises(RewardError, "fragile", trained, settings, failing_at(2), **changes)
    again = trained(settings, **changes, resume=True)
    assert [record["step"] for record in again.state.log_history] == [1, 2]
    assert same_weights(again, trained(settings, **changes, name="whole"))


def test_early_stop_and_best_model(settings: Settings) -> None:
    settings |= {"max_steps": 12, "eval_steps": 1, "early_stopping_patience": 2, "load_best_model_at_end": True}
    trainer = ended(settings, held_out(0.5, 0.9, *[0.1] * 20))
    assert (trainer.state.best_step, trainer.state.global_step) == (1, 3)
    assert holds_adapter(trainer, Path(settings["output_dir"], "best"))


def test_the_page_s_callback_stops_at_a_target(settings: Settings) -> None:
    page = (Path(__file__).parents[2] / "docs" / "configure.md").read_text()
    found: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    exec(next(code for code in blocks if "StopAtTarget" in code), found)
    left = iter((0.0, 0.0, 1.0))

    def right(prompts: list[str], **columns: Any) -> list[float]:
        return [next(left) if len(prompts) == 2 else 1.0] * len(prompts)

    options = {"max_steps": 12, "eval_steps": 1, "correctness": "right", "callbacks": [found["StopAtTarget"]()]}
    assert ended(settings, right, **options).state.global_step == 2


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
        *(
            ({"train_dataset": [{"prompt": "x"}, {"prompt": "y", name: 1}]}, DataError, f"'{name}'.* rename the column")
            for name in ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "prompt_ends")
        ),
        ({"train_dataset": [{"prompt": "x" * 600}]}, DataError, r"context|longer|tokens"),
        ({"train_dataset": None}, DataError, "no training data"),
        ({"reward_funcs": None}, ConfigError, "reward function"),
        ({"reward_funcs": lambda completions, answer: [0.0]}, ConfigError, "answer"),
        ({"model": nowhere}, ModelError, "nowhere"),
        # and no model is looked for
        ({"model": nowhere, "settings": missing}, ModelError, r"missing: holds no adapter_config.json"),
    ):
        raises(error, words, trainer, **given)
    trainer().train()
    raises(RunFolderError, "resume_from_checkpoint=True", trainer().train)


def test_a_stopped_run_resumes_exactly(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def held_out(*values: float) -> Any:
    """A reward that gives these, one an evaluation, for the two held-out prompts."""
    left = iter(values)

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return [next(left)] * 2 if len(prompts) == 2 else runs.distinct(completions)

    return reward


def test_accuracy_is_the_named_reward(settings: Settings) -> None:
    trainer = ended(settings, [has_e, has_a], correctness="has_a", num_generations_eval=8, eval_temperature=1.0)
    for kind in ("", "eval/"):
        records = [record for record in trainer.state.log_history if f"{kind}accuracy" in record]
        assert [record[f"{kind}accuracy"] for record in records] == [r[f"{kind}rewards/has_a/mean"] for r in records]
        assert len(records) == 2
    assert trainer.best_metric == "eval/accuracy"


@pytest.mark.parametrize("use_peft", [True, slow(False)])
def test_a_run_whose_first_evaluation_is_the_best_ends_with_those_weights(settings: Settings, use_peft: bool) -> None:
    changes = BEST | {"use_peft": use_peft, "max_steps": 3}
    trainer = make(settings, held_out(*FALLING), **changes)
    before = trainer.policy.state_dict()
    trainer.train()
    assert trainer.state.best_step == 0
    assert same_weights(before, trainer)
    what, name = ("adapter", "adapter_model") if use_peft else ("model", "model")
    run, file = settings["output_dir"], RunFolder.read(settings["output_dir"]).adapter / f"{name}.safetensors"
    said = f"the {what} of step 0, the best evaluation (eval/reward 1), is in {file.parent}"
    assert runs.events(run, "adapter") == [said]
    saved = load_file(file)
    ended(settings, held_out(*FALLING), resume=True, **changes)  # and so does its resume
    assert runs.events(run, "adapter") == [said, said]
    assert same_weights(saved, load_file(file))
    (RunFolder.read(run).checkpoints / "step_000000" / "policy.safetensors").unlink()
    ended(settings, held_out(*FALLING), resume=True, **changes)  # with the best weights gone, the last ones are kept
    assert "the weights of step 0" in runs.events(run, "warning")[-1]
    assert runs.events(run, "adapter")[-1] == f"the {what} of step 3, the last one, is in {file.parent}"


@pytest.mark.slow
def test_a_kill_between_best_and_checkpoint_repeats_steps(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    class KilledError(BaseException):
        """What no handler of the run sees, as a SIGKILL."""

    def killed(*_: Any, **__: Any) -> None:
        raise KilledError

    changes = BEST | {"eval_on_start": False}
    unbroken = ended(settings, runs.distinct, **changes, name="unbroken")
    with monkeypatch.context() as patched:
        patched.setattr(recorder, "save_checkpoint", killed)
        with pytest.raises(KilledError):
            ended(settings, runs.distinct, **changes)
    folder = RunFolder.read(settings["output_dir"])
    assert folder.best.is_dir()
    assert list(folder.checkpoints.iterdir()) == []
    resumed = ended(settings, runs.distinct, resume=True, **changes)
    assert "before its first checkpoint: it begins again" in runs.events(folder.path, "warning")[-1]
    for name in ("best_step", "best_metric", "num_tokens", "policy_version"):
        assert getattr(resumed.state, name) == getattr(unbroken.state, name), name
    assert same_weights(unbroken, resumed)


def test_several_rewards_of_0_and_1_say_nothing_about_what_is_right(settings: Settings) -> None:
    """And the scale of the best evaluation stays over a resume."""
    settings |= {"eval_steps": 1, "save_steps": 1}
    trainer = ended(settings, [has_e, has_a], max_steps=1)
    names = {name for record in trainer.state.log_history for name in record}
    assert {"reward", "eval/reward"} <= names
    assert not names & {"accuracy", "eval/accuracy"}
    assert trainer.best_metric == trainer.state.best_metric_name == "eval/reward"
    with pytest.raises(ConfigError, match="by eval/reward so far and would go on by eval/accuracy"):
        ended(settings, [has_e, has_a], resume=True, correctness="has_e")
    same = ended(settings, [has_e, has_a], resume=True)
    assert same.state.best_metric == max(r["eval/reward"] for r in same.state.log_history if "eval/reward" in r)


def test_a_resume_is_told_of_the_last_evaluation(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    class Listening(BaseObserver):
        def on_run_start(self, config: Any, info: Any) -> None:
            told.append(info["last_eval"])

    monkeypatch.setattr(recorder, "make_observers", lambda *_, **__: Observers([Listening()]))
    settings |= {"eval_steps": 1, "save_steps": 1}
    ended(settings, has_e, max_steps=1)
    with RunFolder.create(settings["output_dir"], resume=True) as folder:  # nobody wrote the run's own lines
        for step, line in ((0, {"eval/reward": 0.25}), (1, {"phase": 0}), (1, {"eval/reward": 0.5})):
            folder.append_metrics(step, line)
    ended(settings, has_e, resume=True)
    assert told == [None, {"step": 1, "eval/reward": 0.5}]


def test_held_out_rows_that_are_trained_on_are_said_and_settings_read_otherwise_or_refused(caplog: Any) -> None:
    def said(train: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> str:
        caplog.clear()
        load_data(GRPOConfig(), None, has_e, train, held_out)
        return caplog.text

    named = [row | {"uid": str(number)} for number, row in enumerate(ROWS[:4])]
    assert "2 of the 3 held-out rows (data.eval_dataset) are training rows too" in said(named, [*ROWS[:2], ROWS[4]])
    assert (said(ROWS[:2], ROWS[2:]), said([ROWS[0] | {"answer": "1"}], [ROWS[0] | {"answer": "2"}])) == ("", "")
    # names of metrics as transformers writes them; what cannot say which is best; half precision
    reward = "eval/reward"
    names = {"eval_reward": reward, "reward": reward, "eval_accuracy": "eval/accuracy", "x": "eval/x"}
    assert {name: GRPOConfig(metric_for_best_model=name).metric_for_best_model for name in names} == names
    for name in ("eval_loss", "loss", "eval/kl", "eval/seconds", "eval/completions/clipped_ratio"):
        raises(ConfigError, "where higher is better", GRPOConfig, metric_for_best_model=name)
    for dtype in ("bfloat16", "float16"):
        raises(ConfigError, "use_peft=False: half precision", GRPOConfig, dtype=dtype, use_peft=False)


def test_what_is_not_measured_stops_the_run_before_its_first_step(settings: Settings) -> None:
    with pytest.raises(ConfigError, match=r"eval/rewards/has_b/mean.*use eval/rewards/has_e/mean"):
        make(settings, has_e, metric_for_best_model="eval_rewards/has_b/mean")
    trainer = make(settings, has_e, metric_for_best_model="eval/rewart")
    raises(ConfigError, "did you mean 'eval/reward'", trainer.train)
    assert trainer.state.global_step == 0
    raises(ConfigError, "no held-out prompts", build, settings, has_e, load_best_model_at_end=True)
    with pytest.raises(ConfigError, match=r"phases\[0\]\.min_accuracy=0\.5: nothing says here"):
        make(settings, has_e, phases=[{"steps": 2, "min_accuracy": 0.5}], max_steps=-1)
    with pytest.raises(ConfigError, match="use eval/reward, eval/shiny"):  # and that is not refused then
        require_measured("eval/nothing", ["eval/num_completions", "eval/reward", "eval/shiny", "eval/seconds"])
