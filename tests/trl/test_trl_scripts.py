"""What scripts ask for beside training: older versions' batches, tables, trackers, rollouts, `model.generate`."""

import io
import math
import re
import signal
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import pytest
import torch
from rich.console import Console
from tiny_models import END_ID, PAD_ID
from tiny_vision import picture, vision_folder
from transformers import AutoModelForImageTextToText, GenerationMixin
from trl_runs import ROWS, Seen, changed, trained, unique_letters, weights

from covey.errors import ConfigError, GenerationError
from covey.trl import (
    DatasetMixtureConfig,
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    RichProgressCallback,
    ScriptArguments,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)
from covey.trl.arguments import warned
from covey.trl.experimental.openenv import generate_rollout_completions
from covey.trl.rewards import think_format_reward
from covey.trl.tables import columns, send, show
from covey.trl.translate import settings
from fakes import raises


def test_options_of_other_machines_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch below one group is raised to one, but not where the generation's size is the script's choice."""
    batch = {"num_generations": 16, "per_device_train_batch_size": 1}
    with pytest.warns(UserWarning, match="per_device_train_batch_size=1 times gradient_accumulation_steps=4"):
        args = GRPOConfig("out", **batch, gradient_accumulation_steps=4)
    assert (args.per_device_train_batch_size, args.generation_batch_size) == (16, 64)
    raises(ConfigError, "whole groups", GRPOConfig, "out", **batch, steps_per_generation=4)
    monkeypatch.setattr("covey.trl.arguments.is_torch_tf32_available", lambda: False)
    with pytest.warns(UserWarning, match="tf32=True has no effect"):
        args = GRPOConfig("out", tf32=True, report_to=None)
    assert (args.tf32, args.report_to) == (None, [])
    for given, kept in ((["none"], []), (["tensorboard"], ["tensorboard"])):
        assert GRPOConfig("out", report_to=given).report_to == kept


class Letters(torch.utils.data.Dataset[dict[str, str]]):
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> dict[str, str]:
        return ROWS[index]


def test_what_a_script_reads_around_a_run(make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = []

    def reward(completions: list[str], **rest: Any) -> list[float]:
        threads.append(signal.signal(signal.SIGALRM, signal.SIG_DFL))  # raises in any thread but the main one
        return unique_letters(completions)

    options = {"max_steps": -1, "num_train_epochs": 0.5, "log_completions": True, "num_completions_to_print": 2}
    options |= {"callbacks": [RichProgressCallback()], "logging_steps": 1}
    trainer = trained(make(reward, Letters(), ROWS[:2], **options))
    assert threads
    assert trainer.state.global_step == 2  # half of four prompts
    trainer.args.distributed_state.wait_for_everyone()
    printed = capsys.readouterr().out
    assert (printed.count("advantage"), "Step 2/2" in printed) == (2, True)
    metrics = trainer.evaluate()
    assert metrics["eval_runtime"] > 0
    expected = 2 / metrics["eval_seconds"]
    assert metrics["eval_samples_per_second"] == pytest.approx(expected, rel=0.01)
    assert metrics["eval_steps_per_second"] == pytest.approx(expected / 2, rel=0.01)  # six completions, eight a batch
    trainer.create_model_card({"tags": ["mini"]})
    assert "mini" in (tmp_path / "README.md").read_text()
    for call in (trainer.get_train_dataloader, trainer.get_eval_dataloader, lambda: trainer.predict(ROWS)):
        raises(ConfigError, r"no data loader|no labels", call)
    trainer.end()


def test_a_table_of_completions_on_the_screen_and_at_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": text, "completion": f"c{n}", "reward": 1.0, "rewards/f": n / 4, "advantage": n - 1.0, "note": n}
        for n, text in enumerate("ppq")
    ]
    table = columns(rows, 7)
    assert (list(table), table["f"]) == (["step", "prompt", "completion", "f", "note", "advantage"], [0.0, 0.25, 0.5])
    assert columns(rows, 7, unique_prompts=True)["completion"] == ["c0", "c2"]
    console = Console(width=100, record=True, file=io.StringIO())
    show(table, 2, console)
    chat = '[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]'
    show(table | {"prompt": [chat] * 3}, 1, chats := Console(width=100, record=True, file=io.StringIO()))
    shown = [cell.strip() for cell in re.findall(r"│ ([^│]+)│", chats.export_text())]
    words = ["SYSTEM", "Be brief.", "USER", "Why?"]
    assert [word for word in shown if word in words] == words
    text = console.export_text()
    assert ("Step 7" in text, sum(f"c{at}" in text for at in range(3))) == (True, 2)
    sent: list[Any] = []
    wandb: Any = types.ModuleType("wandb")
    wandb.run, wandb.log = object(), sent.append
    wandb.Table = lambda columns, data: (columns, data)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    writer = types.SimpleNamespace(add_text=lambda *given: sent.append(given))
    send(table, ["wandb", "tensorboard"], [types.SimpleNamespace(tb_writer=writer), object()])
    names, data = sent[0]["completions"]
    assert (names, data[2]) == (list(table), [7, "q", "c2", 0.5, 2, 1.0])
    name, lines, step = sent[1]
    assert (name, lines.splitlines()[-1], step) == ("completions", "| 7 | q | c2 | 0.5 | 2 | 1.0 |", 7)


def test_rollouts_of_openenv_examples(make: Any) -> None:
    seen = []

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        outputs = generate_rollout_completions(trainer, prompts)
        seen.append([output["text"] for output in outputs])
        for output in outputs:
            ids = output["prompt_ids"] + output["completion_ids"]
            with torch.no_grad():
                logits = trainer.model(torch.tensor([ids])).logits[0, len(output["prompt_ids"]) - 1 : -1]
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(output["completion_ids"])[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(output["logprobs"]), expected, atol=1e-4, rtol=0)
            output["size"] = float(len(set(output["completion_ids"])))
        names = ("prompt_ids", "completion_ids", "logprobs", "size")
        return {name: [output[name] for output in outputs] for name in names}

    trainer = trained(make(lambda completions, size, **rest: size, max_steps=2, rollout_func=rollout))
    assert len(seen) == 2
    assert all(len(texts) == 3 and len(set(texts)) > 1 for texts in seen)  # different ones of the same prompt
    with pytest.raises(ConfigError, match="generation_overrides"):
        generate_rollout_completions(trainer, ["Flat is"], generation_overrides={"max_tokens": 3})


def test_a_mixture_of_datasets(tmp_path: Path) -> None:
    datasets: Any = pytest.importorskip("datasets")
    parts: list[dict[str, Any]] = []
    for name, count in (("a", 8), ("b", 4)):
        rows = {"prompt": [f"{name}{n}" for n in range(count)], "other": [0] * count}
        datasets.Dataset.from_dict(rows).to_json(tmp_path / name)
        parts.append({"path": "json", "data_files": str(tmp_path / name), "columns": ["prompt"], "fraction": 0.5})
    mixed = get_dataset(DatasetMixtureConfig(datasets=list(parts)))
    assert mixed["train"]["prompt"][:] == [f"{name}{n}" for name in "ab" for n in range(4)]
    whole = [part | {"fraction": None} for part in parts]
    split = get_dataset(DatasetMixtureConfig(datasets=list(whole), test_split_size=0.25))
    assert (len(split["train"]), len(split["test"])) == (9, 3)
    raises(ConfigError, "every dataset or for none", get_dataset, DatasetMixtureConfig(datasets=[parts[0], whole[1]]))
    raises(ConfigError, "nothing to mix", get_dataset, DatasetMixtureConfig())


@pytest.mark.slow
def test_a_script_for_a_vision_model(tmp_path: Path) -> None:
    """As TRL's `grpo_vlm.py`: its command line, a `Dataset` of pictures that is mapped and filtered, two rewards."""
    datasets: Any = pytest.importorskip("datasets")
    folder = vision_folder("smolvlm", tmp_path / "model")
    line = f"--model_name_or_path {folder} --output_dir {tmp_path / 'out'} --max_steps 2 --report_to none --use_peft "
    line += "--lora_target_modules q_proj, v_proj --per_device_train_batch_size 2 --gradient_accumulation_steps 2 "
    line += "--num_generations 2 --max_completion_length 8 --log_completions --eval_strategy steps --eval_steps 1"
    parsed = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config(args=line.split())
    args, model = parsed[1:]
    args.model_init_kwargs = {"revision": model.model_revision, "attn_implementation": model.attn_implementation}
    assert get_quantization_config(model) is None
    images = [picture(0), picture(1, 50), picture(2).convert("RGBA"), picture(3).convert("L"), picture(4, 600)] * 2
    rows = {"image": images, "problem": [f"What is {n}?" for n in range(10)], "solution": [f"${n}$" for n in range(10)]}
    data = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    data = data.map(lambda row: {"prompt": [{"role": "system", "content": "Think."}, asked(row["problem"])]})
    data = data.filter(lambda row: max(row["image"].size) < 512)
    data = data.map(lambda row: {**row, "image": row["image"].convert("RGB")}).train_test_split(test_size=2, seed=42)
    kinds = set[str]()

    def accuracy(completions: list[Any], solution: list[str], image: list[Any], **rest: Any) -> list[float]:
        kinds.update(each.mode for each in image)
        return [float(done[0]["content"] in right) for done, right in zip(completions, solution, strict=True)]

    rewards: Any = [think_format_reward, accuracy]
    how: Any = {"train_dataset": data["train"], "eval_dataset": data["test"], "peft_config": get_peft_config(model)}
    trainer = GRPOTrainer(model=model.model_name_or_path, args=args, reward_funcs=rewards, **how)
    trainer.train()
    assert (trainer.state.global_step, kinds) == (2, {"RGB"})
    trainer.save_model(args.output_dir)
    assert (tmp_path / "out" / "adapter_config.json").is_file()
    AutoModelForImageTextToText.from_pretrained(folder).load_adapter(tmp_path / "out")


def asked(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_model_options_of_open_r1_load_the_model(make: Any) -> None:
    """Flash attention, which is not installed here, is no reason to stop: attention is Covey's own."""
    options = {"revision": "main", "attn_implementation": "flash_attention_2", "use_cache": False, "device_map": None}
    for dtype in (torch.bfloat16, "bfloat16"):
        given = {"model_init_kwargs": options | {"torch_dtype": dtype}, "lr_scheduler_type": "constant_with_warmup"}
        assert {parameter.dtype for parameter in make(**given).model.parameters()} == {torch.float32}


BODIES = [({"status": "ok", "policy_version": 3}, "covey"), ({"status": "ok"}, "vllm"), (None, "vllm")]


@pytest.mark.parametrize(("body", "kind"), BODIES)
def test_the_server_says_what_it_is(body: dict[str, Any] | None, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def get(url: str, timeout: float) -> httpx.Response:
        asked.append(url)
        if body is None:
            raise httpx.ConnectError("nobody listens")
        return httpx.Response(200, json=body)

    monkeypatch.setattr("covey.trl.translate.httpx.get", get)
    args = GRPOConfig("out", use_vllm=True, vllm_mode="server", vllm_server_port=8123, top_k=-1)
    found = settings(args, num_prompts=8, lora=True)
    assert asked == ["http://127.0.0.1:8123/health"]  # not 0.0.0.0, where a server listens
    assert (found.server.inference_server_url, found.server.inference_server_kind) == ("http://127.0.0.1:8123", kind)
    assert found.sampling.top_k == 0


def test_vllm_in_this_process_if_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(found: bool) -> None:
        for module in ("arguments", "translate"):
            monkeypatch.setattr(f"covey.trl.{module}.vllm_is_installed", lambda: found)

    def asked(**more: Any) -> Any:
        args = GRPOConfig("out", use_vllm=True, **more)
        assert not list(warned(args))
        return settings(args, num_prompts=8, lora=True)

    installed(False)
    args = GRPOConfig("out", use_vllm=True, vllm_mode="colocate")
    (said,) = warned(args)
    assert said.startswith("use_vllm=True with vllm_mode='colocate' has no effect: vLLM is not installed here")
    assert settings(args, num_prompts=8, lora=True).sampling.engine == "covey"
    assert not list(warned(GRPOConfig("out")))
    installed(True)
    plain, arguments = asked(), {"enable_sleep_mode": False, "tensor_parallel_size": 1}
    assert (plain.sampling.engine, plain.vllm.gpu_memory_utilization) == ("vllm", 0.3)
    assert plain.vllm.llm_arguments == arguments
    assert plain.algorithm.correction.mode == "sequence_mask"  # TRL's default
    more = asked(vllm_enable_sleep_mode=True, vllm_max_model_len=512, vllm_model_impl="transformers")
    expected = arguments | {"enable_sleep_mode": True, "max_model_len": 512, "model_impl": "transformers"}
    assert more.vllm.llm_arguments == expected
    correction = asked(vllm_importance_sampling_correction=False).algorithm.correction
    assert correction.cap == np.float32(correction.floor) == 1  # ratios begin at the learner's own, of weight 1
    assert asked(repetition_penalty=1.1).sampling.engine == "covey"  # the model's own generate samples


@pytest.mark.parametrize("where", ["model", "transformers"])
def test_a_generate_that_was_replaced_samples(where: str, make: Any) -> None:
    """What follows the end of a turn is padding; a turn without an end is cut off; all of it is trained on."""
    seen = Seen()
    turns = ([5, 6, END_ID], list(range(10, 21)), [7, END_ID, 8])
    padded = torch.tensor([[*turn, *[PAD_ID] * (11 - len(turn))] for turn in turns])
    trainer = make(seen, max_steps=2, mask_truncated_completions=True)
    before = weights(trainer)
    target = trainer.model if where == "model" else GenerationMixin
    with patch.object(target, "generate", side_effect=lambda input_ids, **_: torch.cat([input_ids, padded], dim=1)):
        trainer.train()
    assert seen.all("completion_ids") == [[5, 6, END_ID], list(range(10, 18)), [7, END_ID]] * 2
    last = trainer.state.log_history[-1]
    assert last["completions/clipped_ratio"] == pytest.approx(1 / 3)
    assert last["sampling/sampling_logp_difference/max"] == pytest.approx(0, abs=1e-4)
    assert changed(trainer, before) == set(before)


@pytest.mark.slow
def test_options_of_generate(make: Any, tmp_path: Path) -> None:
    """A prohibitive penalty leaves no token twice, which shows that it is applied; without one some come again."""

    def repeated(name: str, **options: Any) -> int:
        seen = Seen()
        make(seen, out=tmp_path / name, max_steps=6, **options).train()
        return sum(len(ids) - len(set(ids)) for ids in seen.all("completion_ids"))

    assert repeated("without", top_k=5) > 0
    assert repeated("with", top_k=5, repetition_penalty=1e6) == 0
    assert repeated("kwargs", top_k=5, generation_kwargs={"no_repeat_ngram_size": 1}) == 0


def test_resuming_draws_what_the_unbroken_run_does(make: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"generation_kwargs": {"num_beams": 2, "length_penalty": -0.1}, "save_steps": 1}
    whole = trained(make(Seen(), max_steps=2, **options))
    resumed = make(Seen(), max_steps=2, **options)
    torch.rand(5)  # whatever else draws from torch's own stream
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert changed(resumed, weights(whole)) == set()


def test_a_generate_that_does_not_work(make: Any, tmp_path: Path) -> None:
    for message, generate in {
        "at least one more token": lambda input_ids, **_: input_ids,
        "as many rows": lambda input_ids, **_: torch.cat([input_ids, input_ids])[:, :1],
        "ZeroDivisionError": lambda **_: 1 / 0,
    }.items():
        trainer = make(Seen(), out=tmp_path / message, max_steps=2)
        trainer.model.generate = generate
        raises(GenerationError, message, trainer.train)


def test_formulas_by_hand() -> None:
    """As methods of TRL's trainer, with Covey's values behind them."""
    entropy = torch.tensor([[4.0, 1.0, 3.0], [2.0, 9.0, 5.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 1]])
    trainer: Any = None
    above = {0.0: [[1, 1, 1], [1, 0, 1]], 0.5: [[1, 0, 1], [0, 0, 1]], 1.0: [[0, 0, 0], [0, 0, 1]]}  # the median is 3
    for threshold, expected in above.items():
        assert GRPOTrainer.get_high_entropy_mask(trainer, entropy, mask, threshold).int().tolist() == expected
    gate = GRPOTrainer.get_sapo_token_loss(torch.tensor([1.0, 2.0]), 2.0)
    assert gate.tolist() == pytest.approx([1.0, 2 / (1 + math.exp(-2))])
    policy, mask = [[-3.0, 0.0], [-1.0, 50.0], [-9.0, -9.0]], [[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
    given = map(torch.tensor, ([[-1.0], [-1.0], [1.0]], policy, [[0.0, 0.0]] * 3, mask))
    assert GRPOTrainer.get_off_policy_mask(*given, 1.2).tolist() == [[0.0], [1.0], [1.0]]
    given = map(torch.tensor, ([[1.0], [-1.0]], [[0.1, 0.2], [0.1, 7.0]], [[1, 1], [1, 0]]))
    phi = GRPOTrainer.get_gamma_weights(*given, None)
    w, v = math.exp(0.3), math.exp(0.1)
    assert phi[:, 0].tolist() == pytest.approx([w**2 * math.exp(3 * (1 - w)), v**3 * math.exp(2 * (1 - v))])


def test_the_engine_samples_where_nothing_was_replaced_and_the_reference_stays(make: Any) -> None:
    trainer = make(max_steps=2, beta=0.1)
    before = {name: p.clone() for name, p in trainer.ref_model.named_parameters()}
    assert set(before) == set(weights(trainer))
    with patch.object(type(trainer.run.engine), "turns", side_effect=AssertionError):
        trainer.train()
    assert all(torch.equal(old, trainer.ref_model.get_parameter(name)) for name, old in before.items())
    assert changed(trainer, before) == set(before)


@pytest.mark.parametrize("name", ["SFTTrainer", "DPOConfig", "LogCompletionsCallback", "is_conversational"])
def test_what_trl_has_besides_is_one_sentence(name: str) -> None:
    import covey.trl

    words = rf"^covey\.trl has no {name}: it has GRPO and teachers; if it is TRL's, import it from trl"
    raises(ImportError, words, exec, f"from covey.trl import {name}")
    for module in (covey, covey.trl):
        raises(AttributeError, f"^module '{module.__name__}' has no attribute '{name}'$", getattr, module, name)
    if name[0].isupper():
        raises(ImportError, f"^covey has no {name}; if it is TRL's, see covey.trl", exec, f"from covey import {name}")
