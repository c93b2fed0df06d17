"""What fits into a GPU that is not there, of a model whose weights are not there either."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from command import Command
from covey.config import GRPOConfig
from covey.errors import ConfigError, ModelError
from covey.pytorch.footprint import peak_bytes
from covey.training.device_memory import Recipe, fit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a billion weights of which there is the configuration alone."""
    found = tmp_path_factory.mktemp("model")
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
    sizes = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=131072, tie_word_embeddings=True)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(found)
    return found


def recipe_of(folder: Path, **settings: Any) -> Recipe:
    return Recipe.of(GRPOConfig(model=str(folder), **settings))


def peak(recipe: Recipe, room: float = 24e9, **changed: int) -> float:
    return peak_bytes(recipe.phases(room, **changed))


def test_what_fits_fits_and_one_token_more_does_not(folder: Path) -> None:
    recipe, room = recipe_of(folder), 12e9
    found = fit(recipe, room)
    assert found.fits
    assert found.changes == ()
    assert 1024 < found.longest < 131072 - recipe.prompt
    assert peak(recipe, own=found.longest) <= room < peak(recipe, own=found.longest + 1)
    assert peak(recipe, tokens=found.tokens) <= room < peak(recipe, tokens=found.tokens + 1)
    longer = replace(recipe, config=recipe.config.replace(max_completion_length=found.longest + 1))
    assert not fit(longer, room).fits
    assert fit(recipe, 141e9).longest == 131072 - recipe.prompt  # no further than the model was built for


def test_an_adapter_that_is_too_large_is_said_as_it_is(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"^model\.lora_r=1000000: more than"):
        recipe_of(folder, lora_r=1000000)


def test_all_weights_stay_trained_where_a_combination_does(folder: Path) -> None:
    recipe = recipe_of(folder, use_peft=False, gradient_checkpointing=False)
    both = Recipe(
        recipe.config.with_overrides(["optim.offload=true", "model.gradient_checkpointing=true"]), recipe.shape, True
    )
    room = peak(both) * 1.01
    texts = [text for text, _ in fit(recipe, room).changes]
    assert "optim.offload=true" in texts[0]
    assert texts[-1] == "model.use_peft=true"


def test_a_smaller_share_for_vllm_is_proposed(folder: Path) -> None:
    recipe = recipe_of(folder, engine="vllm", gpu_memory_utilization=0.99)
    found = fit(recipe, 24e9)
    assert not found.fits
    assert "vllm.gpu_memory_utilization=0.3" in [text for text, _ in found.changes]


def test_what_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=64, n_layer=2, n_head=2, architectures=["GPT2LMHeadModel"])
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has no linear layers that could be quantised"):
        recipe_of(tmp_path, quantization="nf4")
    assert not recipe_of(tmp_path).quantisable
    with pytest.raises(ModelError, match=r"holds no adapter_config\.json"):
        recipe_of(tmp_path, adapter=str(tmp_path / "none"))


def test_fewer_bits_take_less(folder: Path) -> None:
    away = {"samplers": 1, "max_completion_length": 16}
    plain, four = recipe_of(folder, **away), recipe_of(folder, **away, quantization="nf4")
    ends, layers = plain.shape.embedding * 2, plain.shape.inside
    assert plain.phases(24e9)["held"]["weights"] == ends + 2 * layers
    assert four.phases(24e9)["held"]["weights"] == pytest.approx(ends + 0.52 * layers)
    eight = recipe_of(folder, **away, optimizer="adamw_8bit").phases(24e9)["held"]["AdamW's moments"]
    assert eight == pytest.approx(2.03 * plain.shape.trained)
    with pytest.raises(ConfigError, match="paged_adamw_8bit moves its moments by itself"):
        recipe_of(folder, optimizer="adamw_8bit", offload=True)


@pytest.mark.parametrize("settings", [{}, {"use_peft": False, "beta": 0.1}, {"engine": "vllm"}], ids=str)
def test_what_is_proposed_makes_it_fit(folder: Path, settings: dict[str, Any]) -> None:
    recipe = recipe_of(folder, max_completion_length=2048, tokens_per_micro_batch=16384, **settings)
    room = 0.7 * peak(recipe)
    found = fit(recipe, room)
    assert not found.fits
    assert found.changes
    for text, told in found.changes:
        assert peak(Recipe.of(recipe.config.with_overrides(text.split())), room) == told <= room


def test_each_setting_takes_what_it_says(folder: Path) -> None:
    """Parts by hand: b of bfloat16 is 2; 1,235,814,400 weights, 973,146,112 of them in layers and the last norm."""
    parts = recipe_of(folder, num_generations=4, prompts_per_step=2, max_completion_length=500).phases(24e9)
    assert parts["held"]["weights"] == 2 * 1_235_814_400
    assert parts["sampling"]["sampler's copy of the layers"] == 2 * (1_235_814_400 - 128256 * 2048)
    token = 2 * 16 * 8 * 64 * 2
    assert parts["sampling"]["keys and values"] == token * (8 * 500 + 2 * 512)
    few = recipe_of(folder, num_generations=4, kv_cache_gb=0.01, max_completion_length=500).phases(24e9)
    assert few["sampling"]["keys and values"] == token * (500 + 512)  # one at the least
    everything = recipe_of(folder, use_peft=False, beta=0.1).phases(24e9)["held"]
    assert everything["weights"] == everything["reference"] == 4 * 1_235_814_400
    assert recipe_of(folder, beta=0.1).phases(24e9)["held"].get("reference") is None  # the adapter is switched off
    assert "sampling" not in recipe_of(folder, samplers=1).phases(24e9)
    asleep, awake = (
        recipe_of(folder, engine="vllm", llm_arguments={"enable_sleep_mode": on}).phases(24e9) for on in (True, False)
    )
    assert asleep["sampling"] == {"vLLM's share": 0.3 * 24e9}
    assert awake["held"]["vLLM's share"] == 0.3 * 24e9


def test_settings_that_save_memory_do(folder: Path) -> None:
    plain = recipe_of(folder, max_completion_length=4096, use_peft=False, beta=0.1)
    less = recipe_of(folder, max_completion_length=4096, use_peft=False, beta=0.1, offload=True)
    weights = 1_235_814_400
    held = sum(plain.phases(24e9)["held"].values()) - sum(less.phases(24e9)["held"].values())
    assert held == 12 * weights  # two moments and the reference
    checkpointed = recipe_of(folder, max_completion_length=4096, gradient_checkpointing=True)
    ratio = (
        checkpointed.phases(24e9)["learning"]["activations"]
        / recipe_of(folder, max_completion_length=4096).phases(24e9)["learning"]["activations"]
    )
    assert 0.1 < ratio < 0.25


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "jax"}, r"model\.backend='jax' and --device-memory"),
        ({"device": "cpu"}, r"model\.device='cpu' and --device-memory"),
        ({"learner_kind": "sharded"}, r"learner_kind='sharded' and --device-memory"),
    ],
)
def test_what_the_formulas_are_not_about(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe_of(folder, **settings)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}')
    with pytest.raises(ModelError, match="its configuration cannot be read"):
        recipe_of(tmp_path)


def test_the_command_says_it(covey: Command, folder: Path, recipe_folder: Path, tmp_path: Path) -> None:
    arguments = ["plan", str(recipe_folder), f"model.model={folder}", "data.max_prompt_length=100"]
    arguments += [f"run.output_dir={tmp_path / 'run'}", "--device-memory", "24", "--device-memory", "3"]
    status, shown, _ = covey(*arguments)
    assert status == 0
    assert "1.24 billion weights" in shown
    assert "prompts of 100 tokens, 8 tokens after them" in shown
    assert shown.index("3 GB: does not fit") < shown.index("24 GB: fits")
    found = json.loads(covey(*arguments, "--json")[1])
    assert [each["fits"] for each in found["devices"]] == [False, True]
    assert found["parts"]["held"]["weights"] == 2 * 1_235_814_400
    assert not (tmp_path / "run").exists()
    assert not torch.cuda.is_initialized()
