"""Values that no file, path or memory takes are refused by name, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model, tiny_tokenizer

from covey.config import GRPOConfig
from covey.errors import ConfigError, ModelError
from covey.pytorch.models.loading import load_model
from covey.pytorch.models.lora import attach_lora
from covey.training.setup import require_memory


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("output_dir", "a\0b", "NUL"),
        ("output_dir", "x" * 5000, "too long for a path"),
        ("model", "~nobody-here/x", "home of a user"),
        ("dataset", "\ud800", "surrogate"),
        ("seed", 2**70, "64 bits"),
        ("seed", -1, "must be int, >= 0"),
        ("lora_alpha", 1e300, "too large"),
        ("reward_timeout", 1e12, "<= 1000000000"),
        ("stop_strings", ["x"] * 100_000, "100,000 entries"),
        ("num_iterations", 10**9, "<= 1000"),
        ("system_prompt", "x" * 10**6, "too long for a setting"),
    ],
)
def test_values_that_nothing_takes(field: str, value: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=field) as error:
        GRPOConfig(**{field: value})
    assert reason in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "settings",
    [
        {"num_generations": 10**9},
        {"prompts_per_step": 10**9},
        {"max_completion_length": 10**12},
        {"num_generations_eval": 10**9, "eval_temperature": 1.0},
        {"phases": [{"steps": 1, "num_generations": 10**9}]},
        {"world": "house", "parallel_episodes": 10**9},
    ],
)
def test_more_than_memory_holds(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"needs at least [\d,]+ GB of memory, and this machine has \d+ GB"):
        require_memory(GRPOConfig(**settings))
    require_memory(GRPOConfig())


def test_adapters_larger_than_memory_or_than_the_model() -> None:
    for rank, reason in ((10**9, "GB with gradients"), (5_000, "more than the 384 rows or columns")):
        with pytest.raises(ModelError, match=rf"model\.lora_r={rank}: .*{reason}"):
            attach_lora(tiny_model("llama", vocab_size=384), r=rank)


def test_broken_and_quantised_models_are_named(tmp_path: Path) -> None:
    model = tiny_model("llama")
    next(model.parameters()).data.view(-1)[0] = float("nan")
    with pytest.raises(ModelError, match=r"embed_tokens\.weight holds NaN"):
        load_model(model, tiny_tokenizer())
    folder = tmp_path / "four_bits"
    folder.mkdir()
    settings = '{"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}'
    (folder / "config.json").write_text(settings)
    with pytest.raises(ModelError, match=r"is quantised \(gptq, 4 bits\).*use the model that it was made from"):
        load_model(folder)
    whole = tiny_model("llama")
    whole.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(ModelError, match=r"is quantised \(bitsandbytes, 4 bits\)"):
        load_model(whole, tiny_tokenizer())


@pytest.mark.parametrize(
    "settings",
    [
        {"num_generations": 10**6, "prompts_per_step": 1},
        {"prompts_per_step": 10**6, "num_generations": 2},
        {"phases": [{"steps": 1, "num_generations": 10**6}], "prompts_per_step": 1},
        {"num_generations_eval": 10**6, "eval_temperature": 1.0},
    ],
)
def test_more_completions_than_anybody_waits_for(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they would fit: a machine of 10 TB."""
    monkeypatch.setattr("covey.training.setup.total_memory", lambda: 10**13)
    with pytest.raises(ConfigError, match=r"1000000.*[12],000,000 completions at once; use up to 250,000"):
        require_memory(GRPOConfig(**({"max_completion_length": 8} | settings)))
    require_memory(GRPOConfig(num_generations=1024, prompts_per_step=128))
