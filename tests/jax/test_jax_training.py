"""`model.backend = "jax"`: the same recipes, run folder and command line, and PyTorch's numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from tiny_models import tiny_model, tiny_tokenizer

from command import Command
from covey import GRPOConfig, GRPOTrainer
from covey.errors import ConfigError, ModelError
from covey.jax.stacked import unstack
from covey.observe import describe_metric
from covey.observe.run_folder import RunFolder
from covey.training.replay import replay

GMPO = f"{Path(__file__).parents[2]}/recipes/gmpo/gmpo.py:gmpo"

ROWS = [{"prompt": f"say {word}: "} for word in ("one", "two", "three", "four", "five")]
VOLATILE = ("time/", "memory/", "step_time", "eval/seconds", "compiled")


def share_of_letters(completions: list[str], **columns: Any) -> list[float]:
    return [sum(c.isalpha() for c in text) / 8 for text in completions]


def build(settings: dict[str, Any], callbacks: Sequence[Any] = (), **changes: Any) -> GRPOTrainer:
    config = GRPOConfig(**(settings | {"backend": "jax"} | changes))
    data: dict[str, Any] = {"train_dataset": ROWS, "eval_dataset": ROWS[:2]}
    return GRPOTrainer(reward_funcs=share_of_letters, args=config, callbacks=callbacks, **data)


def steps_of(folder: str | Path) -> list[dict[str, Any]]:
    return [record for record in RunFolder.read(folder).read_metrics() if "loss" in record]


def test_a_step_that_is_computed_again_has_the_same_bits(settings: dict[str, Any]) -> None:
    build(settings, beta=0.1).train()
    report = replay(settings["output_dir"], 2, ["algorithm.loss_type=dr_grpo"], tolerance=0)
    assert report.exact
    assert report.changed is not None
    assert report.changed.gradient["cosine"] > 0


def test_a_run_has_the_numbers_that_it_has_in_pytorch(settings: dict[str, Any], tmp_path: Path) -> None:
    """All weights are trained, so both begin with the same ones; the reference pass and the evaluation are in it."""
    runs = {}
    for backend in ("pytorch", "jax"):
        out = str(tmp_path / backend)
        build(
            settings, backend=backend, output_dir=out, use_peft=False, learning_rate=1e-3, beta=0.1, max_steps=4
        ).train()
        runs[backend] = out
    for theirs, ours in zip(steps_of(runs["pytorch"]), steps_of(runs["jax"]), strict=True):
        assert set(theirs) <= set(ours)
        for name in ("reward", "loss", "kl", "entropy", "grad_norm", "completions/mean_length", "num_tokens"):
            assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=2e-6), name
    for step in (1, 4):
        said = [[row["completion"] for row in RunFolder.read(run).read_completions(step)] for run in runs.values()]
        assert said[0] == said[1]


def test_it_learns_with_an_adapter_that_peft_reads(settings: dict[str, Any]) -> None:
    trainer = build(settings, max_steps=15, num_generations=8, beta=0.0, learning_rate=0.03)
    trainer.train()
    steps = steps_of(settings["output_dir"])
    late, early = (np.mean([record["reward"] for record in part]) for part in (steps[-4:], steps[:4]))
    assert late > early + 0.1
    assert max(record.get("sampling/sampling_logp_difference/max", 0.0) for record in steps) < 1e-4
    for record in steps:
        assert [name for name in record if describe_metric(name) is None] == []
    folder = RunFolder.read(settings["output_dir"])
    read = PeftModel.from_pretrained(tiny_model("llama"), str(folder.adapter))
    ids = torch.arange(4, 24)[None]
    with torch.no_grad():
        theirs = read(ids).logits.numpy()
    policy: Any = trainer.policy
    variables = {name: unstack(tree, 2) for name, tree in policy.variables.items()}
    np.testing.assert_allclose(policy.transformer.apply(variables, ids.numpy()), theirs, atol=2e-4)
    again = build(settings, adapter=str(folder.adapter), output_dir=settings["output_dir"] + "-again")
    assert again.evaluate()["eval/reward"] == pytest.approx(trainer.evaluate()["eval/reward"])


def count_programs(settings: dict[str, Any], **changes: Any) -> list[int]:
    """Programs compiled by engine and learner after each step."""
    compiled: list[int] = []

    class Count:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            parts: tuple[Any, ...] = (trainer.engine, trainer.learner)
            compiled.append(sum(part.compilations for part in parts))

    if "world" in changes:
        trainer = GRPOTrainer(args=GRPOConfig(**(settings | {"backend": "jax"} | changes)), callbacks=[Count()])
    else:
        trainer = build(settings, [Count()], **changes)
    trainer.train()
    return compiled


def test_nothing_is_compiled_after_the_first_step(settings: dict[str, Any]) -> None:
    """Prompts and completions of many lengths, most completions over before the others, a reference and evaluations."""
    changes = {"max_steps": 14, "beta": 0.1, "learning_rate": 1e-6, "max_completion_length": 40, "eval_steps": 4}
    compiled = count_programs(settings, num_generations=8, prompts_per_step=2, **changes)
    steps = steps_of(settings["output_dir"])
    assert len({round(record["completions/mean_length"], 3) for record in steps}) > 8
    assert 0 < compiled[0] == compiled[-1]


def test_agents_share_few_programs(settings: dict[str, Any]) -> None:
    """Lengths of episodes are not known before they are played, but for the limit of the conversation."""
    played: dict[str, Any] = {"world": "house:rooms=2,num_train=6,num_eval=3", "max_conversation_tokens": 600}
    compiled = count_programs(settings, max_steps=6, action_format="choice", max_completion_length=16, **played)
    assert compiled[2] == compiled[-1]


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "gspo", "num_iterations": 2, "kl_estimator": "exact", "beta": 0.1},
        {"loss_type": GMPO, "loss_parameters": {"clip": 0.3}, "num_iterations": 2},
        {"loss_type": "kl_cov", "adaptive_entropy": {"target": 9.0}},
        {"reference_drift_threshold": 0.5, "reference_update_steps": 1},
        {"reference_ema_decay": 0.99, "reference_update_steps": 1, "off_policy_mask_threshold": 0.0},
        {"keep_sampling_mask": True, "top_k": 5, "top_p": 0.9, "top_entropy_quantile": 0.5},
        {"stop_strings": ("a",), "dynamic_sampling": 3, "sampler_dtype": "bfloat16",
         "importance_sampling_correction": "token_truncate"},
        {"max_generations": 9, "down_sampling": "max_variance:3"},
        {"lora_target_modules": ["q_proj", "down_proj"], "gradient_checkpointing": True, "dtype": "bfloat16"},
    ],
    ids=str,
)  # fmt: skip
def test_variants_train(settings: dict[str, Any], changes: dict[str, Any]) -> None:
    trainer = build(settings, **({"max_steps": 2} | changes))
    assert trainer.train().global_step == 2
    assert all(np.isfinite(record["loss"]) for record in steps_of(settings["output_dir"]))


def test_a_stopped_run_goes_on_to_the_same_numbers(settings: dict[str, Any], tmp_path: Path) -> None:
    changes = {"max_steps": 4, "beta": 0.1, "reference_ema_decay": 0.99, "reference_update_steps": 1, "save_steps": 2}
    whole, broken = str(tmp_path / "whole"), str(tmp_path / "broken")
    build(settings, output_dir=whole, **changes).train()

    class Stop:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                raise KeyboardInterrupt

    config = GRPOConfig(**(settings | {"backend": "jax", "output_dir": broken} | changes))
    parts: dict[str, Any] = {"args": config, "train_dataset": ROWS, "eval_dataset": ROWS[:2]}
    with pytest.raises(KeyboardInterrupt):
        GRPOTrainer(reward_funcs=share_of_letters, callbacks=[Stop()], **parts).train()
    RunFolder.read(broken)
    step_two = Path(broken) / "checkpoints" / "step_000002"
    GRPOTrainer(reward_funcs=share_of_letters, **parts).train(resume_from_checkpoint=step_two)

    def numbers(run: str) -> list[dict[str, Any]]:
        records = RunFolder.read(run).read_metrics()
        return [{n: v for n, v in record.items() if not n.startswith(VOLATILE)} for record in records]

    assert numbers(broken) == numbers(whole)
    weights = [Path(run, "adapter", "adapter_model.safetensors").read_bytes() for run in (whole, broken)]
    assert weights[0] == weights[1]


def test_agents_act_as_they_do_in_pytorch(settings: dict[str, Any], tmp_path: Path) -> None:
    played = settings | {
        "world": "house:rooms=2,num_train=6,num_eval=3",
        "max_steps": 2,
        "max_conversation_tokens": 600,
        "action_format": "choice",
        "max_completion_length": 16,
        "adv_estimator": "gigpo",
        "use_peft": False,
        "learning_rate": 1e-3,
    }
    played.pop("output_dir")
    runs = [tmp_path / backend for backend in ("pytorch", "jax")]
    for run in runs:
        GRPOTrainer(args=GRPOConfig(**played, backend=run.name, output_dir=str(run))).train()
    for theirs, ours in zip(*map(steps_of, runs), strict=True):
        assert ours.get("sampling/sampling_logp_difference/max", 0.0) < 1e-3
        for name in ("reward", "loss", "grad_norm", "agent/turns"):
            assert ours[name] == pytest.approx(theirs[name], rel=5e-3, abs=1e-5), name
    said = [[row["completion"] for row in RunFolder.read(run).read_completions(2)] for run in runs]
    assert said[0] == said[1]


def test_a_mesh_changes_nothing_but_where_it_runs(settings: dict[str, Any], tmp_path: Path) -> None:
    """Two parts of the completions times two of the weights, on forced host devices, against one device."""
    recipe = tmp_path / "recipe.toml"
    changes = {"backend": "jax", "task": "arithmetic:num_eval=4", "max_steps": 2, "use_peft": False, "beta": 0.1}
    recipe.write_text(GRPOConfig(**(settings | changes)).to_toml())
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "HF_HUB_OFFLINE": "1"}
    runs = {"one": "data=1", "four": "data=2,tensor=2"}
    for name, mesh in runs.items():
        command = [sys.executable, "-m", "covey", "train", str(recipe), f"model.mesh={mesh}"]
        command += [f"run.output_dir={tmp_path / name}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    for one, four in zip(*(steps_of(tmp_path / name) for name in runs), strict=True):
        for metric in ("reward", "loss", "kl", "grad_norm", "num_tokens"):
            assert four[metric] == pytest.approx(one[metric], rel=1e-3, abs=1e-6), metric
    said = [[row["completion"] for row in RunFolder.read(tmp_path / name).read_completions(2)] for name in runs]
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_dropout": 0.1}, r"model\.lora_dropout=0\.1.*set it to 0"),
        ({"dtype": "float16"}, r"model\.dtype='float16'.*float32 or bfloat16"),
        ({"max_staleness": 1}, r"schedule\.max_staleness=1"),
        ({"mesh": "data=4096"}, r"model\.mesh='data=4096': 4096 devices"),
        ({"backend": "pytorch", "mesh": "data=2"}, r"model\.mesh='data=2'.*model\.backend to jax"),
        ({"device": "cuda"}, r"model\.device='cuda': JAX sees none"),
        ({"lora_target_modules": ["lm_head"]}, "lora_modules='lm_head'"),
    ],
)
def test_what_cannot_work_is_said_at_once(settings: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(settings, **changes)


def test_a_tokenizer_of_another_model_is_refused(settings: dict[str, Any]) -> None:
    small = tiny_model("llama")
    small.resize_token_embeddings(50)
    config = GRPOConfig(**(settings | {"backend": "jax"}))
    with pytest.raises(ModelError, match="use the tokenizer that belongs to the model"):
        GRPOTrainer(small, share_of_letters, config, ROWS, processing_class=tiny_tokenizer())


def test_the_command_line(covey: Command, settings: dict[str, Any], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(GRPOConfig(**(settings | {"max_steps": 1, "task": "arithmetic:num_eval=4"})).to_toml())
    status, _, error = covey("train", recipe, "--backend", "jax")
    assert status == 0, error
    folder = RunFolder.read(settings["output_dir"])
    assert 'backend = "jax"' in folder.config_path.read_text()
    status, _, error = covey("sample", settings["output_dir"], "hello")
    assert status == 0, error
    status, _, error = covey("plan", recipe, "model.backend=jax")
    assert status == 0, error
    status, _, error = covey("train", recipe, "--backend", "tensorflow", f"run.output_dir={tmp_path / 'other'}")
    assert status == 2
    assert "tensorflow" in error
