"""LoRA adapters through PEFT: attach, save, load, switch off; and a leaner linear layer for training them.

Adapters are PEFT's in every respect (names, config, files). Only the forward of plain LoRA linear layers is replaced,
because PEFT's makes avoidable copies:

    PEFT     out = base(x) + B(A(x)) * scaling           three [M, out] buffers; with a bfloat16 base and float32
                                                         adapters a float32 copy of x is kept for each layer
    here     out = base(x); out += scaling * (x A') B'   in place; small A and B are cast instead of the large x

Saved adapters are read by `covey.adapters`. Dropout is off everywhere but in adapters, whose own is switched on while
training alone.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ml_dtypes
import numpy as np
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora.layer import Linear as PeftLoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper, get_peft_model_state_dict
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from covey.adapters import PEFT_PREFIX, Adapter, Array, check_fits, read_adapter_folder
from covey.errors import AdapterError, ConfigError, ModelError
from covey.processes import total_memory
from covey.pytorch.models.narrow import NarrowLinear
from covey.pytorch.products import add_product, linear, product

if TYPE_CHECKING:
    from covey.pytorch.models.pictures import Album
    from covey.tasks.pictures import Picture
    from covey.types import IntArray


class _LoraFunction(torch.autograd.Function):
    """`x W' + b + scaling (x A') B'`, base frozen; x `[M, in]`, A `[r, in]`, B `[out, r]` -> `[M, out]`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        a_cast, b_cast = a.to(x.dtype), b.to(x.dtype)
        low = linear(x, a_cast)
        ctx.save_for_backward(x, weight, a_cast, b_cast, low)
        ctx.scaling, ctx.dtypes = scaling, (a.dtype, b.dtype)
        return add_product(linear(x, weight, bias), low, b_cast.T, scaling)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, Tensor | None, None]:
        x, weight, a, b, low = ctx.saved_tensors
        grad_low = product(grad, b).mul_(ctx.scaling)  # [M, r]
        grad_x = grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = add_product(product(grad, weight), grad_low, a)
        if ctx.needs_input_grad[3]:
            grad_a = product(grad_low.T, x).to(ctx.dtypes[0])
        if ctx.needs_input_grad[4]:
            grad_b = product(grad.T, low).mul_(ctx.scaling).to(ctx.dtypes[1])
        return grad_x, None, None, grad_a, grad_b, None


Factors = tuple[Tensor, Tensor, float]
"""A `[r, in]`, B `[out, r]` and scaling of one adapter."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One adapter: `scaling * B A` on the outputs `columns`."""

    columns: slice
    rank: int
    b: Tensor  # [out, r]
    scaling: float
    dtypes: tuple[torch.dtype, torch.dtype]  # of the parameters A and B


@dataclass(frozen=True, slots=True, eq=False)
class Adapters:
    """The adapters of linear layers that read one input and whose outputs are side by side, in the inputs' dtype.
    Detached when made, so that a later exchange of data does not reach a backward.
    """

    a: Tensor  # [sum r, in]
    parts: list[_Part]

    @classmethod
    def beside(cls, layers: Iterable[tuple[int, Factors | None]], dtype: torch.dtype) -> Adapters | None:
        """Of layers with so many outputs each, in their order; None where there is no adapter."""
        rows, parts, column = [], [], 0
        for size, factors in layers:
            if factors is not None:
                a, b, scaling = factors
                rows.append(a.to(dtype))
                columns = slice(column, column + size)
                parts.append(_Part(columns, len(a), b.to(dtype), scaling, (a.dtype, b.dtype)))
            column += size
        return cls(torch.cat(rows), parts) if parts else None

    def split(self, low: Tensor) -> list[Tensor]:
        """`x A'` `[M, sum r]` of all adapters -> `[M, r]` of each."""
        return list(torch.split(low, [part.rank for part in self.parts], dim=1))

    def add_to(self, y: Tensor, x: Tensor) -> Tensor:
        """Add what they make of the inputs `[M, in]` to the outputs `[M, out]`; returns `x A'` `[M, sum r]`."""
        low = linear(x, self.a)
        for part, mine in zip(self.parts, self.split(low), strict=True):
            add_product(y[:, part.columns], mine, part.b.T, part.scaling)
        return low


class LeanLoraLinear(PeftLoraLinear):  # type: ignore[misc]
    """PEFT's LoRA linear layer with a leaner forward where one plain adapter is active, else PEFT's own."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        name = self.plain_adapter()
        dtype = torch.float32 if isinstance(self.base_layer, NarrowLinear) else self.base_layer.weight.dtype
        if name is None or args or kwargs or x.dtype != dtype:
            out: Tensor = super().forward(x, *args, **kwargs)
            return out
        a, b, base = self.lora_A[name].weight, self.lora_B[name].weight, self.base_layer
        flat = x.reshape(-1, x.shape[-1])
        lean: Tensor = cast(Any, _LoraFunction).apply(flat, base.weight, base.bias, a, b, self.scaling[name])
        return lean.view(*x.shape[:-1], lean.shape[-1])

    def factors(self) -> Factors | None:
        """Those of the one plain adapter that is active, detached."""
        name = self.plain_adapter()
        if name is None:
            return None
        return self.lora_A[name].weight.detach(), self.lora_B[name].weight.detach(), self.scaling[name]

    def plain_adapter(self) -> str | None:
        """The one active adapter, if this layer is exactly `base + scaling * B A`; None otherwise."""
        names = self.active_adapters
        if self.disable_adapters or self.merged or len(names) != 1 or names[0] not in self.lora_A:
            return None
        name: str = names[0]
        base, dropout = self.base_layer, self.lora_dropout[name]
        plain = (
            type(base) in (nn.Linear, NarrowLinear)
            and not base.weight.requires_grad
            and name not in self.lora_variant
            and not self.lora_bias[name]
            and (not dropout.training or isinstance(dropout, nn.Identity))
            and not torch.is_autocast_enabled(base.weight.device.type)
        )
        return name if plain else None


def album_of(model: nn.Module) -> Album | None:
    """What a vision model has beside its language half, or beside the PEFT model around that; None for others."""
    return getattr(model.get_base_model() if isinstance(model, PeftModel) else model, "album", None)


def pictures_in(model: nn.Module, ids: Iterable[IntArray]) -> list[Picture]:
    """The pictures of which there are places among token ids, for a model's album in another process."""
    return [] if (album := album_of(model)) is None else album.shown_in(ids)


def attach(model: nn.Module, *, use_peft: bool, adapter: str | Path | None = None, **lora: Any) -> nn.Module:
    """Put on a model what is to be trained: nothing, a fresh adapter, or a saved one.

    `lora` are the options of `attach_lora` with `lora_` before their names, but for the seed.
    """
    trained = model
    if adapter is not None and isinstance(model, PeftModel):
        load_adapter(model, adapter)
    elif adapter is not None:
        trained = attach_adapter(model, adapter)
    elif use_peft or isinstance(model, PeftModel):
        trained = attach_lora(model, **{name.removeprefix("lora_"): value for name, value in lora.items()})
    return trained


def attach_lora(
    model: nn.Module,
    *,
    r: int = 16,
    alpha: float = 32,
    dropout: float = 0.0,
    target_modules: str | Sequence[str] = "all-linear",
    config: LoraConfig | None = None,
    seed: int = 0,
) -> PeftModel:
    """Put a fresh LoRA adapter on a model, whose weights are frozen; a PEFT model keeps its own. Where no module
    has the names given, or PEFT refuses the config: `ConfigError`, of a `config` that is given `ModelError`.
    """
    if isinstance(model, PeftModel):
        return _lean(model)
    if config is not None and not isinstance(config, LoraConfig):
        raise ModelError(f"peft_config={config!r:.200}: a {type(config).__name__}; pass a peft.LoraConfig")
    named = config is None
    require_rank(model, config.r if config is not None else r)
    if config is None:
        targets = target_modules if isinstance(target_modules, str) else list(target_modules)
        if isinstance(targets, str) and re.fullmatch(r"\w+(\.\w+)*", targets):  # a lone name, to PEFT an expression
            targets = [targets]
        if targets == "all-linear" and any(p.dim() == 3 for p in model.parameters()):
            # PEFT would adapt experts and their router too, with ranks of their own: no plain LoRA, which servers take
            head = cast(Any, model).get_output_embeddings()
            targets = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
        config = LoraConfig(
            r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets, bias="none", task_type="CAUSAL_LM"
        )
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # e.g. that Conv1D layers need fan_in_fan_out, which PEFT then sets
        torch.manual_seed(seed)
        try:
            if album_of(model) is not None and not isinstance(config.target_modules, str | None):
                own = [f".{name}" for name, _ in model.named_modules()]
                if wrong := sorted(n for n in config.target_modules if not any(o.endswith(f".{n}") for o in own)):
                    raise ValueError(f"the language half, which alone is trained, has no {', '.join(wrong)}")
            return _lean(get_peft_model(model, config))
        except (ValueError, TypeError, KeyError, re.error) as error:
            raise (ConfigError if named else ModelError)(
                f"model.lora_target_modules={config.target_modules!r}: PEFT cannot attach it ({error}); "
                "use all-linear or names of linear layers of this model"
            ) from error


def require_rank(model: nn.Module, r: int) -> None:
    """`ModelError` for an adapter larger than what it adapts, or than memory with gradients and AdamW's moments."""
    sizes = [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)]
    needed = 16 * r * sum(map(sum, sizes))
    if needed > total_memory() and not next(model.parameters()).is_meta:
        raise ModelError(
            f"model.lora_r={r}: adapters of that rank on all linear layers need {needed / 1e9:,.0f} GB with gradients "
            f"and the optimiser's moments, and this machine has {total_memory() / 1e9:,.0f} GB of memory; use 8 to 64"
        )
    if sizes and r > max(map(max, sizes)):
        raise ModelError(
            f"model.lora_r={r}: more than the {max(map(max, sizes))} rows or columns of the model's largest layer; "
            "an adapter is meant to be smaller than what it adapts, use 8 to 64"
        )


def attach_adapter(model: nn.Module, path: str | Path) -> PeftModel:
    """Put a saved PEFT adapter on a model, trainable; `ModelError`, and no change, if it is damaged or does not fit."""
    config, adapter = _read(path, model)
    problem = _misfit(model, adapter)
    if problem:
        raise ModelError(f"{path}: is an adapter for another model ({problem}); give the adapter's own base model")
    if left := _blocks_left(model, adapter):
        base = adapter.config.get("base_model_name_or_path")
        warnings.warn(f"{path}: {left}; is {base!s:.200} this model?", UserWarning, stacklevel=2)
    config.inference_mode = False
    peft_model = attach_lora(model, config=config)
    _fill(peft_model, adapter, path)
    return peft_model


def load_adapter(model: PeftModel, path: str | Path) -> None:
    """Replace the adapter's weights by saved ones; `ModelError`, and no change, for other modules, shapes, scaling."""
    config, adapter = _read(path, model)
    own = model.peft_config[model.active_adapter]
    for field in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"):
        mine, theirs = getattr(own, field, None), getattr(config, field, None)
        if mine != theirs:
            raise ModelError(f"{path}: its {field} is {theirs}, the attached adapter has {mine}; attach it afresh")
    _fill(model, adapter, path)


def save_adapter(model: PeftModel, path: str | Path, state: dict[str, Tensor] | None = None) -> None:
    """Write the adapter as PEFT does; `state` has its tensors by the model's names where the model has only parts."""
    # "auto" would ask the hub whether the vocabulary was resized.
    model.save_pretrained(str(path), save_embedding_layers=False, state_dict=state)
    if (album := album_of(model)) is not None:
        album.rename_saved(path)


def adapter_of(model: nn.Module, state: dict[str, Tensor] | None = None) -> Adapter:
    """A PEFT model's adapter as in its files, arrays on the CPU; `state` as of `save_adapter`. `AdapterError`: none."""
    if not isinstance(model, PeftModel):
        raise AdapterError("the model has no LoRA adapter to upload; set model.use_peft to true")
    found = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    settings = json.loads(json.dumps(model.active_peft_config.to_dict(), default=_plain))
    return Adapter({name: _array(tensor) for name, tensor in found.items()}, settings)


def write_adapter(model: nn.Module) -> tuple[bytes, dict[str, Any]]:
    """A model's adapter as an upload's two parts, safetensors and PEFT's config; `AdapterError` where there is none."""
    adapter = adapter_of(model)
    return adapter.to_bytes(), dict(adapter.config)


def linear_layers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """`(out, in)` of every linear layer of a bare model, by its name."""
    return {name: (m.out_features, m.in_features) for name, m in model.named_modules() if isinstance(m, nn.Linear)}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The base model's own weights inside the block. Leaves `requires_grad` alone, unlike PEFT's switch."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper)]
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, state in zip(layers, before, strict=True):
            layer._disable_adapters = state


def _lean(model: PeftModel) -> PeftModel:
    # Changing the class, not the method, keeps layers copyable; the attributes are the same.
    for module in model.modules():
        if type(module) is PeftLoraLinear:
            module.__class__ = LeanLoraLinear
    return model


def _read(path: str | Path, model: nn.Module) -> tuple[PeftConfig, Adapter]:
    adapter = read_adapter_folder(path)
    album = album_of(model)
    adapter = adapter if album is None else album.adapter_of_half(adapter)
    try:
        config = PeftConfig.from_pretrained(str(path))
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: the adapter is damaged ({error}); save or fetch it again") from error
    if album is not None:
        config.target_modules = adapter.config.get("target_modules")
    for name, array in adapter.tensors.items():
        if not np.isfinite(array).all():
            raise ModelError(f"{path}: the adapter's {name} holds NaN or infinity; use another copy or an earlier one")
    return config, adapter


def _misfit(model: nn.Module, adapter: Adapter) -> str:
    """Why an adapter does not fit a bare model, or ""."""
    if adapter.config.get("target_parameters"):
        return ""  # PEFT's wrappers make names of their own: compared when they are there
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for key, value in sorted(adapter.tensors.items()):
        name = key.removeprefix(PEFT_PREFIX)
        module, factor, _ = name.partition(".lora_")
        if module not in (modules if factor else parameters):
            return f"the model has no {module}"
        if not factor and parameters[name].shape != value.shape:
            return f"{name} is {list(value.shape)}, the model's is {list(parameters[name].shape)}"
    turned = {n: (m.weight.shape[1], m.weight.shape[0]) for n, m in modules.items() if isinstance(m, Conv1D)}
    try:
        adapter.check(linear_layers(model) | turned)
    except AdapterError as error:
        return str(error)
    return ""


def _blocks_left(model: nn.Module, adapter: Adapter) -> str:
    """That an adapter ends before the model does, which one of a smaller model with the same widths does, or ""."""
    if adapter.config.get("layers_to_transform") is not None:
        return ""
    names = {name.removeprefix(PEFT_PREFIX).partition(".lora_")[0] for name in adapter.tensors}
    mine = _last_blocks(name for name, _ in model.named_modules())
    for stack, last in _last_blocks(names).items():
        if last < mine.get(stack, last):
            return f"the adapter has the layers up to {stack}.{last}, the model up to {stack}.{mine[stack]}"
    return ""


def _last_blocks(names: Iterable[str]) -> dict[str, int]:
    """Of each stack of numbered blocks, such as `model.layers`, the last one that a name is in."""
    found: dict[str, int] = {}
    for name in names:
        if block := re.match(r"(.+?)\.(\d+)(\.|$)", name):
            found[block[1]] = max(found.get(block[1], 0), int(block[2]))
    return found


def _fill(model: PeftModel, adapter: Adapter, path: str | Path) -> None:
    weights = {name: _tensor(array) for name, array in adapter.tensors.items()}
    own = get_peft_model_state_dict(model, save_embedding_layers=False)
    check_fits({name: value.shape for name, value in own.items()}, weights, f"{path}: the adapter")
    set_peft_model_state_dict(model, weights, adapter_name=model.active_adapter)


def _array(tensor: Tensor) -> Array:
    tensor, narrow = tensor.detach().cpu().contiguous(), tensor.dtype == torch.bfloat16
    return cast(Array, tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if narrow else tensor.numpy())


def _tensor(array: Array) -> Tensor:
    narrow = array.dtype == ml_dtypes.bfloat16
    return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16) if narrow else torch.from_numpy(array)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def dropout_obstacle(model: nn.Module) -> str | None:
    """Why the adapters' dropout forbids to share tokens, if there is any."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and ".lora_dropout." in name and module.p > 0:
            return f"lora_dropout={module.p} draws a mask for each token of each sequence; set it to 0 to share tokens"
    return None


def switch_dropout_off(model: nn.Module) -> None:
    """Set every dropout but LoRA's to 0, since checkpointed layers run in training mode."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and ".lora_dropout." not in name:
            module.p = 0.0
        elif isinstance(module, GradientCheckpointingLayer):
            for attribute in ("dropout", "hidden_dropout", "activation_dropout", "attention_dropout", "resid_dropout"):
                if isinstance(getattr(module, attribute, None), float):
                    setattr(module, attribute, 0.0)
