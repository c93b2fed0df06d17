"""Adapters are PEFT's own in numbers and files; the leaner layer computes the same."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora.layer import Linear as PeftLoraLinear
from safetensors.torch import load, save_file
from tiny_models import tiny_model, trained
from torch import Tensor, nn

from covey.adapters import CONFIG_FILE, WEIGHTS_FILE
from covey.errors import ModelError
from covey.pytorch.models import lora
from covey.pytorch.models.lora import adapters_off, attach_adapter, attach_lora, load_adapter, save_adapter

TOKENS = torch.arange(4, 16).view(2, 6)


def adapted(family: str = "llama", *, seed: int = 0, filled: bool = True, **options: Any) -> PeftModel:
    model = attach_lora(tiny_model(family), r=4, alpha=8, seed=seed, **options)
    if filled:
        generator = torch.Generator().manual_seed(seed + 1)
        for parameter in trained(model).values():
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def as_peft(model: PeftModel) -> PeftModel:
    for module in model.modules():
        if isinstance(module, lora.LeanLoraLinear):
            module.__class__ = PeftLoraLinear
    return model


def outcome(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(TOKENS).logits
    (logits.float() * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in trained(model).items() if p.grad is not None}


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])  # without bias, with bias, Conv1D
def test_the_lean_layer_computes_what_peft_computes(family: str) -> None:
    model = adapted(family)
    assert any(isinstance(m, lora.LeanLoraLinear) for m in model.modules())
    logits, grads = outcome(model)
    expected_logits, expected_grads = outcome(as_peft(model))
    assert grads.keys() == expected_grads.keys() == trained(model).keys()
    scale = 1e-5 * float(expected_logits.abs().max())  # two libraries may have multiplied
    torch.testing.assert_close(logits, expected_logits, rtol=1e-5, atol=scale)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-5 * max(1.0, float(grad.abs().max())))


def test_float32_adapters_on_a_bfloat16_model() -> None:
    model = attach_lora(tiny_model("llama").bfloat16(), r=4)
    for parameter in trained(model).values():
        assert parameter.dtype == torch.float32
        parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    logits, grads = outcome(model)
    _, expected = outcome(as_peft(model))
    assert logits.dtype == torch.bfloat16
    for name, grad in grads.items():
        assert grad.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(grad.flatten(), expected[name].flatten(), dim=0) > 0.99


def test_dropout_goes_through_peft() -> None:
    model = adapted(dropout=0.5)
    model.train()
    torch.manual_seed(0)
    first = model(TOKENS).logits
    torch.manual_seed(0)
    assert torch.equal(first, as_peft(model)(TOKENS).logits)
    model.eval()
    assert not torch.allclose(first, model(TOKENS).logits)


def test_a_fresh_adapter_changes_nothing_and_depends_on_its_seed_alone() -> None:
    torch.manual_seed(123)
    one = adapted(seed=7, filled=False)
    torch.manual_seed(456)
    state = torch.random.get_rng_state()
    two = adapted(seed=7, filled=False)
    assert torch.equal(torch.random.get_rng_state(), state)
    three = adapted(seed=8, filled=False)
    assert torch.equal(one(TOKENS).logits, tiny_model("llama")(TOKENS).logits)
    names = [name for name in trained(one) if "lora_A" in name]
    assert names
    for name in names:
        assert torch.equal(trained(one)[name], trained(two)[name])
        assert not torch.equal(trained(one)[name], trained(three)[name])


def test_what_is_trained() -> None:
    assert all(".q_proj.lora_" in name for name in trained(adapted(target_modules=["q_proj"])))
    own = attach_lora(tiny_model("llama"), config=LoraConfig(r=2, target_modules=["v_proj"]))
    assert all(".v_proj.lora_" in name for name in trained(own))
    assert attach_lora(own) is own
    with pytest.raises(ModelError, match="lora_target_modules"):
        attach_lora(tiny_model("llama"), target_modules=["no_such_layer"])


def test_adapters_off_is_the_base_model_and_leaves_no_trace_and_copies_are_independent() -> None:
    model, bare = adapted(), tiny_model("llama")(TOKENS).logits
    before = model(TOKENS).logits
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    with adapters_off(model):
        assert torch.equal(model(TOKENS).logits, bare)
    assert torch.equal(model(TOKENS).logits, before)
    assert flags == {name: p.requires_grad for name, p in model.named_parameters()}
    with pytest.raises(KeyError), adapters_off(model):
        raise KeyError
    other = copy.deepcopy(model)
    for parameter in trained(other).values():
        parameter.data.zero_()
    assert torch.equal(model(TOKENS).logits, before)
    assert torch.equal(other(TOKENS).logits, bare)


def test_saved_adapters_are_read_by_peft_and_by_us(tmp_path: Path) -> None:
    model, loaded = adapted(), adapted(seed=5)
    save_adapter(model, tmp_path)
    expected = model(TOKENS).logits
    by_peft = PeftModel.from_pretrained(tiny_model("llama"), str(tmp_path))
    torch.testing.assert_close(by_peft(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
    attached = attach_adapter(tiny_model("llama"), tmp_path)
    assert torch.equal(attached(TOKENS).logits, expected)
    assert trained(attached).keys() == trained(model).keys()
    load_adapter(loaded, tmp_path)
    assert torch.equal(loaded(TOKENS).logits, expected)


def test_an_adapter_for_another_model_is_refused_before_anything_changes(tmp_path: Path) -> None:
    for name, model, options in (
        ("wide", {"hidden_size": 64}, {}),
        ("deep", {"num_layers": 3}, {}),
        ("rank", {}, {"r": 2}),
        ("few", {}, {"target_modules": ["q_proj"]}),
    ):
        save_adapter(attach_lora(tiny_model("llama", **model), **{"r": 4, "alpha": 8} | options), tmp_path / name)
    for name, reason in (
        ("wide", r"down_proj: the adapter is for a layer of \(64, 128\), the model's is \(32, 64\)"),
        ("deep", r"has no model\.layers\.2"),
    ):
        bare = tiny_model("llama")
        with pytest.raises(ModelError, match=reason):
            attach_adapter(bare, tmp_path / name)
        assert not any("lora" in key for key in bare.state_dict())
    for name, reason in (
        ("wide", r"is \[4, 64\], the model's is \[4, 32\]"),
        ("deep", "unexpected"),
        ("rank", "its r is 2"),
        ("few", "lacks"),
    ):
        model = adapted()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(ModelError, match=reason):
            load_adapter(model, tmp_path / name)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_an_adapter_of_a_shallower_model_is_put_on_with_a_word(tmp_path: Path) -> None:
    save_adapter(attach_lora(tiny_model("llama"), r=4, alpha=8), tmp_path / "shallow")
    with pytest.warns(UserWarning, match=r"layers up to model\.layers\.1, the model up to model\.layers\.2"):
        attach_adapter(tiny_model("llama", num_layers=3), tmp_path / "shallow")
    wanted = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], layers_to_transform=[0])
    save_adapter(attach_lora(tiny_model("llama"), config=wanted), tmp_path / "first")
    attach_adapter(tiny_model("llama"), tmp_path / "first")  # warnings are errors


def test_damaged_and_pickled_adapters_are_refused(tmp_path: Path) -> None:
    model, config, file = adapted(), tmp_path / CONFIG_FILE, tmp_path / WEIGHTS_FILE
    with pytest.raises(ModelError, match=CONFIG_FILE):
        load_adapter(model, tmp_path)
    save_adapter(model, tmp_path)
    weights = load(file.read_bytes())  # not mapped: the file is about to be overwritten

    def pickled() -> None:
        file.unlink()
        torch.save(weights, tmp_path / "adapter_model.bin")

    def without_a_config() -> None:
        save_file(weights, file)
        config.write_text("{")

    for damage, words in (
        (lambda: file.write_bytes(b"not a tensor file"), "damaged"),
        (pickled, r"pickled \.bin adapters are not read"),
        (without_a_config, "damaged"),
        (lambda: config.write_text(json.dumps({"peft_type": "NO_SUCH_TYPE"})), "damaged"),
    ):
        damage()
        with pytest.raises(ModelError, match=words):
            load_adapter(model, tmp_path)
