"""GGUF files that Covey writes, read back by its own loader: the same logits and the same token ids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from tiny_models import CHATML, tiny_model, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from covey.errors import ModelError
from covey.pytorch.models.gguf_file import _SPLITS, write_gguf
from covey.pytorch.models.loading import load_model

pytest.importorskip("gguf")

QWEN2 = next(split for split, name in _SPLITS.items() if name == "qwen2")
LLAMA3 = next(split for split, name in _SPLITS.items() if name == "llama-bpe")
TEXT = "<|im_start|>Is the <tool> 12345 they'd use?<|im_end|>\n  é 🙂"


@pytest.mark.parametrize(
    ("family", "tied", "split", "width"),
    [("llama", True, None, 32), ("llama", False, LLAMA3, 32), ("qwen2", True, QWEN2, 32), ("qwen3", False, QWEN2, 512)],
)
def test_what_is_read_back_computes_the_same(
    family: str, tied: bool, split: str | None, width: int, tmp_path: Path
) -> None:
    """Bit for bit in float32; five rows of the embedding have no token. (transformers reads Qwen3's heads as 128.)"""
    tokenizer = byte_tokenizer(split)
    model = tiny_model(family, len(tokenizer) + 5, hidden_size=width, tie_word_embeddings=tied)
    loaded = load_model(model, tokenizer)
    write_gguf(loaded, tmp_path / "model.gguf", "float32", "tiny")
    found = load_model(tmp_path / "model.gguf", dtype="float32", device="cpu")
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    assert torch.equal(found.model(ids).logits, model(ids).logits)
    assert found.tokenizer(TEXT)["input_ids"] == ids[0].tolist()
    assert found.tokenizer.decode(ids[0]) == tokenizer.decode(ids[0])
    assert found.tokenizer.chat_template == CHATML
    assert found.eos_token_ids == loaded.eos_token_ids


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype: str, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", len(tokenizer))
    write_gguf(load_model(model, tokenizer), tmp_path / "model.gguf", dtype)
    found = load_model(tmp_path / "model.gguf", dtype="float32", device="cpu").model
    name = "model.layers.1.mlp.up_proj.weight"
    wanted = model.get_parameter(name).to(getattr(torch, dtype)).float()
    assert torch.equal(found.get_parameter(name), wanted)


def test_what_would_be_read_differently_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    path = tmp_path / "model.gguf"
    with pytest.raises(ModelError, match="a gemma2 model is not written as GGUF here, only llama"):
        write_gguf(load_model(tiny_model("gemma2", len(tokenizer)), tokenizer), path)
    with pytest.raises(ModelError, match="type WordLevel is not written"):
        write_gguf(load_model(tiny_model("llama"), tiny_tokenizer()), path)
    with pytest.raises(ModelError, match="way of splitting text"):
        write_gguf(load_model(tiny_model("llama", len(tokenizer)), byte_tokenizer(r"\w+|\W")), path)
    with pytest.raises(ModelError, match="tokens, the model 100"):
        write_gguf(load_model(tiny_model("llama", 100), tokenizer), path)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    )
    with pytest.raises(ModelError, match="linear rotary positions"):
        write_gguf(load_model(LlamaForCausalLM(config), tokenizer), path)
    assert not path.exists()
