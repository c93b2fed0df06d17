"""A model that is read from its safetensors files by slices, so that no process needs to hold all of it.

    files = ModelFiles.find("Qwen/Qwen3-32B", dtype=torch.bfloat16)
    model = files.hollow()                     all modules and buffers; parameters without memory
    files.read("lm_head.weight", (slice(0, 1000),))

A hollow parameter has shape, type and device of a real one, and the memory of a single number, so that adapters can be
attached, which ask for these, and copies become real. Served are models whose files hold their parameters under their
names, in floats; all others are loaded whole.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from covey.errors import ModelError
from covey.pytorch.models.loading import is_vision, locate, quiet

Model = TypeVar("Model", bound=nn.Module)

_FLOATS = ("F64", "F32", "F16", "BF16")


class NotSlicedError(ModelError):
    """A model that can only be loaded whole; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelFiles:
    """Where a model's parameters are."""

    source: str
    folder: str
    config: Any
    dtype: torch.dtype
    places: dict[str, tuple[str, str]]

    @classmethod
    def find(cls, source: str, *, dtype: torch.dtype) -> ModelFiles:
        """Read config and file headers alone; `NotSlicedError` if it must be loaded whole, `ModelError` if none."""
        folder, gguf_file = locate(source)
        if gguf_file is not None:
            raise NotSlicedError("it is a GGUF file, which is read as a whole")
        try:
            with quiet():
                config = AutoConfig.from_pretrained(folder)
                if is_vision(config):
                    raise NotSlicedError("it is a vision model, whose language half is taken out of the whole")
                found = cls(source, folder, config, dtype, {})
                model = found.hollow()
                shapes = _shapes(folder)
        except NotSlicedError:
            raise
        except Exception as error:  # whatever transformers raises; loading it whole says what is wrong
            raise NotSlicedError(f"{type(error).__name__}: {str(error)[:200]}") from error
        if getattr(model, "_keep_in_fp32_modules", None) and dtype != torch.float32:
            raise NotSlicedError("some of its parameters keep float32")
        prefix, persistent = f"{model.base_model_prefix}.", model.state_dict().keys()
        for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
            if name not in persistent:
                continue  # computed, not read
            held = next((each for each in (name, name.removeprefix(prefix)) if each in shapes), None)
            if held is None:
                raise NotSlicedError(f"its files hold no {name}")
            file, shape, kind = shapes[held]
            if shape != tuple(tensor.shape) or kind not in _FLOATS:
                raise NotSlicedError(f"{name} is {list(shape)} of {kind} in its files, not {list(tensor.shape)}")
            if not isinstance(tensor, nn.Parameter):
                raise NotSlicedError(f"{name}, which its files hold, is not a parameter")
            found.places[name] = (file, held)
        return found

    def hollow(self, layers: int | None = None) -> PreTrainedModel:
        """The model with parameters that have no memory, in eval mode; tied ones are one."""
        config = copy.deepcopy(self.config)
        if layers is not None:
            text = config.get_text_config()
            text.num_hidden_layers = layers
            if getattr(text, "layer_types", None):
                text.layer_types = text.layer_types[:layers]
        with quiet(), no_init_weights(), init_empty_weights(include_buffers=False):
            auto: Any = AutoModelForCausalLM
            model: PreTrainedModel = auto.from_config(config, dtype=self.dtype)
        model.tie_weights()
        replace_parameters(model, lambda p: torch.empty((), dtype=p.dtype).expand(p.shape))
        with suppress(OSError):  # there is none; transformers has made one from the configuration
            model.generation_config = GenerationConfig.from_pretrained(self.folder)
        model.train(False)
        return model

    def few_layers(self) -> PreTrainedModel:
        """The model's first layers, two at least and one of each type, with embedding and head, read whole."""
        text = self.config.get_text_config()
        kinds = list(getattr(text, "layer_types", None) or ())
        wanted = max([2, *(kinds.index(kind) + 1 for kind in set(kinds))])
        try:
            model = self.hollow(min(wanted, text.num_hidden_layers))
            names = {id(p): name for name, p in model.named_parameters()}
            return replace_parameters(model, lambda p: self.read(names[id(p)]))
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise NotSlicedError(f"it cannot be built with fewer layers ({error})") from error

    def read(self, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        """A copy of a part of a parameter in host memory, its file closed again; `ModelError` if unreadable."""
        file, held = self.places[name]
        try:
            with safe_open(file, framework="pt") as opened:
                found = opened.get_slice(held)[part] if part else opened.get_tensor(held)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: {held} cannot be read ({error}); fetch the model again") from error
        return torch.empty(found.shape, dtype=self.dtype).copy_(found)


def replace_parameters(model: Model, make: Callable[[nn.Parameter], Tensor]) -> Model:
    """Put others in the place of parameters, which are trained or frozen as those were; tied ones stay tied."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # with the old ones, whose ids are not to be used again
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is None:
                continue
            if id(old) not in made:
                made[id(old)] = (old, nn.Parameter(make(old), requires_grad=old.requires_grad))
            module._parameters[name] = made[id(old)][1]
    return model


def _shapes(folder: str) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Tensor -> file, shape and type, as the files' headers say."""

    def path(name: str) -> str | None:
        found: str | None = cached_file(folder, name, _raise_exceptions_for_missing_entries=False)
        return found

    files = [path(SAFE_WEIGHTS_NAME)]
    if files == [None]:
        index = path(SAFE_WEIGHTS_INDEX_NAME)
        if index is None:
            raise NotSlicedError("it has no safetensors files")
        with open(index, encoding="utf-8") as opened:
            files = [path(name) for name in sorted(set(json.load(opened)["weight_map"].values()))]
    found = {}
    for file in files:
        if file is None:
            raise NotSlicedError("its files are not all there")
        with safe_open(file, framework="pt") as header:
            for name in header.keys():  # noqa: SIM118 (not a dict)
                tensor = header.get_slice(name)
                found[name] = (file, tuple(tensor.get_shape()), tensor.get_dtype())
    return found
