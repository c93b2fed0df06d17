"""Adapters are PEFT's own in numbers and files; the reference is the starting policy until its rule says otherwise."""

import copy
import json
from contextlib import nullcontext
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
from covey.errors import ConfigError, ModelError
from covey.pytorch.models import lora
from covey.pytorch.models.lora import adapters_off, attach_adapter, attach_lora, load_adapter, save_adapter
from covey.pytorch.reference import Reference
from fakes import raises

TOKENS = torch.arange(4, 16).view(2, 6)


def adapted(family: str = "llama", *, seed: int = 0, filled: bool = True, **options: Any) -> PeftModel:
    model = attach_lora(tiny_model(family), r=4, alpha=8, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in trained(model).values() if filled else ():
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


def test_what_is_trained_and_a_fresh_adapter_changes_nothing_and_depends_on_its_seed_alone() -> None:
    torch.manual_seed(123)
    one = adapted(seed=7, filled=False)
    torch.manual_seed(456)
    state, two = torch.random.get_rng_state(), adapted(seed=7, filled=False)
    assert torch.equal(torch.random.get_rng_state(), state)
    three = adapted(seed=8, filled=False)
    assert torch.equal(one(TOKENS).logits, tiny_model("llama")(TOKENS).logits)
    names = [name for name in trained(one) if "lora_A" in name]
    assert {torch.equal(trained(one)[name], trained(two)[name]) for name in names} == {True}
    assert {torch.equal(trained(one)[name], trained(three)[name]) for name in names} == {False}
    for lone in ("q_proj", "self_attn.q_proj", ["q_proj"]):  # a lone name is no regular expression
        assert all(".q_proj.lora_" in name for name in trained(adapted(target_modules=lone)))
    for some in (["layers.1.self_attn.q_proj"], r".*layers\.1\..*q_proj"):
        assert all(".layers.1.self_attn.q_proj." in name for name in trained(adapted(target_modules=some)))
    own = attach_lora(tiny_model("llama"), config=LoraConfig(r=2, target_modules=["v_proj"]))
    assert all(".v_proj.lora_" in name for name in trained(own))
    assert attach_lora(own) is own
    raises(ConfigError, "lora_target_modules", attach_lora, tiny_model("llama"), target_modules=["no_such_layer"])


def test_adapters_off_is_the_base_model_and_leaves_no_trace_and_copies_are_independent() -> None:
    model, bare = adapted(), tiny_model("llama")(TOKENS).logits
    before, flags = model(TOKENS).logits, {name: p.requires_grad for name, p in model.named_parameters()}
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


def test_saved_adapters_are_read_again(tmp_path: Path) -> None:
    model, loaded = adapted(), adapted(seed=5)
    save_adapter(model, tmp_path)
    expected, attached = model(TOKENS).logits, attach_adapter(tiny_model("llama"), tmp_path)
    assert torch.equal(attached(TOKENS).logits, expected)
    assert trained(attached).keys() == trained(model).keys()
    load_adapter(loaded, tmp_path)
    assert torch.equal(loaded(TOKENS).logits, expected)


def test_an_adapter_for_another_model_is_refused_before_anything_changes(tmp_path: Path) -> None:
    wide = r"down_proj: the adapter is for a layer of \(64, 128\), the model's is \(32, 64\)"
    for sizes, options, attached, loaded in (
        ({"hidden_size": 64}, {}, wide, r"is \[4, 64\], the model's is \[4, 32\]"),
        ({"num_layers": 3}, {}, r"has no model\.layers\.2", "unexpected"),
        ({}, {"r": 2}, None, "its r is 2"),
        ({}, {"target_modules": ["q_proj"]}, None, "lacks"),
    ):
        save_adapter(attach_lora(tiny_model("llama", **sizes), **{"r": 4, "alpha": 8} | options), tmp_path)
        if attached:
            bare = tiny_model("llama")
            raises(ModelError, attached, attach_adapter, bare, tmp_path)
            assert not any("lora" in key for key in bare.state_dict())
        model = adapted()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        raises(ModelError, loaded, load_adapter, model, tmp_path)
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
    raises(ModelError, CONFIG_FILE, load_adapter, model, tmp_path)
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
        raises(ModelError, words, load_adapter, model, tmp_path)


def build(lora: bool) -> nn.Module:
    return attach_lora(tiny_model("llama"), r=2) if lora else tiny_model("llama")


def take_a_step(model: nn.Module, amount: float = 0.1) -> None:
    for parameter in trained(model).values():
        parameter.data.add_(amount)


def logits(model: nn.Module, reference: Reference | None = None) -> Tensor:
    with torch.no_grad(), reference.active() if reference else nullcontext():
        return model(TOKENS).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize(("lora", "from_current"), [(True, False), (False, False), (True, True)])
def test_it_stays_the_starting_policy(lora: bool, from_current: bool) -> None:
    model = build(lora)
    if from_current:  # a starting adapter
        take_a_step(model)
    start, reference = logits(model), Reference(model, from_current=from_current)
    assert reference.is_base_model == (lora and not from_current)
    take_a_step(model)
    after = logits(model)
    assert not torch.allclose(after, start)
    assert torch.equal(logits(model, reference), start)
    assert torch.equal(logits(model), after)
    assert reference.after_step(1) is False
    assert torch.equal(logits(model, reference), start)


@pytest.mark.parametrize("lora", [True, False])
def test_copies_every_two_steps_and_moving_averages_by_hand(lora: bool) -> None:
    model = build(lora)
    reference = Reference(model, update="copy", every=2)
    for step in (1, 2, 3, 4):
        take_a_step(model)
        assert reference.after_step(step) == (step % 2 == 0)
        own, old = logits(model), logits(model, reference)
        assert torch.equal(own, old) if step % 2 == 0 else not torch.allclose(own, old)
    # at x at the start, the policy at x + 1 after the step, decay 0.75: x + 0.25, then x + 0.4375
    model = build(lora)
    start = {name: p.detach().clone() for name, p in trained(model).items()}
    reference = Reference(model, update="ema", ema_decay=0.75)
    take_a_step(model, 1.0)
    for step, moved in ((1, 0.25), (2, 0.4375)):
        assert reference.after_step(step)
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(value, start[name] + moved, rtol=1e-5, atol=1e-5)


def test_a_graph_built_before_is_walked_with_its_own_weights_and_tied_ones_return_after_an_error() -> None:
    found = []
    for use_reference_between in (False, True):
        model = build(False)
        reference = Reference(model)
        take_a_step(model)
        loss = model(TOKENS).logits.square().mean()
        if use_reference_between:
            logits(model, reference)
        loss.backward()
        found.append({name: p.grad for name, p in trained(model).items()})
    plain, between = found
    assert all(torch.equal(grad, between[name]) for name, grad in plain.items())
    model: Any = tiny_model("llama", tie_word_embeddings=True)
    reference = Reference(model)
    take_a_step(model)
    before = logits(model)
    with reference.active():
        assert not torch.is_grad_enabled()
        assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.raises(KeyError), reference.active():
        raise KeyError
    assert torch.is_grad_enabled()
    assert torch.equal(logits(model), before)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("update", ["none", "copy", "ema"])
def test_it_resumes_to_the_same_numbers(lora: bool, update: Any) -> None:
    model = build(lora)
    reference, resumed = (Reference(model, update=update, every=2) for _ in range(2))
    for step in (1, 2, 3):
        take_a_step(model)
        reference.after_step(step)
    resumed.load_state_dict(reference.state_dict())
    assert resumed.is_base_model == reference.is_base_model
    take_a_step(model)
    assert reference.after_step(4) == resumed.after_step(4)
    assert torch.equal(logits(model, reference), logits(model, resumed))


def test_what_is_wrong_is_named_and_a_run_without_a_reference_holds_no_copy() -> None:
    reference = Reference(build(False))
    broken = {**reference.state_dict(), next(iter(reference.state_dict())): torch.zeros(1)}
    for state, words in (({}, "tensors missing"), (broken, "the model's is")):
        raises(ModelError, words, reference.load_state_dict, state)
    every = ({"every": 0}, "reference_update_steps=0")
    update, decay = ({"update": "sometimes"}, "update='sometimes'"), ({"ema_decay": 1.0}, r"reference_ema_decay=1\.0")
    for settings, words in (every, update, decay):
        raises(ConfigError, words, Reference, build(True), **settings)
    reference = Reference(build(False), needed=False, update="ema")
    assert (reference.state_dict(), reference.after_step(1)) == ({}, False)
    reference.load_state_dict({})
    with pytest.raises(ModelError, match="without a reference"), reference.active():
        pass
