"""What a recipe costs by two steps, which leave nothing behind; and by formula, without GPU and weights."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import Settings, always, build, rewarding, same_weights, trained
from transformers import GPT2Config, LlamaConfig

from command import Command
from covey import GRPOConfig
from covey.errors import ConfigError, ModelError
from covey.training.checkup import Plan, Recipe, checkup, measure

reward = rewarding("reward", lambda text: float(len(set(text))))


def slow_reward(completions: list[str], **columns: Any) -> Any:
    time.sleep(1)
    return reward(completions)


def part_of(plan: Plan, name: str) -> float:
    return next(part.amount for part in plan.seconds if part.name == name)


def test_a_plan_has_every_part_and_writes_nothing(settings: Settings) -> None:
    """A reward so slow that what else runs on the machine is nothing beside it."""
    plan = measure(build(settings, slow_reward, max_steps=10, beta=0.0))
    assert not Path(settings["output_dir"]).exists()
    assert all(part.amount >= 0 for part in (*plan.seconds, *plan.memory))
    assert part_of(plan, "update") > 0
    plans = (plan, measure(build(settings, reward, max_steps=10, beta=0.0)))  # one may be interrupted
    assert min(part_of(each, "reference log-probabilities") for each in plans) < 1e-3  # beta is 0
    assert plan.run_seconds == pytest.approx(10 * plan.step_seconds)
    assert plan.peak_bytes == pytest.approx(sum(part.amount for part in plan.memory))
    assert 1 <= plan.mean_length <= settings["max_completion_length"]
    assert min(part_of(plan, "rewards"), plan.step_seconds) > 1  # a step waits for its rewards


def test_samples_that_fail_and_run_on_are_no_trouble_where_greedy_answers_are_right(settings: Settings) -> None:
    trainer = build(settings, reward, beta=0.0)
    plan = measure(trainer)
    assert 1 <= plan.untrained["eval/num_completions"] <= 8
    babble = {"reward": 0.01, "reward_std": 0.03, "frac_reward_zero_std": 0.88, "completions/clipped_ratio": 0.84}
    for right, cut, said in ((0.5, 0.1, []), (0.05, 0.1, ["groups_all_wrong"]), (0.5, 0.6, ["completions_truncated"])):
        untrained = {"eval/reward": right, "eval/completions/clipped_ratio": cut}
        assert [one.code for one in checkup(trainer, replace(plan, metrics=babble, untrained=untrained))] == said


def test_the_steps_are_those_of_the_run(settings: Settings) -> None:
    """The probe's two steps and the run's first two move the weights alike."""
    settings |= {"max_steps": 2, "lr_scheduler_type": "constant", "beta": 0.0}
    planned = build(settings, reward)
    measure(planned)
    assert same_weights(planned, trained(settings, reward))


def test_evaluations_updates_and_the_reference_cost_only_where_they_are_made(settings: Settings) -> None:
    for changes, wanted in (
        ({"eval_steps": 2}, 4),  # after steps 2, 4 and 5, and before the first
        ({"eval_steps": 2, "eval_at_end": False}, 3),
        ({"eval_on_start": False, "eval_at_end": False}, 0),
        ({"eval_on_start": False}, 1),
    ):
        assert measure(build(settings, reward, held_out=1, max_steps=5, **changes)).num_evaluations == wanted, changes
    plan = measure(build(settings, always, beta=0.0))
    assert (plan.mixed_share, part_of(plan, "update")) == (0, 0)
    seconds = measure(build(settings, reward, beta=0.04)).seconds
    reference = next(part for part in seconds if part.name == "reference log-probabilities")
    assert reference.amount > 1e-4
    assert reference.advice == "algorithm.beta=0: none"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a billion weights of which there is the configuration alone."""
    found = tmp_path_factory.mktemp("model")
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "architectures": ["LlamaForCausalLM"]}
    sizes = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    LlamaConfig(**sizes, **heads, max_position_embeddings=131072, tie_word_embeddings=True).save_pretrained(found)
    return found


def recipe_of(folder: Path, **settings: Any) -> Recipe:
    return Recipe.of(GRPOConfig(model=str(folder), **settings))


def held(folder: Path, **settings: Any) -> dict[str, float]:
    return recipe_of(folder, **settings).phases(24e9)["held"]


def test_what_fits_fits_and_one_token_more_does_not(folder: Path) -> None:
    recipe, room = recipe_of(folder), 12e9
    longest, tokens = recipe.longest(room), recipe.tokens(room)
    assert recipe.peak(room) <= room
    assert 1024 < longest < 131072 - recipe.prompt
    assert recipe.peak(24e9, own=longest) <= room < recipe.peak(24e9, own=longest + 1)
    assert recipe.peak(24e9, tokens=tokens) <= room < recipe.peak(24e9, tokens=tokens + 1)
    assert replace(recipe, config=recipe.config.replace(max_completion_length=longest + 1)).peak(room) > room
    assert recipe.longest(141e9) == 131072 - recipe.prompt  # no further than the model was built for


def test_what_cannot_be_is_refused(folder: Path, tmp_path: Path) -> None:
    GPT2Config(n_embd=64, n_layer=2, n_head=2, architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path / "gpt2")
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}')
    for model, settings, error, words in (
        (folder, {"lora_r": 1000000}, ModelError, r"^model\.lora_r=1000000: more than"),
        (tmp_path / "gpt2", {"quantization": "nf4"}, ModelError, "has no linear layers that could be quantised"),
        (tmp_path / "gpt2", {"adapter": str(tmp_path / "none")}, ModelError, r"holds no adapter_config\.json"),
        (tmp_path, {}, ModelError, "its configuration cannot be read"),
        (folder, {"optimizer": "adamw_8bit", "offload": True}, ConfigError, "paged_adamw_8bit moves its moments by it"),
        (folder, {"device": "cpu"}, ConfigError, r"model\.device='cpu' and --device-memory"),
        (folder, {"learner_kind": "sharded"}, ConfigError, r"learner_kind='sharded' and --device-memory"),
        (folder, {"sampler_dtype": "int8"}, ConfigError, r"sampler_dtype='int8' and --device-memory"),
    ):
        with pytest.raises(error, match=words):
            recipe_of(model, **settings)


def test_each_setting_takes_what_it_says(folder: Path) -> None:
    """Parts by hand: b of bfloat16 is 2; 1,235,814,400 weights, 973,146,112 of them in layers and the last norm."""
    parts = recipe_of(folder, num_generations=4, prompts_per_step=2, max_completion_length=500).phases(24e9)
    assert parts["held"]["weights"] == 2 * 1_235_814_400
    assert parts["sampling"]["sampler's copy of the layers"] == 2 * (1_235_814_400 - 128256 * 2048)
    token = 2 * 16 * 8 * 64 * 2
    assert parts["sampling"]["keys and values"] == token * (8 * 500 + 2 * 512)
    few = recipe_of(folder, num_generations=4, kv_cache_gb=0.01, max_completion_length=500).phases(24e9)
    assert few["sampling"]["keys and values"] == token * (500 + 512)  # one at the least
    everything = held(folder, use_peft=False, beta=0.1)
    assert everything["weights"] == everything["reference"] == 4 * 1_235_814_400
    assert held(folder, beta=0.1).get("reference") is None  # the adapter is switched off
    assert "sampling" not in recipe_of(folder, samplers=1).phases(24e9)
    asleep, awake = ({"engine": "vllm", "llm_arguments": {"enable_sleep_mode": on}} for on in (True, False))
    assert recipe_of(folder, **asleep).phases(24e9)["sampling"] == {"vLLM's share": 0.3 * 24e9}
    assert held(folder, **awake)["vLLM's share"] == 0.3 * 24e9
    away = {"samplers": 1, "max_completion_length": 16}  # fewer bits take less
    shape = recipe_of(folder, **away).shape
    ends, layers = shape.embedding * 2, shape.inside
    assert held(folder, **away)["weights"] == ends + 2 * layers
    assert held(folder, **away, quantization="nf4")["weights"] == pytest.approx(ends + 0.52 * layers)
    assert held(folder, **away, optimizer="adamw_8bit")["AdamW's moments"] == pytest.approx(2.03 * shape.trained)


def test_the_command_says_it(covey: Command, folder: Path, recipe_folder: Path, tmp_path: Path) -> None:
    arguments = ["doctor", str(recipe_folder), f"model.model={folder}", "data.max_prompt_length=100"]
    arguments += [f"run.output_dir={tmp_path / 'run'}", "--device-memory", "24", "--device-memory", "3"]
    status, shown, _ = covey(*arguments)
    assert (status, "1.24 billion weights" in shown) == (0, True)
    assert "prompts of 100 tokens, 8 tokens after them" in shown
    assert shown.index("3 GB: does not fit") < shown.index("24 GB: fits")
    found = json.loads(covey(*arguments, "--json")[1])
    assert [each["fits"] for each in found["devices"]] == [False, True]
    assert found["parts"]["held"]["weights"] == 2 * 1_235_814_400
    assert not (tmp_path / "run").exists()
    assert not torch.cuda.is_initialized()
