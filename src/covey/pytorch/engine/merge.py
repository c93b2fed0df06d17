"""The weights that a policy computes with, adapters included, without touching the policy.

`EffectiveWeights(model)["model.layers.0.self_attn.q_proj.weight"]` is `W + scaling * B @ A` for a layer with an active
LoRA adapter and `W` itself for every other, under the parameter's name in the bare transformers model. Each is computed
when asked for. A quantised layer's weight is what it stands for, in full (`covey.pytorch.models.quantised`).

Plain LoRA on linear layers and on a mixture's experts is added here. Every other PEFT layer (DoRA, LoRA on embeddings,
IA3, ...) is deep-copied and merged by PEFT's own code, one layer at a time: slower, and right by definition.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn

from covey.adapters import Adapter
from covey.errors import ModelError
from covey.pytorch.models.lora import Factors, LeanLoraLinear, adapter_of
from covey.pytorch.models.quantised import dequantised, is_quantised, plain_linear
from covey.rollout.learning import Weights


class EffectiveWeights(Mapping[str, Tensor]):
    """Parameters by their name in the bare model, adapters added; read anew at each access. `ModelError` for an adapter
    that acts in another way than through weights (prompt tuning).
    """

    adapter: Adapter | None = None

    def __init__(self, model: nn.Module) -> None:
        self.base = bare_model(model)
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        for name, module in _walk(self.base, ""):
            parameters = _effective_module(module).named_parameters(recurse=False)
            for leaf, _ in parameters:
                self._owners[f"{name}{leaf}"] = (_owner(module, leaf), leaf)

    def __contains__(self, name: object) -> bool:
        return name in self._owners

    def __len__(self) -> int:
        return len(self._owners)

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        """The weight `name`; where no adapter changes it, the model's own memory: do not write to it."""
        module, leaf = self._owners[name]
        if not isinstance(module, BaseTunerLayer):
            return _parameter(_effective_module(module), leaf)
        weight = _parameter(module.get_base_layer(), leaf)
        adapters = _unmerged_adapters(module)
        if not adapters:
            return weight
        if _is_plain_lora(module, adapters):
            if leaf != getattr(module, "parameter_name", "weight"):
                return weight
            simple = not isinstance(module, ParamWrapper) and not module.fan_in_fan_out
            if simple and weight.dtype == torch.float32 and len(adapters) == 1:
                a, b = module.lora_A[adapters[0]].weight, module.lora_B[adapters[0]].weight
                return torch.addmm(weight, b.float(), a.float(), alpha=module.scaling[adapters[0]])
            for adapter in adapters:
                weight = weight.float() + module.get_delta_weight(adapter).float()
            return weight
        if is_quantised(module.get_base_layer()):
            raise ModelError(
                f"{name}: an adapter that is more than plain LoRA on a quantised layer cannot be merged exactly; use "
                "plain LoRA, or set model.quantization to none"
            )
        merged = copy.deepcopy(module)
        merged.merge(safe_merge=False, adapter_names=list(adapters))
        return _parameter(merged.get_base_layer(), leaf)

    def factored(self, name: str) -> tuple[Tensor, Factors | None]:
        """The weight `name`, and the adapter to add: None without one, or if it is no plain LoRA and in the weight."""
        module, leaf = self._owners[name]
        adapters = _unmerged_adapters(module) if type(module) in (LoraLinear, LeanLoraLinear) else []
        layer: Any = module
        if leaf != "weight" or len(adapters) != 1 or not _is_plain_lora(layer, adapters) or layer.fan_in_fan_out:
            return self[name], None
        a, b = (part[adapters[0]].weight.detach() for part in (layer.lora_A, layer.lora_B))
        return _parameter(layer.get_base_layer(), leaf), (a, b, layer.scaling[adapters[0]])

    def owner(self, name: str) -> nn.Module:
        """The module that the weight `name` is a parameter of; PEFT's layer where there is one."""
        return self._owners[name][0]

    def frozen_version(self, name: str) -> tuple[int, int] | None:
        """Equal at two times if the weight `name` cannot have changed between them; None where it may have."""
        module, leaf = self._owners[name]
        if isinstance(module, BaseTunerLayer) and _unmerged_adapters(module):
            return None
        base = module.get_base_layer() if isinstance(module, BaseTunerLayer) else _effective_module(module)
        parameter: Tensor = getattr(base, leaf)
        return None if parameter.requires_grad else (parameter.data_ptr(), parameter._version)


class AdaptedWeights(EffectiveWeights):
    """A bare model's weights with an adapter's added. The model is not changed."""

    def __init__(self, model: nn.Module, adapter: Adapter) -> None:
        super().__init__(model)
        self.adapter: Adapter = adapter

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        """The weight `name`, `W + scaling * B A` where the adapter changes it."""
        weight = super().__getitem__(name)
        factors = self.adapter.factors.get(name.removesuffix(".weight"))
        if factors is None or not name.endswith(".weight"):
            return weight
        a, b = torch.from_numpy(factors.a).to(weight.device), torch.from_numpy(factors.b).to(weight.device)
        return torch.addmm(weight.float(), b, a, alpha=factors.scaling)

    def frozen_version(self, name: str) -> tuple[int, int] | None:
        """None for what the adapter changes."""
        return None if name.removesuffix(".weight") in self.adapter.factors else super().frozen_version(name)

    def factored(self, name: str) -> tuple[Tensor, Factors | None]:
        """See `EffectiveWeights.factored`."""
        factors = self.adapter.factors.get(name.removesuffix(".weight"))
        if factors is None or not name.endswith(".weight"):
            return super().factored(name)
        return super().__getitem__(name), (torch.from_numpy(factors.a), torch.from_numpy(factors.b), factors.scaling)


def weights_of(model: nn.Module, version: int) -> Weights:
    """The present weights of a model, or of the PEFT model around one, as `version`; nothing is copied."""
    held = EffectiveWeights(model)
    return Weights(version, lambda: held, partial(adapter_of, model) if isinstance(model, PeftModel) else None)


def frozen_version(weights: Mapping[str, Tensor], name: str) -> tuple[int, int] | None:
    """See `EffectiveWeights.frozen_version`; None for what other mappings hold."""
    return weights.frozen_version(name) if isinstance(weights, EffectiveWeights) else None


def are_tied(weights: Mapping[str, Tensor], head: str, embedding: str) -> bool:
    """True when both names are one tensor and no adapter separates them, or the head has no weight of its own."""
    return head not in weights or weights[head].data_ptr() == weights[embedding].data_ptr()


def bare_model(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT model, PEFT's layers in place; a bare model as it is."""
    if not isinstance(model, PeftModel):
        return model
    if model.active_peft_config.is_prompt_learning:
        kind = model.active_peft_config.peft_type
        raise ModelError(f"adapter of type {kind}: it adds virtual tokens, not weights; use LoRA")
    return cast(nn.Module, model.get_base_model())


def copy_without_adapters(model: nn.Module) -> nn.Module:
    """A deep copy of the bare model, without hooks, each PEFT layer replaced by the layer that it wraps."""
    base = bare_model(model)
    memo: dict[int, object] = {}
    for _, module in _walk(base, ""):
        inner = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        if is_quantised(inner):
            memo[id(module)] = plain_linear(inner)
        elif inner is not module:
            memo[id(module)] = copy.deepcopy(inner)
    for wrapper in base.modules():
        if isinstance(wrapper, AuxiliaryTrainingWrapper):
            memo[id(wrapper)] = copy.deepcopy(_unwrapped(wrapper))
    twin = copy.deepcopy(base, memo)
    for module in twin.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return twin.eval().requires_grad_(False)


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules with the prefix of their parameters' names in the bare model; PEFT's own stay hidden."""
    if isinstance(module, AuxiliaryTrainingWrapper):
        module = _unwrapped(module)
    yield prefix, module
    if isinstance(module, BaseTunerLayer):
        return
    for name, child in module.named_children():
        yield from _walk(child, f"{prefix}{name}.")


def _unwrapped(wrapper: AuxiliaryTrainingWrapper) -> nn.Module:
    if isinstance(wrapper, ModulesToSaveWrapper):
        adapters = [] if wrapper.disable_adapters else wrapper.active_adapters
        return cast(nn.Module, wrapper.modules_to_save[adapters[0]] if adapters else wrapper.original_module)
    if hasattr(wrapper, "token_adapter"):
        return cast(nn.Module, wrapper.token_adapter)
    raise ModelError(
        f"adapter part {type(wrapper).__name__}: its effect on the weights is not known; use LoRA, with "
        "modules_to_save where whole modules are trained"
    )


def _owner(module: nn.Module, leaf: str) -> nn.Module:
    """Of PEFT's wrappers around one module, each for one of its parameters, the one for `leaf`."""
    if not isinstance(module, ParamWrapper):
        return module
    return module if module.parameter_name == leaf else _owner(module.base_layer, leaf)


def _effective_module(module: nn.Module) -> nn.Module:
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


def _unmerged_adapters(layer: BaseTunerLayer) -> list[str]:
    if layer.disable_adapters:
        return []
    present = {name for part in layer.adapter_layer_names for name in getattr(layer, part, {})}
    return [a for a in layer.active_adapters if a in present and a not in layer.merged_adapters]


def _is_plain_lora(layer: BaseTunerLayer, adapters: list[str]) -> bool:
    known = type(layer) in (LoraLinear, LeanLoraLinear, ParamWrapper) or (
        isinstance(layer, LoraLayer) and is_quantised(layer.get_base_layer())
    )
    return known and not any(a in layer.lora_variant or layer.lora_bias.get(a, False) for a in adapters)


def _parameter(module: nn.Module, leaf: str) -> Tensor:
    if leaf == "weight" and is_quantised(module):
        return dequantised(module)
    tensor: Tensor = getattr(module, leaf)
    return tensor.detach()
