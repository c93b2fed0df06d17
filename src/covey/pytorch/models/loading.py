"""Loads a causal language model and its tokenizer from wherever the user has them.

`covey.model_files` lists the sources. A GGUF file is dequantised while loading. Nothing is written to disk.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from peft import PeftModel
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    modeling_gguf_pytorch_utils,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from covey.errors import ModelError
from covey.model_files import place
from covey.pytorch.models.narrow import narrow
from covey.pytorch.models.quantised import adopt, quantise, quantised_layers, require_package

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
"""Ends of an assistant's turn in common chat templates, for checkpoints whose own settings forget them."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model that is ready to sample and to train.

    Attributes:
        model: in eval mode, on its device; a transformers causal LM, or a PEFT model around one.
        tokenizer: with a padding token.
        source: what was asked for, as text.
        eos_token_ids: every id that ends a completion, ascending.
        folder: folder or hub id with the model's config and safetensors; None = there is none.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    source: str
    eos_token_ids: tuple[int, ...]
    folder: str | None = None


def load_model(
    model: str | Path | nn.Module,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    quantization: str = "none",
    frozen: bool = True,
) -> LoadedModel:
    """Load a model, or take one that is already built.

    Args:
        model: one of the sources of `covey.model_files`, or a built model (then `tokenizer` is required).
        tokenizer: a tokenizer, or where to load it from; None = from the same place as the model.
        dtype: "float32", "bfloat16", "float16"; "auto" = float32 on CPU and bfloat16 on a GPU. A built model
            keeps its own under "auto".
        device: "cpu", "cuda", "cuda:0", ...; "auto" = a GPU if there is one. A built model stays where it is
            under "auto".
        frozen: its weights are not trained, so that "bfloat16" on a CPU can mean `covey.pytorch.models.narrow`.
        trust_remote_code: run code that comes with the model. Off: such models are an error.
        quantization: hold its linear layers in fewer bits, see `quantised`; "none" = as they are. Such a
            model is read into the host's memory in full; the device gets the small one. A built model is changed.

    Raises `ModelError`: there is no such model, it cannot be read, quantised, or does not fit the device asked for.
    """
    require_package(quantization)
    if isinstance(model, nn.Module):
        return _take(model, tokenizer, dtype, device, quantization, frozen and not isinstance(model, PeftModel))
    if not isinstance(model, str | Path):
        raise ModelError(
            f"model={model!r:.200}: a {type(model).__name__} is not a model; give a hub id, a folder, a .gguf file or "
            "a loaded transformers model"
        )
    source = str(model)
    torch_device = chosen_device(device)
    torch_dtype = chosen_dtype(dtype, torch_device)
    folder, gguf_file = locate(source)
    if gguf_file is not None and importlib.util.find_spec("gguf") is None:
        raise ModelError(f"{source}: reading GGUF needs the gguf package; run `pip install 'covey[gguf]'`")
    if gguf_file is None and not os.path.isdir(folder):
        from covey.hub import out_of_reach

        if (error := out_of_reach(folder)) is not None:
            raise ModelError(_load_problem(folder, source, error)) from error
    with quiet(), nullcontext() if gguf_file is None else gguf_read_once():
        trusting: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        how = trusting if gguf_file is None else {"gguf_file": gguf_file}
        loaded = _load(folder, source, dtype=torch_dtype, **how)
        if gguf_file is not None:
            loaded = _plain_copy(loaded, source)
        else:
            for parameter in loaded.parameters():  # the mapped file's pages would stay beside whatever replaces them
                parameter.data = parameter.data.clone()
        found = _load_tokenizer(tokenizer or folder, source, **(trusting if tokenizer else how))
    _refuse_quantised(getattr(loaded.config, "quantization_config", None), source)
    if quantization == "none":
        loaded = loaded.to(torch_device)  # type: ignore[arg-type]
    done = _finish(loaded, found, source)
    if frozen and (torch_dtype, torch_device.type, quantization) == (torch.bfloat16, "cpu", "none"):
        narrow(done.model)
    if quantization != "none":
        quantise(done.model, quantization, torch_device, source)
    return replace(done, folder=folder if gguf_file is None else None)


def _take(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | str | Path | None,
    dtype: str,
    device: str,
    quantization: str,
    frozen: bool,
) -> LoadedModel:
    name = type(model).__name__
    if tokenizer is None:
        raise ModelError(f"{name}: a built model comes without its tokenizer; pass the tokenizer along with it")
    source = str(getattr(model, "name_or_path", "") or name)
    held = next(model.parameters()).device
    target = held if device == "auto" else chosen_device(device)
    if says_quantised(model):
        if not any(quantised_layers(model)):
            _refuse_quantised(getattr(model.config, "quantization_config", None), source)
        adopt(model, source)
        if target.type != held.type or dtype != "auto":
            raise ModelError(
                f"{source}: is quantised, and stays where and as it is; leave model.device and model.dtype at auto"
            )
    elif device != "auto" or dtype != "auto":
        model = model.to(target) if dtype == "auto" else model.to(target, chosen_dtype(dtype, target))
    with quiet():
        done = _finish(model, _load_tokenizer(tokenizer, source), source)
    if frozen and (dtype, target.type, quantization) == ("bfloat16", "cpu", "none"):
        narrow(model)
    if quantization != "none":
        quantise(model, quantization, target, source)
    return done


def _finish(model: nn.Module, tokenizer: PreTrainedTokenizerBase, source: str) -> LoadedModel:
    if isinstance(model, PeftModel) and is_vision(model.get_base_model().config):
        raise ModelError(f"{source}: an adapter on a whole vision model; pass the model, and the adapter as its folder")
    config = getattr(model, "config", None)
    if is_vision(config):
        from covey.pytorch.models.pictures import language_half, told_in_parts

        processor = tokenizer if isinstance(tokenizer, ProcessorMixin) else getattr(model, "name_or_path", "")
        model, tokenizer = language_half(model, processor), told_in_parts(tokenizer, source)
    require_tokenizer(tokenizer, "processing_class")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{source}: an encoder-decoder model; choose a decoder-only (causal) language model")
    quantised = {id(layer.weight) for layer in quantised_layers(model)}
    for name, parameter in model.named_parameters():
        if id(parameter) not in quantised and not bool(torch.isfinite(parameter).all()):
            raise ModelError(
                f"{source}: its weight {name} holds NaN or infinity; the file is damaged or its training has diverged, "
                "use another copy or an earlier one"
            )
    text: Any = getattr(config, "get_text_config", lambda: config)()
    if getattr(text, "attn_logit_softcapping", None) and getattr(text, "_attn_implementation", "") == "sdpa":
        model.set_attn_implementation("eager")  # type: ignore[operator]  # older transformers' sdpa leaves the cap out
    if tokenizer.pad_token_id is None:  # padding is never read: attention masks and packing keep it out
        known = [t for t in (tokenizer.eos_token, tokenizer.unk_token, tokenizer.bos_token) if t is not None]
        if not known:
            raise ModelError(f"{source}: its tokenizer has no padding, end or unknown token; set tokenizer.pad_token")
        tokenizer.pad_token = known[0]
    return LoadedModel(model.eval(), tokenizer, source, _eos_token_ids(model, tokenizer, source))


def says_quantised(model: nn.Module) -> bool:
    """True for a built model that says so, or has such layers."""
    return getattr(getattr(model, "config", None), "quantization_config", None) is not None or any(
        quantised_layers(model)
    )


def _refuse_quantised(settings: Any, source: str) -> None:
    """`quantization_config` of a model's config: a mapping, or transformers' object of it."""
    if not settings:
        return
    found = settings if isinstance(settings, Mapping) else vars(settings)
    method = found.get("quant_method", "unknown")
    bits = found.get("bits") or (4 if found.get("load_in_4bit", found.get("_load_in_4bit")) else None)
    how = f"{getattr(method, 'value', method)}{f', {bits} bits' if bits else ''}"
    raise ModelError(
        f"{source}: is quantised ({how}); use the model that it was made from, which model.quantization=nf4 holds in 4 "
        "bits. Of models that are passed loaded, linear layers of bitsandbytes and of torchao's Int8WeightOnlyConfig "
        "are known"
    )


def locate(source: str) -> tuple[str, str | None]:
    """Where to load from, as `covey.model_files.place` says; `ModelError` for a folder whose model is not trained."""
    folder, gguf_file = place(source)
    if gguf_file is None and os.path.isdir(folder):
        try:
            config = json.loads((Path(folder) / "config.json").read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{source}: its config.json cannot be read ({error}); fetch the model again") from error
        if not isinstance(config, dict):
            raise ModelError(f"{source}: its config.json holds no settings; fetch the model again")
        refuse_senses(config, source)
        _refuse_quantised(config.get("quantization_config"), source)
    return folder, gguf_file


def _load(folder: str, source: str, **options: Any) -> PreTrainedModel:
    auto: Any = AutoModelForCausalLM
    try:
        if "gguf_file" not in options:
            trusting = {"trust_remote_code": options["trust_remote_code"]}
            auto = auto_class(AutoConfig.from_pretrained(folder, **trusting))
        model, found = auto.from_pretrained(folder, output_loading_info=True, **options)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ... for a bad checkpoint
        with suppress(OSError, ValueError, KeyError, TypeError):
            refuse_senses(AutoConfig.from_pretrained(folder).to_dict(), source)
        raise ModelError(_load_problem(folder, source, error)) from error
    if missing := sorted(found["missing_keys"]):  # transformers would go on with random numbers
        raise ModelError(
            f"{source}: its files lack {len(missing)} of the weights that {type(model).__name__} has, {missing[0]} "
            "among them; the download may be incomplete, or config.json is another model's"
        )
    return cast(PreTrainedModel, model)


def _load_problem(folder: str, source: str, error: Exception) -> str:
    reason = _first_line(error)
    if "trust_remote_code" in str(error):
        return (
            f"{source}: needs custom code, which comes with the model; set model.trust_remote_code=true if you trust it"
        )
    if "quantiz" in str(error).lower():
        return f"{source}: is quantised ({reason}); use the model that it was made from"
    if not Path(folder).exists():
        return (
            f"{source}: no such folder here, and it cannot be fetched from the hub ({reason}); "
            "check the name and the network, or give a local folder"
        )
    for file in Path(folder).glob("*.safetensors"):
        if not os.access(file, os.R_OK):
            return f"{source}: {file.name} may not be read by this user; ask its owner for `chmod a+r {file.name}`"
    return (
        f"{source}: cannot be loaded ({reason}); the files may be damaged or of an unsupported kind, fetch them again"
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


def _load_tokenizer(
    tokenizer: PreTrainedTokenizerBase | str | Path, source: str, **options: Any
) -> PreTrainedTokenizerBase:
    if not isinstance(tokenizer, str | Path):
        if not callable(tokenizer) or not hasattr(tokenizer, "decode"):
            raise ModelError(
                f"processing_class={tokenizer!r:.200}: a {type(tokenizer).__name__} is not a tokenizer; pass one of "
                "transformers, or the folder or hub id of one"
            )
        return tokenizer
    try:
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(str(tokenizer), **options))
    except Exception as error:
        raise ModelError(
            f"{source}: its tokenizer cannot be loaded from {tokenizer} ({_first_line(error)}); "
            "save the tokenizer into the model's folder, or pass one"
        ) from error


def _eos_token_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase, source: str) -> tuple[int, ...]:
    found: set[int] = set()
    for holder in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        value = getattr(holder, "eos_token_id", None)
        if value is not None:
            found.update(map(int, value) if isinstance(value, list | tuple) else [int(value)])
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    vocabulary = tokenizer.get_vocab()
    found.update(vocabulary[token] for token in _TURN_ENDS if token in template and token in vocabulary)
    if not found:
        raise ModelError(f"{source}: no end-of-sequence token is known; set tokenizer.eos_token")
    return tuple(sorted(found))


def chosen_device(name: str) -> torch.device:
    """What `device` of `load_model` means here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"model.device={name!r}: is not a device name; use auto, cpu, cuda or cuda:0") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"model.device={name!r}: PyTorch sees {torch.cuda.device_count()} CUDA devices here; use auto or cpu"
        )
    return device


def trained_dtype(name: str, *, all_weights: bool) -> str:
    """`dtype` of `load_model` for a model that is to be trained."""
    # bfloat16 weights would swallow most updates: they hold 8 bits, an update is far smaller
    return "float32" if name == "auto" and all_weights else name


def chosen_dtype(name: str, device: torch.device) -> torch.dtype:
    """What `dtype` of `load_model` means on a device."""
    if name == "auto":
        wide = device.type == "cpu" or (device.type == "cuda" and not torch.cuda.is_bf16_supported())
        return torch.float32 if wide else torch.bfloat16
    if name not in _DTYPES:
        raise ModelError(f"model.dtype={name!r}: is not a dtype; use auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _plain_copy(model: PreTrainedModel, source: str) -> PreTrainedModel:
    """The same weights in a model that does not call itself quantised, so that it can be saved."""
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._name_or_path = source
    with no_init_weights():
        fresh = type(model)(config)
    fresh.load_state_dict(model.state_dict(), assign=True)
    fresh.tie_weights()
    fresh.generation_config = model.generation_config
    return fresh.requires_grad_(True)


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars or advice while loading: what matters is raised as a `ModelError`."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def gguf_read_once() -> Iterator[None]:
    """Parse a GGUF file once instead of three times (config, weights, tokenizer), and three times faster: most of the
    time goes into slicing a `numpy.memmap`, which a plain view of it avoids.
    """
    import gguf

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        def _get(self, *args: Any, **kwargs: Any) -> Any:
            self.data: Any = np.asarray(self.__dict__["data"])
            return super()._get(*args, **kwargs)

    with (
        # This one progress bar does not obey transformers' own switch.
        mock.patch.object(modeling_gguf_pytorch_utils, "tqdm", lambda items, **_: items),
        mock.patch.object(gguf, "GGUFReader", functools.cache(Reader)),
        mock.patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
    ):
        yield


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The transformers model, with adapters inside its layers if `model` is a `PeftModel`."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(inner, PreTrainedModel):
        raise ModelError(
            f"{type(inner).__name__}: is not a transformers model; give a causal language model built with transformers"
        )
    return inner


def transformer(model: PreTrainedModel) -> nn.Module:
    """The model without its output head, which returns hidden states."""
    if model.base_model is model:
        raise ModelError(f"{type(model).__name__}: has no separate transformer under its output head; use a causal LM")
    return model.base_model


def context_length(model: nn.Module) -> int:
    """Most tokens that a transformers model was built for; 2^31 where its config names no limit."""
    config = cast(Any, model).config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(config, "max_position_embeddings", None) or 1 << 31)


_VISION = ("smolvlm", "idefics3", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3")
"""Vision models whose language half is trained here."""
_SENSES = ("vision_config", "audio_config", "thinker_config", "vq_config")


def is_vision(config: Any) -> bool:
    """Whether a configuration is that of a vision model whose language half is trained here."""
    return getattr(config, "model_type", "") in _VISION and bool(getattr(config, "vision_config", None))


def auto_class(config: Any) -> Any:
    """What loads a model of a configuration."""
    return AutoModelForImageTextToText if is_vision(config) else AutoModelForCausalLM


def refuse_senses(config: Mapping[str, Any], source: str) -> None:
    """Raise `ModelError` for the configuration of a model of pictures or sound. Those pass whose language half is
    trained here, or that transformers loads for text alone, except Mllama, whose text attends to pictures.
    """
    kind, senses = str(config.get("model_type")), {name for name in _SENSES if config.get(name)}
    by_itself = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or "AutoModelForCausalLM" in (config.get("auto_map") or ())
    if senses and (kind == "mllama" or not by_itself) and not (kind in _VISION and "vision_config" in senses):
        what = "an audio" if senses == {"audio_config"} else "a vision"
        raise ModelError(
            f"{source}: {what} model ({(config.get('architectures') or [kind])[0]}); of these only "
            f"{', '.join(_VISION)} are trained here; use one of them, or a language model"
        )


def require_tokenizer(tokenizer: Any, name: str) -> None:
    """Raise `ModelError` for a processor, which holds a tokenizer and is none; `name` is the argument's."""
    if isinstance(tokenizer, ProcessorMixin):
        raise ModelError(
            f"{name}={type(tokenizer).__name__}: a processor of pictures or sound, which no model takes in here; pass "
            "processor.tokenizer"
        )
