"""Scripts written for TRL, on a tiny model: `covey.trl` in place of `trl`, all else as TRL's users write it."""

import ast
import json
import re
import threading
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import tiny_tokenizer
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers import LlamaForSequenceClassification as Judge
from transformers.trainer_utils import get_last_checkpoint
from trl_runs import ROWS, SMALL, Stream, changed, messages, moved_by_training, trained, unique_letters, weights

import covey.trl
from covey.errors import ConfigError
from covey.trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config
from covey.trl.rewards import get_soft_overlong_punishment, think_format_reward
from fakes import raises

COUNTS = ("num_completions_to_print", "num_generations_eval", "max_tool_calling_iterations")
CHATS = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]


async def lengths(completions: list[Any], **columns: Any) -> list[float]:
    return messages(completions)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"loss_type": "bnpo", "scale_rewards": False, "bf16": True},
    {"loss_type": "grpo", "gradient_accumulation_steps": 2, "beta": 0.1, "use_bias_correction_kl": False},
    {"loss_type": "dr_grpo", "delta": 2.0, "scale_rewards": "batch", "gradient_checkpointing": False},
    {"loss_type": "cispo", "epsilon_high": 5.0, "num_iterations": 2},
    {"loss_type": "sapo", "entropy_coef": 0.01, "scale_rewards": True, "cast_lm_head_to_fp32": True},
    {"loss_type": "vespo", "fp16": True, "warmup_steps": 0.5},
    # The others are slow.
    {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "top_p": 0.9, "top_k": 10, "min_p": 0.01},
    {"num_iterations": 2, "importance_sampling_level": "sequence"},
    {"steps_per_generation": 2, "max_steps": 4, "off_policy_mask_threshold": 0.5},
    {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 5},
    {"num_generations": 6, "gradient_accumulation_steps": 2, "top_entropy_quantile": 0.2},
    {"entropy_coef": 0.01, "use_adaptive_entropy": True, "dataloader_num_workers": 2, "shuffle_dataset": False},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.01}},
    {"multi_objective_aggregation": "normalize_then_sum", "generation_kwargs": {"do_sample": True, "top_k": 5}},
]
SLOW = [pytest.param(options, marks=pytest.mark.slow) for options in OPTIONS[7:]]


class TestTraining:
    @pytest.mark.parametrize("options", [*OPTIONS[:7], *SLOW], ids=str)
    def test_options_that_train(self, options: dict[str, Any], make: Any) -> None:
        trainer = make([unique_letters, lengths], **options)
        before, output = weights(trainer), trainer.train()
        assert output.global_step == trainer.state.global_step == trainer.args.max_steps
        assert trainer.state.log_history[-1]["train_loss"] == output.training_loss
        assert "rewards/unique_letters/mean" in trainer.state.log_history[-1]
        assert changed(trainer, before) == set(before)
        assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}

    def test_a_generation_is_trained_on_in_several_optimiser_steps(self, make: Any, tmp_path: Path) -> None:
        """`max_steps` and the learning rate count optimiser steps, whatever a generation is used for."""
        steps = []

        class Watch(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                steps.append(state.global_step)

        options = {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 6, "logging_steps": 1}
        make(callbacks=[Watch()], **options).train()
        assert steps == [1, 2, 3, 4, 5, 6]
        records = [json.loads(line) for line in (tmp_path / "covey" / "metrics.jsonl").read_text().splitlines()]
        assert [record["policy_version"] for record in records] == [1, 5]  # two generations, of 4 and of 2 steps
        assert records[-1]["learning_rate"] == pytest.approx(0.1 * (1 - 5 / 6))

    def test_without_max_steps_epochs_count_whole_generations(self, make: Any) -> None:
        trainer = make(max_steps=-1, num_train_epochs=2, logging_strategy="epoch")
        assert trainer.train().global_step == 8
        assert [record["epoch"] for record in trainer.state.log_history] == [1.0, 2.0, 2.0]

    def test_the_cap_of_cispo_is_trls(self, make: Any) -> None:
        """Where no upper range is given, TRL caps at `epsilon`; Covey's own default is 5."""
        for given, cap in (({}, 0.2), ({"epsilon": 0.3}, 0.3), ({"epsilon_high": 4.0}, 4.0)):
            assert make(loss_type="cispo", **given).run.args.algorithm.loss_parameters["epsilon_max"] == cap

    def test_reward_models_and_means_of_what_was_judged(self, make: Any, tmp_path: Path) -> None:
        calls: list[int] = []

        def now_and_then(completions: list[Any], **columns: Any) -> list[float | None]:
            calls.append(len(completions))
            return [len(calls) if len(calls) < 3 else None for _ in completions]

        def never(completions: list[Any], **columns: Any) -> list[None]:
            return [None for _ in completions]

        judge, tokenizer = tmp_path / "reward-model", tiny_tokenizer()
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        Judge(transformers.LlamaConfig(vocab_size=len(tokenizer), num_labels=1, **shape)).save_pretrained(judge)
        tokenizer.save_pretrained(judge)
        trainer = trained(make([str(judge), unique_letters, now_and_then, never], out=tmp_path / "out"))
        assert trainer.reward_func_names == ["reward-model", "unique_letters", "now_and_then", "never"]
        last = trainer.state.log_history[-1]
        assert (last["rewards/now_and_then/mean"], last["rewards/never/mean"]) == (1.5, None)
        assert "rewards/reward-model/mean" in last
        model = Judge.from_pretrained(judge)
        (reward,) = trainer.reward_funcs[0](["Flat is"], [" bad"])
        with torch.no_grad():
            wanted = model(**tokenizer("Flat is bad", return_tensors="pt", add_special_tokens=False)).logits.item()
        assert reward == pytest.approx(wanted, abs=1e-6)
        with pytest.raises(ValueError, match="must match"):
            make([model, unique_letters], reward_processing_classes=transformers.AutoTokenizer.from_pretrained(judge))

    def test_a_stream_of_conversations(self, make: Any, tmp_path: Path) -> None:
        trainer = make(rows=Stream(cycle(CHATS)))
        assert trainer.train().global_step == 3
        assert [len(texts) for texts in trainer.generate([CHATS[0]["prompt"]], num_generations=2)] == [2]
        raises(ValueError, "set max_steps", make, out=tmp_path / "b", rows=Stream(CHATS), max_steps=-1)
        raises(ValueError, "'log_metric': ", make, out=tmp_path / "c", rows=[{**row, "log_metric": 1} for row in CHATS])
        raises(ValueError, "at least 1", trainer.generate, CHATS[0]["prompt"], num_generations=0)
        make(out=tmp_path / "d", rows=[{**row, "prompt_ends": "x"} for row in CHATS])  # TRL passes it on

    @pytest.mark.parametrize("wrapped", [False, True])
    def test_lora(self, wrapped: bool, make: Any, model_folder: Path, tmp_path: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32")
        lora = LoraConfig(target_modules=["q_proj", "v_proj"])
        model, config = (get_peft_model(model, lora), None) if wrapped else (model, lora)
        trainer = make(model=model, peft_config=config, beta=0.1)
        assert isinstance(trainer.model, PeftModel)
        assert (trainer.ref_model, trainer.temperature, trainer.is_fsdp_enabled) == (None, 1.0, False)
        assert trainer.get_num_trainable_parameters() == trainer.model.get_nb_trainable_parameters()[0]
        assert moved_by_training(trainer) == {name for name in weights(trainer) if ".lora_" in name}
        trainer.save_model(tmp_path / "saved")
        fresh = AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32")
        read, ids = PeftModel.from_pretrained(fresh, tmp_path / "saved"), torch.tensor([[5, 6, 7]])
        assert torch.allclose(read(ids).logits, trainer.model(ids).logits, atol=1e-5)


class TestRecords:
    def test_logs_and_evaluations(self, make: Any) -> None:
        options = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 3, "eval_on_start": True}
        options |= {"logging_steps": 2, "max_steps": 5, "logging_first_step": True}
        trainer = trained(make(held_out=ROWS[:2], **options))
        history = trainer.state.log_history
        assert [r["step"] for r in history if "eval_reward" in r] == [0, 2, 4, 5]
        logs = [record for record in history if "loss" in record]
        assert [record["step"] for record in logs] == [1, 2, 4, 5]
        assert {"loss", "reward", "reward_std", "learning_rate", "completions/mean_length", "epoch"} <= logs[0].keys()
        assert {"train_loss", "train_runtime"} <= history[-1].keys()
        found = trainer.evaluate({"first": ROWS[:1], "second": ROWS[1:]})
        assert {"eval_first_reward", "eval_second_reward"} <= found.keys()

    def test_callbacks_and_the_state_that_rewards_see(self, make: Any) -> None:
        seen: list[str] = []
        steps = []

        class Watcher(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                assert state.is_world_process_zero
                assert args.per_device_train_batch_size == 3
                assert kwargs["model"] is not None
                assert kwargs["processing_class"] is not None

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
                seen.append(f"step {state.global_step}")
                control.should_training_stop = state.global_step == 2
                return control

        for event in ("on_init_end", "on_log", "on_train_end"):
            setattr(Watcher, event, lambda *_, event=event, **__: seen.append(event))

        def reward(completions: list[str], trainer_state: Any, number: list[int], **columns: Any) -> list[float]:
            steps.append(trainer_state.global_step)
            return [float(n) for n, _ in enumerate(completions)]

        callbacks = [Watcher, transformers.PrinterCallback(), transformers.ProgressCallback()]
        trainer = make(reward, logging_steps=1, callbacks=callbacks)
        trainer.remove_callback(transformers.PrinterCallback)
        assert isinstance(trainer.pop_callback(transformers.ProgressCallback), transformers.ProgressCallback)
        trainer.add_callback(transformers.ProgressCallback)
        trainer.train()
        assert seen == ["on_init_end", "step 1", "on_log", "step 2", "on_log", "on_log", "on_train_end"]
        assert steps == [0, 1]

    def test_callbacks_may_ask_whatever_the_strategies_say(self, make: Any, tmp_path: Path) -> None:
        rates: list[float] = []

        class Ask(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **kwargs: Any) -> Any:
                rates.extend(lr_scheduler.get_last_lr()[:1])
                control.should_save = control.should_evaluate = state.global_step == 2
                return control

        trainer = trained(make(held_out=ROWS[:1], callbacks=[Ask()], max_steps=4, save_strategy="no"))
        assert (tmp_path / "checkpoint-2").is_dir()
        assert [record["step"] for record in trainer.state.log_history if "eval_reward" in record] == [2]
        assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025])


class TestFolders:
    def test_checkpoints_and_resuming(self, make: Any, tmp_path: Path) -> None:
        class Stop(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                control.should_training_stop = state.global_step == 3

        whole = trained(make(out=tmp_path / "a", max_steps=4))
        out, options = tmp_path / "b", {"max_steps": 4, "save_steps": 2}
        stopped = make(out=out, callbacks=[Stop], **options)
        stopped.train()
        assert get_last_checkpoint(out) == str(out / "checkpoint-3")
        assert AutoModelForCausalLM.from_pretrained(out / "checkpoint-2").config.model_type == "llama"
        stopped.callback_handler.pop_callback(Stop)
        for resumed in (make(out=out, **options), stopped):  # a new trainer, and the one that was stopped
            resumed.train(resume_from_checkpoint=str(out / "checkpoint-2"))
            assert (resumed.state.global_step, changed(resumed, weights(whole))) == (4, set())

    @pytest.mark.parametrize("options", [{}, {"steps_per_generation": 2, "num_iterations": 2}], ids=str)
    def test_an_interrupt_of_a_callback_loses_no_record(self, options: Any, make: Any, tmp_path: Path) -> None:
        class Stop(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == 3:
                    raise KeyboardInterrupt

        options = {"max_steps": 6, "logging_steps": 1} | options
        whole = trained(make(out=tmp_path / "a", **options)).state.log_history
        with pytest.raises(KeyboardInterrupt):
            make(out=tmp_path / "b", callbacks=[Stop], **options).train()
        resumed = make(out=tmp_path / "b", **options)
        resumed.train(resume_from_checkpoint=True)
        again = resumed.state.log_history
        assert [(r["step"], r.get("loss")) for r in again] == [(r["step"], r.get("loss")) for r in whole]

    @pytest.mark.parametrize("strategy", ["steps", "no", "before a step"])
    def test_what_a_stopped_run_says_of_resuming_holds(self, strategy: str, make: Any, tmp_path: Path) -> None:
        """Also where no checkpoints are wanted, or none of step 0: the one of the stop is there."""
        options: dict[str, Any] = {"save_strategy": strategy}
        if strategy == "before a step":
            options = {"eval_strategy": "steps", "eval_on_start": True, "load_best_model_at_end": True}
            options |= {"save_steps": 1, "eval_steps": 1, "held_out": ROWS[:1], "per_device_eval_batch_size": 3}
        calls = []

        def fragile(completions: list[Any], **columns: Any) -> list[float]:
            calls.append(len(completions))
            if len(calls) > 1:
                raise ConnectionError("the judge is away")
            return unique_letters(completions)

        raises(RuntimeError, "the judge is away", make(fragile, **options).train)
        said = (tmp_path / "covey" / "log.txt").read_text()
        early, later = "No step was finished: start the run again", "`trainer.train(resume_from_checkpoint=True)`"
        assert (early if strategy == "before a step" else f"Nothing is lost: continue with {later}") in said
        assert make(**options).train(resume_from_checkpoint=True).global_step == 3
        first = json.loads((tmp_path / "covey" / "metrics.jsonl").read_text().splitlines()[0])
        assert first["step"] == (strategy != "before a step")

    def test_training_again(self, make: Any, tmp_path: Path) -> None:
        """A second `train`, and a cell that is run again, begin a new run. Nothing of the first one is lost, and its
        checkpoints go aside with it: their counts are not those of the new run.
        """
        options = {"save_steps": 1, "save_total_limit": 2}
        trainer = trained(make(max_steps=4, **options))
        assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
        assert len(list((tmp_path / "covey" / "checkpoints").glob("step_*"))) == 2
        before = weights(trainer)
        assert trainer.train().global_step == 4
        assert changed(trainer, before)
        make(max_steps=2, **options).train()
        assert {path.name for path in tmp_path.glob("covey*")} == {"covey", "covey-1", "covey-2"}
        assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
        assert make(**options).train(resume_from_checkpoint=True).global_step == 3


def test_an_optimiser_of_ones_own_and_saving(make: Any, model_folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    trainer = make(model=model, optimizers=(optimizer, schedule))
    before, metrics = weights(trainer), trainer.train().metrics
    assert changed(trainer, before)
    assert optimizer.param_groups[0]["lr"] == 0.5 * 0.5 ** int(trainer.run.state.updates)
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    trainer.save_model()
    assert json.loads((tmp_path / "all_results.json").read_text())["train_loss"] == metrics["train_loss"]
    assert (tmp_path / "trainer_state.json").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.model_type == "llama"
    assert (trainer.accelerator.is_main_process, trainer.is_world_process_zero()) == (True, True)
    assert trainer.accelerator.unwrap_model(trainer.model) is trainer.model


def test_what_is_impossible_is_one_clear_error(make: Any) -> None:
    for options, message in (
        ({"reward": None}, "No reward source provided"),
        ({"rows": None}, "`train_dataset` is required"),
        ({"fsdp": "full_shard"}, "fsdp"),
        ({"vllm_structured_outputs_regex": "a+"}, "reward the wanted form"),
        ({"generation_kwargs": {"beams": 2}}, "beams: transformers' generate has no such option"),
        ({"generation_kwargs": {"early_stopping": "soon"}}, "early_stopping"),
        ({"repetition_penalty": 1.1, "use_vllm": True, "vllm_mode": "server"}, "the server does not sample so"),
        ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef"),
        ({"optim": "adafactor"}, "AdamW"),
        ({"num_generations": 1}, "2 or more"),
        ({"per_device_train_batch_size": 4}, "whole groups"),
        ({"bf16": True, "fp16": True}, "fp16"),
        ({"auto_find_batch_size": True}, "per_device_train_batch_size"),
        ({"steps_per_generation": 3, "generation_batch_size": 3}, "follows from the other"),
        ({"report_to": "wandb"}, "wandb"),
        ({"loss_type": "mine"}, "mine"),
        ({"learning_rate": "1e-5"}, "learning_rate='1e-5'"),
        ({"max_steps": "10"}, "max_steps='10'"),
        ({"max_steps": 2.5}, "^max_steps=2.5"),
        ({"temperature": -1.0}, "^temperature=-1.0"),
        ({"deepspeed": "x.json"}, "deepspeed"),
        ({"vllm_mode": "x"}, "vllm_mode"),
        ({"delta": 1.1}, "^delta=1.1: below"),
        ({"reward": "rewards.py:exact"}, r"is passed itself: covey\.functions\.load_function\('rewards\.py:exact'\)"),
        ({"steps_per_generation": 0}, "steps_per_generation=0"),
        ({"eval_strategy": "steps", "per_device_eval_batch_size": 3}, "eval_dataset=None"),
        *(({name: value}, f"{name}=.*a whole number") for name in COUNTS for value in (1.5, "2", True)),
    ):
        raises(ValueError, message, make, **options)


def test_what_has_no_effect_is_said(make: Any) -> None:
    with pytest.warns(UserWarning, match="label_smoothing_factor=0.1 has no effect"):
        make(use_liger_kernel=False, torch_compile=False, label_smoothing_factor=0.1)
    with pytest.warns(UserWarning, match="paged_adamw_32bit': runs as plain AdamW"):
        make(optim="paged_adamw_32bit")


@pytest.mark.filterwarnings("ignore:vllm")
def test_a_script_of_an_earlier_version(make: Any) -> None:
    """Options that TRL no longer has, as the most copied scripts give them."""
    options: dict[str, Any] = {"run_name": "old", "adam_beta2": 0.99, "warmup_ratio": 0.1, "save_steps": 100}
    options |= {"lr_scheduler_type": "cosine", "logging_steps": 1, "bf16": True, "max_prompt_length": 4}
    options |= {"evaluation_strategy": "no", "max_grad_norm": 0.1, "log_on_each_node": False, "use_vllm": False}
    options |= {"vllm_gpu_memory_utilization": 0.3, "vllm_device": "cuda:0"}
    trainer = make(**options)
    assert (max(len(prompt.token_ids) for prompt in trainer.run.prompts), trainer.train().global_step) == (4, 3)


def test_arguments_from_a_command_line_and_from_yaml(tmp_path: Path) -> None:
    words = f"--output_dir {tmp_path} --num_generations 4 --beta 0.1 --reward_weights 1 2"
    (args,) = transformers.HfArgumentParser((GRPOConfig,)).parse_args_into_dataclasses(words.split())
    assert (args.beta, args.reward_weights, args.generation_batch_size) == (0.1, [1.0, 2.0], 8)
    assert GRPOConfig(**json.loads(args.to_json_string())).beta == 0.1
    args.learning_rate = 3e-5
    assert args.learning_rate == 3e-5
    path = tmp_path / "args.yaml"
    path.write_text("output_dir: out\nbeta: 0.2\nuse_peft: true\nlora_target_modules: [q_proj]\nnum_generations: 4\n")
    args, model = TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config(["--config", str(path), "--beta", "0.3"])
    assert (args.beta, args.num_generations) == (0.3, 4)
    lora: Any = get_peft_config(model)
    assert lora.target_modules == "q_proj"
    path.write_text("lora_r: 4\nunknown: 1\n")
    given = ["--config", str(path)]
    raises(ValueError, "--unknown: no such option", TrlParser(ModelConfig).parse_args_and_config, given)
    (args,) = TrlParser((ModelConfig,), prog="grpo").parse_args_and_config(given, fail_with_unknown_args=False)
    assert args.lora_r == 4
    apart = {"return_remaining_strings": True, "separate_remaining_strings": True}
    _, file, line = TrlParser((ModelConfig,)).parse_args_and_config([*given, "--more", "2"], **apart)
    assert (file, line) == (["--unknown", "1"], ["--more", "2"])


def test_rewards_of_trl() -> None:
    good, bad = "<think>\nso\n</think>\nfour", "<think>so <think></think>four"
    assert think_format_reward([good, bad, "four"]) == [1.0, 0.0, 0.0]
    punish = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    assert punish(completions=[""] * 3, completion_ids=[[1] * 80, [1] * 90, [1] * 100]) == [0.0, -0.5, -1.0]


def test_a_subclass_adds_to_what_is_logged_and_overrides_nothing_else(model_folder: Path, tmp_path: Path) -> None:
    class Mine(GRPOTrainer):
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            super().log(logs | {"mine": len(logs)})

    args = GRPOConfig(str(tmp_path), **SMALL, logging_steps=2)
    trainer = Mine(str(model_folder), unique_letters, args, ROWS, eval_dataset=ROWS[:1])
    trainer.train()
    trainer.evaluate()
    assert [record["mine"] > 3 for record in trainer.state.log_history] == [True] * 3
    with pytest.raises(ConfigError, match=r"Lossy\.compute_loss: is never called; .*loss_type='FILE\.py:NAME'"):
        type("Lossy", (GRPOTrainer,), {"compute_loss": lambda *_: None})


def test_errors_of_a_reward_function_explain_the_commonest_slips(make: Any) -> None:
    def words(completions: list[Any], **columns: Any) -> list[float]:
        return [float(len(completion.split())) for completion in completions]

    def one(completions: list[str], **columns: Any) -> list[float]:
        return [1.0]

    raises(RuntimeError, r'take its text by completion\[0\]\["content"\]', make(words, CHATS).train)
    raises(ValueError, "'one' returned 1 rewards for 3 completions", make(one).train)


def test_reward_functions_have_a_time_limit_if_one_is_set(make: Any) -> None:
    """Without one they are called in the main thread, as by TRL, where they may use signals."""
    threads: list[Any] = []

    def where(completions: list[str], **columns: Any) -> list[float]:
        threads.append(threading.current_thread())
        return messages(completions)

    for limit, in_main_thread in ((None, True), (30.0, False)):
        threads.clear()
        trainer = trained(make(where, reward_timeout=limit))
        assert {thread is threading.main_thread() for thread in threads} == {in_main_thread}
        assert trainer.run.data.scorer.timeout == limit


def swapped_parts(source: str) -> list[str]:
    """Parts of a run, or runs, whose attributes this source sets."""
    nodes = list(ast.walk(ast.parse(source)))
    found: list[ast.expr] = [n.value for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.args]
    found += [call.args[0] for call in calls if ast.unparse(call.func) in ("setattr", "vars", "patch", "patch.object")]
    return [text for text in map(ast.unparse, found) if re.match(r"(self\.|trainer\.)?run\b", text)]


def test_nothing_assigns_to_a_part_of_a_finished_trainer(make: Any) -> None:
    """What samples, scores, steps and listens is given to the constructor; no file of the door swaps a part later."""
    sources = [path.read_text() for path in Path(covey.trl.__file__).parent.rglob("*.py")]
    assert [part for source in sources for part in swapped_parts(source)] == []
    assert all(map(swapped_parts, ("self.run.engine = (\n3)", "run.a.b: int = 3", "vars(trainer.run)", "run.a.b += 1")))
    run = make().run
    assert not {name for name in vars(run) if callable(getattr(type(run), name, None))}  # no method is replaced
