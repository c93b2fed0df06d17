"""The table of docs/memory.md is what the formulas say of models of seven sizes.

COVEY_WRITE_DOCS=1 pytest tests/pytorch/test_memory_page.py      # writes it
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config

from covey.config import GRPOConfig
from covey.pytorch.footprint import Shape, build_empty
from covey.training.checkup import Recipe, dtype_of

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"
DEVICES = (12, 24, 48, 80, 141)


def qwen(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int = 151936) -> Any:
    """A model of Qwen2.5's family: heads of queries, and of keys and values; embeddings are tied up to 3B."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    kept = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "tie_word_embeddings": hidden <= 2048}
    return Qwen2Config(**sizes, **kept, max_position_embeddings=32768)


def llama(hidden: int, inner: int, layers: int, heads: int) -> Any:
    """A model of Llama 3.1's."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": 128256}
    kept = {"num_attention_heads": heads, "num_key_value_heads": 8, "tie_word_embeddings": False}
    return LlamaConfig(**sizes, **kept, max_position_embeddings=131072)


MODELS = {
    "0.5B (Qwen2.5-0.5B)": qwen(896, 4864, 24, 14, 2),
    "1.5B (Qwen2.5-1.5B)": qwen(1536, 8960, 28, 12, 2),
    "3B (Qwen2.5-3B)": qwen(2048, 11008, 36, 16, 2),
    "8B (Llama 3.1 8B)": llama(4096, 14336, 32, 32),
    "14B (Qwen2.5-14B)": qwen(5120, 13824, 48, 40, 8, 152064),
    "32B (Qwen2.5-32B)": qwen(5120, 27648, 64, 40, 8, 152064),
    "70B (Llama 3.1 70B)": llama(8192, 28672, 80, 64),
}
WAYS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "LoRA, checkpointing": {"gradient_checkpointing": True},
    "LoRA, checkpointing, sampler elsewhere": {"gradient_checkpointing": True, "samplers": 1},
    "LoRA on `nf4`, the same": {"gradient_checkpointing": True, "samplers": 1, "quantization": "nf4"},
    "all weights, checkpointing": {"gradient_checkpointing": True, "use_peft": False, "autocast": "bfloat16"},
    "the same with `optim.offload`": {
        "gradient_checkpointing": True,
        "use_peft": False,
        "autocast": "bfloat16",
        "offload": True,
    },
}


def cells(name: str, shapes: dict[bool, Shape], way: str) -> list[str]:
    config = GRPOConfig(beta=0.0, max_completion_length=1, num_generations=8, tokens_per_micro_batch=1, **WAYS[way])
    recipe = Recipe(config, shapes[config.model.use_peft], fused=True)
    found = [recipe.longest(size * 1e9) for size in DEVICES]
    most = recipe.shape.context - recipe.prompt
    rounded = [most if tokens == most else tokens // 128 * 128 for tokens in found]
    return [name, way, *(f"{tokens:,}" if tokens >= 128 else "-" for tokens in rounded)]


def table() -> str:
    rows = [["model", "trained", *(f"{size} GB" for size in DEVICES)]]
    for name, config in MODELS.items():
        shapes = {
            use_peft: Shape.of(
                build_empty(config, dtype_of(GRPOConfig(use_peft=use_peft)), **({"r": 16} if use_peft else {}))
            )
            for use_peft in (True, False)
        }
        rows += [cells(name, shapes, way) for way in WAYS]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rules = ["-" * width if i < 2 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    lines = []
    for row in [rows[0], rules, *rows[1:]]:
        texts = [
            f"{text:{width}}" if i < 2 else f"{text:>{width}}"
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)


def test_the_page_says_what_fits() -> None:
    if not PAGE.is_file():
        pytest.skip("not run from a source tree")
    before, _, rest = PAGE.read_text().partition(" -->\n")
    assert "test_memory_page.py" in before
    wanted = f"{before} -->\n\n{table()}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    if os.environ.get("COVEY_WRITE_DOCS"):
        PAGE.write_text(wanted)
    assert PAGE.read_text() == wanted, "write it anew: COVEY_WRITE_DOCS=1 pytest tests/pytorch/test_memory_page.py"
