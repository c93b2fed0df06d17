"""Uploads: two formats with one meaning, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from tiny_models import tiny_model

from covey.adapters import read_adapter
from covey.errors import AdapterError
from covey.pytorch.engine.merge import AdaptedWeights, EffectiveWeights, bare_model
from covey.pytorch.models.lora import adapter_of, attach_lora, linear_layers, write_adapter


def adapted(seed: int = 1) -> Any:
    return with_lora(tiny_model("llama"), seed, r=3, scale=0.3)


def with_lora(model: Any, seed: int, *, r: int, scale: float) -> Any:
    """The model with an adapter that changes what it says."""
    model = attach_lora(model, r=r, alpha=2 * r, seed=0)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)
    return model


def as_mlx(weights: bytes, rank: int, scale: float) -> tuple[bytes, dict[str, Any]]:
    tensors = {}
    for name, tensor in load(weights).items():
        short = name.removeprefix("base_model.model.").removesuffix(".weight")
        short = short.replace("lora_A", "lora_a").replace("lora_B", "lora_b")
        tensors[short] = tensor.T.contiguous()
    return save(tensors), {"fine_tune_type": "lora", "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0}}


def test_a_served_adapter_is_the_trainers() -> None:
    model = adapted()
    plain = tiny_model("llama")
    weights, config = write_adapter(model)
    adapter = read_adapter(weights, config, linear_layers(plain))
    served, trained = AdaptedWeights(plain, adapter), EffectiveWeights(model)
    changed = 0
    for name in EffectiveWeights(bare_model(model)):
        torch.testing.assert_close(served[name], trained[name], rtol=1e-6, atol=1e-7)
        changed += not torch.equal(served[name], EffectiveWeights(plain)[name])
        assert (served.frozen_version(name) is None) >= (name.removesuffix(".weight") in adapter.factors)
    assert changed == len(adapter.factors) > 10
    head = EffectiveWeights(plain)["lm_head.weight"]
    torch.testing.assert_close(head, plain.lm_head.weight.detach())  # not written to


def test_both_formats_mean_the_same() -> None:
    model = adapted()
    weights, config = write_adapter(model)
    other = read_adapter(*as_mlx(weights, rank=3, scale=2.0), linear_layers(tiny_model("llama")))
    assert other.sha256 == read_adapter(weights, config, None).sha256 == adapter_of(model).sha256
    assert read_adapter(*as_mlx(weights, rank=3, scale=2.5), None).sha256 != other.sha256
    assert adapter_of(adapted(seed=2)).sha256 != other.sha256


def changed(do: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    return lambda t, c: (t | {name: do(t[name])}, c)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (changed(lambda x: x / 0), "up_proj: its matrix A has values that are not finite"),
        (changed(lambda x: x[:, :-1].contiguous()), r"for a layer of \(64, 31\)|for a layer of"),
        (changed(lambda x: x[:-1].contiguous()), "are not of the rank 3"),
        (changed(lambda x: x.long()), "must be a matrix of floats"),
        (changed(lambda x: x.flatten()), "must be a matrix of floats"),
        (lambda t, c: ({n: v for n, v in t.items() if "layers.0.self_attn.q_proj.lora_B" not in n}, c), "one half of"),
        (lambda t, c: (t | {"base_model.model.evil": torch.zeros(1)}, c), "which is no LoRA tensor"),
        (lambda t, c: ({n.replace("layers.1", "layers.7"): t[n] for n in t}, c), "no linear layer of that name"),
        (lambda t, c: ({}, c), "no LoRA tensors"),
        (lambda t, c: (t, c | {"peft_type": "IA3"}), "must be LORA"),
        (lambda t, c: (t, c | {"use_dora": True}), "only plain LoRA"),
        (lambda t, c: (t, c | {"bias": "all"}), "only plain LoRA"),
        (lambda t, c: (t, c | {"r": 0}), "r=0; it must be a number above 0"),
        (lambda t, c: (t, c | {"r": 3.5}), "whole number"),
        (lambda t, c: (t, c | {"lora_alpha": float("nan")}), "lora_alpha=nan"),
        (lambda t, c: (t, {"something": "else"}), "neither PEFT's"),
        (lambda t, c: (t, [1]), "not a JSON object"),
    ],
)
def test_what_is_refused(spoil: Callable[..., Any], message: str) -> None:
    weights, config = write_adapter(adapted())
    tensors, settings = spoil(load(weights), config)
    with pytest.raises(AdapterError, match=message):
        read_adapter(save(tensors), settings, linear_layers(tiny_model("llama")))


JUNK = [b"", b"\x00" * 100, pickle.dumps({"a": 1}), b"\xff" * 8 + b"{}", write_adapter(adapted())[0][:-10]]


@pytest.mark.parametrize("junk", JUNK, ids=["nothing", "zeros", "a pickle", "a header of exabytes", "a truncated one"])
def test_files_that_are_no_safetensors(junk: bytes) -> None:
    with pytest.raises(AdapterError, match="not a safetensors file"):
        read_adapter(junk, {"peft_type": "LORA", "r": 1, "lora_alpha": 1}, None)


def test_without_an_adapter() -> None:
    with pytest.raises(AdapterError, match="no LoRA adapter to upload"):
        write_adapter(tiny_model("llama"))
