"""The two tables of docs/scale.md: formulas for seven sizes, code with a tiny model of each family.

COVEY_WRITE_DOCS=1 pytest tests/pytorch/test_pages.py      # writes them
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import EVERY_FAMILY, tiny_model, tiny_tokenizer
from transformers import LlamaConfig, Qwen2Config

from covey.config import GRPOConfig
from covey.pytorch import Policy
from covey.pytorch.engine import Engine
from covey.pytorch.footprint import Shape, build_empty
from covey.training.checkup import Recipe, dtype_of

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
DEVICES = (12, 24, 48, 80, 141)
CHECKPOINTING: dict[str, Any] = {"gradient_checkpointing": True}
ALL_WEIGHTS = CHECKPOINTING | {"use_peft": False, "autocast": "bfloat16"}
WAYS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "LoRA, checkpointing": CHECKPOINTING,
    "LoRA, checkpointing, sampler elsewhere": CHECKPOINTING | {"samplers": 1},
    "LoRA on `nf4`, the same": CHECKPOINTING | {"samplers": 1, "quantization": "nf4"},
    "all weights, checkpointing": ALL_WEIGHTS,
    "the same with `optim.offload`": ALL_WEIGHTS | {"offload": True},
}
MODELS = {"llama": "Llama 2 and 3, SmolLM2, TinyLlama", "qwen2": "Qwen2, Qwen2.5", "qwen3": "Qwen3"}
MODELS |= {"mistral": "Mistral 7B", "gemma2": "Gemma 2", "gemma3": "Gemma 3 270M and 1B", "phi3": "Phi-3 4k, Phi-4"}
MODELS |= {"phi3_long": "Phi-3 128k, Phi-4-mini", "granite": "Granite 3", "smollm3": "SmolLM3", "olmo2": "OLMo-2"}
MODELS |= {"glm": "GLM-4 9B of 2024", "glm4": "GLM-4 0414", "qwen3_moe": "Qwen3 30B-A3B and 235B-A22B"}
MODELS |= {"gpt_oss": "GPT-OSS", "gpt2": "GPT-2"}


def drawn(rows: list[list[str]], left: int = 99) -> str:
    """A table of Markdown; columns from `left` on are numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rules = ["-" * width if i < left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join(
        "| " + " | ".join(f"{row[i]:{'<' if i < left else '>'}{width}}" for i, width in enumerate(widths)) + " |"
        for row in [rows[0], rules, *rows[1:]]
    )


def model(kind: Any, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> Any:
    """Layers, heads of queries, and of keys and values; embeddings of Qwen's are tied up to 3B."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "tie_word_embeddings": hidden <= 2048}
    return kind(**sizes, **heads_of, max_position_embeddings=131072 if kind is LlamaConfig else 32768)


SIZES = {
    "0.5B (Qwen2.5-0.5B)": model(Qwen2Config, 896, 4864, 24, 14, 2, 151936),
    "1.5B (Qwen2.5-1.5B)": model(Qwen2Config, 1536, 8960, 28, 12, 2, 151936),
    "3B (Qwen2.5-3B)": model(Qwen2Config, 2048, 11008, 36, 16, 2, 151936),
    "8B (Llama 3.1 8B)": model(LlamaConfig, 4096, 14336, 32, 32, 8, 128256),
    "14B (Qwen2.5-14B)": model(Qwen2Config, 5120, 13824, 48, 40, 8, 152064),
    "32B (Qwen2.5-32B)": model(Qwen2Config, 5120, 27648, 64, 40, 8, 152064),
    "70B (Llama 3.1 70B)": model(LlamaConfig, 8192, 28672, 80, 64, 8, 128256),
}


def cells(name: str, shapes: dict[bool, Shape], way: str) -> list[str]:
    config = GRPOConfig(beta=0.0, max_completion_length=1, num_generations=8, tokens_per_micro_batch=1, **WAYS[way])
    recipe = Recipe(config, shapes[config.model.use_peft], fused=True)
    found, most = [recipe.longest(size * 1e9) for size in DEVICES], recipe.shape.context - recipe.prompt
    rounded = [most if tokens == most else tokens // 128 * 128 for tokens in found]
    return [name, way, *(f"{tokens:,}" if tokens >= 128 else "-" for tokens in rounded)]


def what_fits() -> str:
    rows = [["model", "trained", *(f"{size} GB" for size in DEVICES)]]
    lora, whole = (dtype_of(GRPOConfig(use_peft=use_peft)) for use_peft in (True, False))
    for name, config in SIZES.items():
        shapes = {True: Shape.of(build_empty(config, lora, r=16)), False: Shape.of(build_empty(config, whole))}
        rows += [cells(name, shapes, way) for way in WAYS]
    return drawn(rows, left=2)


def row(family: str) -> list[str]:
    policy = Policy.load(tiny_model(family), tiny_tokenizer(), lora_r=4)
    trainer = "own code, shared" if policy.fused_obstacle else "fused layers"
    if policy.prefix_sharing_obstacle:
        trainer = "own code, padded"
    engine = Engine(policy.model, dtype=torch.float32)
    return [MODELS[family], f"`{type(tiny_model(family)).__name__}`", trainer, engine.runner]


def what_serves() -> str:
    return drawn([["models", "class in transformers", "trainer", "sampler"], *map(row, EVERY_FAMILY)])


@pytest.mark.parametrize("table", [pytest.param(what_fits, marks=pytest.mark.slow), what_serves])
def test_the_page_says_what_is_so(table: Callable[[], str]) -> None:
    if not PAGE.is_file():
        pytest.skip("not run from a source tree")
    begin, end, made = f"<!-- {table.__name__}, ", f"<!-- end {table.__name__} -->", table()
    text = PAGE.read_text()
    before, _, rest = text.partition(begin)
    note, _, _ = rest.partition(" -->\n")
    assert "test_pages.py" in note
    assert rest.count(end) == 1
    wanted = f"{before}{begin}{note} -->\n\n{made}\n\n{end}{rest.partition(end)[2]}"
    if os.environ.get("COVEY_WRITE_DOCS"):
        PAGE.write_text(wanted)
        return
    assert text == wanted, "write it anew: COVEY_WRITE_DOCS=1 pytest tests/pytorch/test_pages.py"
