"""The table of docs/models.md is what the code does with a tiny model of each family.

COVEY_WRITE_DOCS=1 pytest tests/pytorch/test_models_page.py      # writes it
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tiny_models import EVERY_FAMILY, tiny_model, tiny_tokenizer

from covey.pytorch import Policy
from covey.pytorch.engine import Engine

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MODELS = {
    "llama": "Llama 2 and 3, SmolLM2, TinyLlama",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "mistral": "Mistral 7B",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3 270M and 1B",
    "phi3": "Phi-3 4k, Phi-4",
    "phi3_long": "Phi-3 128k, Phi-4-mini",
    "granite": "Granite 3",
    "smollm3": "SmolLM3",
    "olmo2": "OLMo-2",
    "glm": "GLM-4 9B of 2024",
    "glm4": "GLM-4 0414",
    "qwen3_moe": "Qwen3 30B-A3B and 235B-A22B",
    "gpt_oss": "GPT-OSS",
    "gpt2": "GPT-2",
}


def trainer(policy: Policy) -> str:
    if policy.prefix_sharing_obstacle is not None:
        return "own code, padded"
    return "own code, shared" if policy.fused_obstacle is not None else "fused layers"


def row(family: str) -> list[str]:
    policy = Policy.load(tiny_model(family), tiny_tokenizer(), lora_r=4)
    engine = Engine(policy.model, dtype=torch.float32)
    return [MODELS[family], f"`{type(tiny_model(family)).__name__}`", trainer(policy), engine.runner]


def table() -> str:
    rows = [["models", "class in transformers", "trainer", "sampler"], *map(row, EVERY_FAMILY)]
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(f"{text:{width}}" for text, width in zip(r, widths, strict=True)) + " |" for r in rows
    )


def test_the_page_says_what_serves_which_family() -> None:
    if not PAGE.is_file():
        pytest.skip("not run from a source tree")
    before, _, rest = PAGE.read_text().partition(" -->\n")
    assert "test_models_page.py" in before
    wanted = f"{before} -->\n\n{table()}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    if os.environ.get("COVEY_WRITE_DOCS"):
        PAGE.write_text(wanted)
    assert PAGE.read_text() == wanted, "write it anew: COVEY_WRITE_DOCS=1 pytest tests/pytorch/test_models_page.py"
