"""Effective weights: LoRA added, all else as PEFT itself computes it, nothing written to the policy."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import adapted, groups, texts, with_lora
from peft import IA3Config, LoraConfig, PrefixTuningConfig
from tiny_models import tiny_model

from covey.errors import ModelError
from covey.pytorch.engine import Engine
from covey.pytorch.engine.merge import EffectiveWeights, copy_without_adapters, weights_of
from covey.rollout.learning import Weights
from covey.types import SamplingSettings


def randomised(config: object) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = adapted(tiny_model("llama"), config)
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("lora_", "ia3_", "modules_to_save")):
                parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval()


def lora(*targets: str, **options: object) -> LoraConfig:
    return LoraConfig(r=2, target_modules=list(targets) or "all-linear", task_type="CAUSAL_LM", **options)


KINDS = {
    "rslora": lora(use_rslora=True),
    "dora": lora("q_proj", "down_proj", use_dora=True),
    "embedding": lora("v_proj", "embed_tokens"),
    "modules_to_save": lora("v_proj", modules_to_save=["norm"]),
    "ia3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_copy_with_effective_weights_computes_what_the_policy_computes(kind: str) -> None:
    model = randomised(KINDS[kind])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    twin, weights, ids = copy_without_adapters(model), EffectiveWeights(model), torch.arange(4, 20)[None]
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(weights[name])
        expected = model(ids).logits
        torch.testing.assert_close(twin(ids).logits, expected, atol=1e-4, rtol=1e-4)
        with model.disable_adapter():
            assert (model(ids).logits - expected).abs().max() > 1e-3
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    names = {name for name, _ in twin.named_parameters()} - {"lm_head.weight"}  # own, where adapters untied it
    assert names == {name for name, _ in tiny_model("llama").named_parameters()}


def test_lora_by_hand_and_disabled_and_already_merged_adapters() -> None:
    model = with_lora("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    layer = model.base_model.model.model.layers[1].mlp.up_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = (layer.base_layer.weight + 7 / 3 * (b @ a)).detach()
    torch.testing.assert_close(EffectiveWeights(model)[name], expected)
    assert EffectiveWeights(model).base is model.get_base_model()
    with model.disable_adapter():
        torch.testing.assert_close(EffectiveWeights(model)[name], tiny_model("llama").get_parameter(name).detach())
    model.merge_adapter()
    torch.testing.assert_close(EffectiveWeights(model)[name], expected)


def test_virtual_tokens_are_refused() -> None:
    config = PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with pytest.raises(ModelError, match="PREFIX_TUNING"):
        EffectiveWeights(adapted(tiny_model("llama"), config))


def test_published_weights_are_references_with_a_hash() -> None:
    model = with_lora("llama")
    weights = weights_of(model, 4)
    embedding = weights.tensors()["model.embed_tokens.weight"]
    assert embedding.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    factor = model.base_model.model.model.layers[0].mlp.up_proj.lora_A["default"].weight
    held = weights.adapter.tensors["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"]
    assert held.ctypes.data == factor.data_ptr()
    before = weights_of(model, 4).sha256
    assert weights.sha256 == before == weights.adapter.sha256
    factor.data[0, 0] += 1
    assert weights_of(model, 5).sha256 != before
    # of whole weights, of their values, whatever holds them
    one, other = tiny_model("llama"), tiny_model("llama").bfloat16()
    weights = weights_of(one, 1)
    assert weights.adapter is None
    assert weights.sha256 == weights_of(tiny_model("llama"), 2).sha256 != weights_of(other, 1).sha256
    assert weights_of(other, 1).sha256 == weights_of(other.float(), 1).sha256


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_engine_takes_weights_that_no_model_holds(family: str) -> None:
    """A plain mapping of merged tensors, the tied head left out as in a file."""
    model = with_lora(family)
    tensors = {n: t.clone() for n, t in EffectiveWeights(model).items() if n != "lm_head.weight"}
    engine, settings = Engine(tiny_model(family)), SamplingSettings(max_tokens=6)
    engine.publish(Weights(3, lambda: tensors))
    found = engine(groups(1), settings, policy_version=3)
    expected = Engine(model)(groups(1), settings, policy_version=0)
    assert texts(found) == texts(expected)
    assert [c.logprobs.tolist() for c in found] == [c.logprobs.tolist() for c in expected]
