"""A trained policy as one model: base and adapter merged, checked, and written as a Hugging Face folder or as one GGUF
file, which llama.cpp, Ollama, LM Studio and Covey itself read.

As GGUF: Llama, Qwen2 and Qwen3 with plain rotary positions, and byte-level BPE tokenizers whose way of splitting text
llama.cpp has under a name. Anything else is refused: a file that is read differently from what was trained is worse
than none. The names are those of llama.cpp's `convert_hf_to_gguf.py`, which also converts the models that are refused
here.
"""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from covey.errors import ModelError
from covey.files import save_tokenizer
from covey.pytorch.models.loading import LoadedModel, load_model
from covey.pytorch.models.lora import album_of, attach_adapter
from covey.pytorch.rounding import unexplained

_ARCHITECTURES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {_LETTERS + r"\p{N}{1,3}" + _REST: "llama-bpe", _LETTERS + r"\p{N}" + _REST: "qwen2"}
"""llama.cpp's names of the regular expressions that cut a text into words."""
_INSTEAD = "export a Hugging Face folder, and try llama.cpp's convert_hf_to_gguf.py on it"


def load_merged(
    base: str,
    adapter: str | Path | None = None,
    tokenizer: str | Path | None = None,
    *,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """A base model with an adapter merged into its weights, in float32 on the CPU. `ModelError` where it cannot be
    loaded, or merged computes something else, as where an adapter was trained on a head that is tied to the embedding.
    """
    loaded = load_model(base, tokenizer, dtype="float32", device="cpu", trust_remote_code=trust_remote_code)
    model: Any = loaded.model
    if adapter is not None:
        together = attach_adapter(model, adapter)
        wanted = _probe(together, loaded.eos_token_ids)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tied layers: what comes of it is measured
            model = together.merge_and_unload()
        problem = unexplained(_probe(model, loaded.eos_token_ids), wanted, wanted)
        if problem:
            raise ModelError(
                f"{adapter}: merged into {base} it is not the policy that the two together are ({problem}); was it "
                "trained on tied embeddings? Export the adapter alone"
            )
    ends = list(loaded.eos_token_ids)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends
    return LoadedModel(model, loaded.tokenizer, loaded.source, loaded.eos_token_ids)


def save_model(loaded: LoadedModel, folder: str | Path, dtype: str = "float32") -> None:
    """Write a model, which is cast in place, and its tokenizer as a Hugging Face folder."""
    model: Any = loaded.model.to(getattr(torch, dtype))
    album = album_of(model)
    (model if album is None else album.whole.to(model.dtype)).save_pretrained(str(folder))
    save_tokenizer(loaded.tokenizer, folder)
    if album is not None:
        album.save_processor(folder)
    for file in Path(folder).glob("*.safetensors"):
        file.chmod((Path(folder) / "config.json").stat().st_mode)  # safetensors lets nobody but the owner read


@torch.no_grad()
def _probe(model: nn.Module, tokens: tuple[int, ...]) -> Tensor:
    """`[T, V]` log-probabilities after a few tokens of any kind."""
    ids = torch.tensor([[*range(5, 17), *tokens]])
    return cast(Tensor, model(input_ids=ids).logits[0].float().log_softmax(-1))


def write_gguf(loaded: LoadedModel, path: str | Path, dtype: str = "float16", name: str = "") -> None:
    """Write a model and its tokenizer; `ModelError` without the package `gguf`, or for a kind that is not written."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"{path}: writing GGUF needs the gguf package; run `pip install 'covey[gguf]'`")
    import gguf

    model: Any = loaded.model
    config = model.config
    if album_of(model) is not None:
        raise ModelError(f"{loaded.source}: a vision model is not written as GGUF; export a Hugging Face folder")
    _require_plain(config, loaded.source)
    tokens = _vocabulary(loaded.tokenizer, config.vocab_size, loaded.source)
    writer = gguf.GGUFWriter(str(path), config.model_type)
    _describe(writer, config, name or loaded.source)
    _add_tokenizer(writer, loaded, tokens)
    architecture = getattr(gguf.MODEL_ARCH, _ARCHITECTURES[config.model_type])
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    kind = getattr(gguf.GGMLQuantizationType, _TYPES[dtype])
    for ours, tensor in model.state_dict().items():
        if ours == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = names.get_name(ours, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise ModelError(f"{loaded.source}: GGUF has no name for its weight {ours}; {_INSTEAD}")
        array = _as_llama_cpp(tensor, ours, config)
        used = kind if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(theirs, gguf.quants.quantize(array, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _require_plain(config: Any, source: str) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    for wrong, what in (
        (config.model_type not in _ARCHITECTURES, f"a {config.model_type} model"),
        (rope.get("rope_type", "default") != "default", f"a model with {rope.get('rope_type')} rotary positions"),
        (bool(getattr(config, "use_sliding_window", False)), "a model with sliding windows"),
    ):
        if wrong:
            raise ModelError(
                f"{source}: {what} is not written as GGUF here, only {', '.join(_ARCHITECTURES)} in their plain form; "
                f"{_INSTEAD}"
            )


def _describe(writer: Any, config: Any, name: str) -> None:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_type("model")
    writer.add_name(name)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10_000.0))


def _as_llama_cpp(tensor: Tensor, name: str, config: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """In float32; Llama's queries and keys are rotated in pairs of neighbours there, not in halves."""
    array = tensor.detach().float().cpu().numpy()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if config.model_type != "llama" or heads is None:
        return np.ascontiguousarray(array)
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def _vocabulary(tokenizer: Any, size: int, source: str) -> list[str]:
    """Every id's token, as the vocabulary spells it."""
    known = {index: token for token, index in tokenizer.get_vocab().items()}
    if known and max(known) >= size:
        raise ModelError(
            f"{source}: its tokenizer has {max(known) + 1} tokens, the model {size}; use the model's own tokenizer"
        )
    return [known.get(index, f"[PAD{index}]") for index in range(size)]


def _split_name(document: Any, source: str) -> str:
    """What llama.cpp calls the tokenizer's way of splitting text."""
    if document["model"]["type"] != "BPE":
        raise ModelError(
            f"{source}: a tokenizer of type {document['model']['type']} is not written as GGUF here, only byte-level "
            f"BPE; {_INSTEAD}"
        )
    outer = document["pre_tokenizer"] or {}
    steps = outer.get("pretokenizers", [outer])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True) and not steps[0]["add_prefix_space"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and not steps[1]["add_prefix_space"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and steps[0]["pattern"].get("Regex") in _SPLITS:
        return _SPLITS[steps[0]["pattern"]["Regex"]]
    raise ModelError(f"{source}: llama.cpp has no name that is known here for its way of splitting text; {_INSTEAD}")


def _add_tokenizer(writer: Any, loaded: LoadedModel, tokens: list[str]) -> None:
    import gguf

    tokenizer: Any = loaded.tokenizer
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split_name(document, loaded.source))
    added = {entry["id"]: entry["special"] for entry in document["added_tokens"]}
    known = set(tokenizer.get_vocab())
    kinds = []
    for index, token in enumerate(tokens):
        special = gguf.TokenType.CONTROL if added.get(index) else gguf.TokenType.USER_DEFINED
        plain = gguf.TokenType.NORMAL if token in known else gguf.TokenType.UNUSED
        kinds.append(special if index in added else plain)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = document["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for kind in ("bos", "eos", "unk", "pad"):
        index = getattr(tokenizer, f"{kind}_token_id")
        if index is not None:
            getattr(writer, f"add_{kind}_token_id")(index)
    if getattr(tokenizer, "eos_token_id", None) not in loaded.eos_token_ids:
        writer.add_eos_token_id(loaded.eos_token_ids[0])
    start = tokenizer.bos_token_id
    writer.add_add_bos_token(start is not None and tokenizer("a")["input_ids"][:1] == [start])
    writer.add_add_space_prefix(False)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
