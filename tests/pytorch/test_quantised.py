"""Frozen layers in 4 and 8 bits: what they stand for, what a policy computes with them, and who samples from it."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_cases import fill, groups, make_batch, plain_logprobs
from peft import LoraConfig
from tiny_models import tiny_model, tiny_tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from covey.config import GRPOConfig
from covey.config.effects import correction_mode
from covey.errors import ConfigError, ModelError
from covey.pytorch.engine import Engine
from covey.pytorch.engine.merge import EffectiveWeights
from covey.pytorch.models.loading import load_model
from covey.pytorch.models.quantised import dequantised, is_quantised, plain_linear, quantise, quantised_layers
from covey.pytorch.policy import Policy
from covey.pytorch.rounding import truth_and_own, unexplained
from covey.rollout.packing import pack_episodes
from covey.types import SamplingSettings
from fakes import raises

pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")

KINDS = ("nf4", "int8", "torchao_int8")
CPU = torch.device("cpu")
IDS = torch.arange(4, 20)[None]


def policy_of(kind: str, family: str = "llama", dtype: str = "auto", **options: Any) -> Policy:
    return fill(Policy.load(tiny_model(family), tiny_tokenizer(), quantization=kind, dtype=dtype, lora_r=4, **options))


def with_plain_layers(policy: Policy, dtype: str = "float32", **options: Any) -> Policy:
    """The same policy on ordinary layers that hold what the quantised ones stand for."""
    model = tiny_model(str(policy.model.get_base_model().config.model_type))
    theirs = dict(policy.model.get_base_model().named_modules())
    for name in [name for name, _ in model.named_modules()]:
        held: Any = theirs.get(name)
        base = held.get_base_layer() if hasattr(held, "get_base_layer") else held
        if base is not None and is_quantised(base):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, plain_linear(base))
    model = model.to(getattr(torch, dtype))
    return fill(Policy.load(model, tiny_tokenizer(), lora_r=4, fused_layers=False, **options))


def quantised(layer: nn.Linear, kind: str) -> nn.Sequential:
    model = nn.Sequential(layer)
    quantise(model, kind, CPU, "a layer")
    return model


def scored(policy: Policy) -> tuple[Tensor, dict[str, Tensor]]:
    (pack,) = pack_episodes(make_batch().episodes)
    logp = policy.score(pack).logp
    policy.model.zero_grad()
    (logp * torch.linspace(-1, 1, len(logp))).sum().backward()
    return logp.detach(), {n: p.grad.clone() for n, p in policy.named_trainable_parameters() if p.grad is not None}


def error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Length of the difference of two gradients, as a part of the second's."""
    assert found.keys() == truth.keys()
    off = sum(float((found[name] - value).square().sum()) for name, value in truth.items())
    return (off / sum(float(value.square().sum()) for value in truth.values())) ** 0.5


def test_eight_bits_and_bytes_by_hand_and_four_bits_are_the_quantiles_of_the_paper() -> None:
    """Each row is rounded to 127 steps of its largest number: 0.5 becomes 64 steps of 1/127, -0.002 none."""
    expected = torch.tensor([[1.0, 64 / 127], [-0.5, -0.5 / 127]])
    for kind in ("int8", "torchao_int8"):
        layer = nn.Linear(2, 2, bias=False)
        layer.weight.data = torch.tensor([[1.0, 0.5], [-0.5, -0.002]])
        # bitsandbytes' -0.002 is 0.508 steps, torchao's scale is 1/127.5, as the 8 bits reach down to -128
        torch.testing.assert_close(dequantised(quantised(layer, kind)[0]), expected, atol=4.5e-3, rtol=0)
    # 64 x 64 numbers: 4 bits each, a scale of 8 bits for each 64, and one of 32 bits for 256 of those
    four, eight, theirs = (quantised(nn.Linear(64, 64, bias=False), kind)[0] for kind in KINDS)
    state, scales = four.weight.quant_state, eight.weight.SCB if eight.state.SCB is None else eight.state.SCB
    assert (four.weight.nbytes, state.absmax.nbytes, state.state2.absmax.nbytes) == (2048, 64, 4)
    assert (eight.weight.nbytes, scales.nbytes) == (4096, 4 * 64)
    assert (theirs.weight.qdata.nbytes, theirs.weight.scale.nbytes) == (4096, 4 * 64)
    # of a block of 64, every number becomes one of 16 values times the largest; -1, 0 and 1 are among them
    layer = nn.Linear(64, 64)
    before, bias = layer.weight.data.clone(), layer.bias
    model = quantised(layer, "nf4")
    for row, original in zip(dequantised(model[0]), before, strict=True):  # a row is a block
        values = torch.unique(row / row.abs().max())
        assert len(values) <= 16
        assert values.abs().max() == 1
        # the widest gap between neighbours of the 16 values is 0.30, so no number moves by more than half of it
        assert float((row - original).abs().max()) <= 0.17 * float(original.abs().max())
    assert torch.equal(model[0].bias, bias)


# with windows and soft caps; without bias, with bias
@pytest.mark.parametrize("family", ["gemma2", *(pytest.param(x, marks=pytest.mark.slow) for x in ("llama", "qwen2"))])
@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_is_the_one_on_what_its_weights_stand_for(kind: str, family: str) -> None:
    policy = policy_of(kind, family)
    assert policy.prefix_sharing_obstacle is None
    assert policy.fused_obstacle.startswith("a layer of type")
    assert not is_quantised(policy.model.get_base_model().get_output_embeddings())
    assert len(list(quantised_layers(policy.model))) == 14
    (logp, grads), (plain, plain_grads) = scored(policy), scored(with_plain_layers(policy))
    torch.testing.assert_close(logp, plain, atol=2e-5, rtol=1e-4)
    assert len(grads) == 28
    assert error(grads, plain_grads) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_a_bfloat16_base_has_float32_adapters_and_keeps_its_gradient_after_scoring(kind: str) -> None:
    """In evaluation mode and without gradients, bitsandbytes by itself repacks weights for a kernel that has none."""
    policy = policy_of(kind, dtype="bfloat16")
    assert {p.dtype for p in policy.trainable_parameters()} == {torch.float32}
    with torch.no_grad():
        policy.model(input_ids=IDS)
    logp, found = scored(policy)
    assert logp.dtype == torch.float32
    # as far from float32 as the same policy on ordinary layers in bfloat16
    (_, truth), (_, own) = (scored(with_plain_layers(policy, dtype)) for dtype in ("float32", "bfloat16"))
    assert 0 < error(found, truth) < 2 * error(own, truth)


@torch.no_grad()
def test_a_token_does_not_depend_on_what_follows() -> None:
    """By itself bitsandbytes looks at all tokens beside a token before it rounds the inputs of 8-bit layers."""
    whole, part = map(policy_of("int8").model, (IDS, IDS[:, :6]))
    torch.testing.assert_close(part.logits[0], whole.logits[0, :6], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_goes_through_quantised_layers(kind: str) -> None:
    policy = policy_of(kind, autocast="bfloat16")
    (logp, found), (expected, truth) = scored(policy), scored(with_plain_layers(policy))
    half = scored(with_plain_layers(policy, autocast="bfloat16"))
    assert 0 < float((logp - expected).abs().mean()) < 2 * float((half[0] - expected).abs().mean())
    assert 0 < error(found, truth) < 2 * error(half[1], truth)


def test_the_probe_measures_against_the_dequantised_model_and_feels_another_base() -> None:
    policy = policy_of("nf4", dtype="bfloat16")

    def compute(dtype: torch.dtype) -> Tensor:
        logits: Tensor = policy.model(input_ids=IDS).logits[0]
        return logits.to(dtype).log_softmax(-1)

    with torch.no_grad():
        truth, own = truth_and_own(policy.model, torch.bfloat16, compute)
        assert not unexplained(own, own, truth)
        other = fill(Policy.load(tiny_model("llama"), tiny_tokenizer(), lora_r=4))
        unquantised = other.model(input_ids=IDS).logits[0].log_softmax(-1)
    assert unexplained(unquantised, own, truth)
    assert all("forward" not in vars(layer) for layer in quantised_layers(policy.model))


@pytest.mark.parametrize(("family", "runner"), [("llama", "fast"), ("phi3_long", "recompute")])
@pytest.mark.parametrize("kind", KINDS)
def test_the_sampler_has_the_policy_s_weights_in_full(kind: str, family: str, runner: str) -> None:
    policy = policy_of(kind, family)
    engine = Engine(policy.model, policy.tokenizer)  # which compares itself with the policy
    assert engine.runner == runner
    if runner == "fast":  # whose layers are dequantised one after another, in the same memory
        in_bytes, requests = Engine(policy.model, policy.tokenizer, dtype=torch.int8), groups(1)
        found = in_bytes(requests, SamplingSettings(max_tokens=8), policy_version=0)
        off = [
            abs(c.logprobs - plain_logprobs(policy.model, r, c)).mean() for r, c in zip(requests, found, strict=True)
        ]
        assert max(off) < 0.4
    name = "model.layers.1.self_attn.o_proj"
    layer: Any = policy.model.get_base_model().get_submodule(name)
    low_rank = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    expected = dequantised(layer.get_base_layer()) + layer.scaling["default"] * low_rank
    torch.testing.assert_close(EffectiveWeights(policy.model)[f"{name}.weight"], expected.detach())


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_model_that_transformers_has_quantised_is_taken(tmp_path: Path, kind: str) -> None:
    tiny_model("llama", hidden_size=64).save_pretrained(tmp_path)
    how = {"load_in_8bit": True}
    if kind == "nf4":
        how = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}

    def load() -> Any:
        options = {"quantization_config": BitsAndBytesConfig(**how), "dtype": torch.float32}
        return AutoModelForCausalLM.from_pretrained(tmp_path, **options)

    model, used = load(), load().eval()
    with pytest.raises(ModelError, match=r"stays where and as it is; leave model.device and model.dtype at auto"):
        Policy.load(model, tiny_tokenizer(), dtype="bfloat16")
    policy, own = fill(Policy.load(model, tiny_tokenizer(), lora_r=4)), tiny_model("llama", hidden_size=64)
    logp, grads = scored(policy)
    expected, expected_grads = scored(fill(Policy.load(own, tiny_tokenizer(), quantization=kind, lora_r=4)))
    torch.testing.assert_close(logp, expected, atol=1e-4, rtol=1e-4)
    assert error(grads, expected_grads) < 1e-3
    assert Engine(policy.model, policy.tokenizer).runner == "fast"
    with torch.no_grad():
        used(input_ids=IDS)  # packs 4-bit layers, where the processor multiplies bfloat16, and rounds their scales
    logp, grads = scored(fill(Policy.load(used, tiny_tokenizer(), lora_r=4)))
    torch.testing.assert_close(logp, expected, atol=0.1, rtol=0)
    assert error(grads, expected_grads) < 0.2  # without a gradient it would be 1
    with pytest.raises(ModelError, match="quantised weights cannot be trained themselves"):
        Policy.load(load(), tiny_tokenizer(), use_peft=False)


def test_correction_is_on_where_a_server_has_a_base_of_its_own_and_what_cannot_be_is_refused(monkeypatch: Any) -> None:
    server, own = {"upload_adapters_to_server": True, "inference_server_kind": "covey"}, {"quantization": "nf4"}
    modes = [correction_mode(GRPOConfig(**options)) for options in (own, server, own | server)]
    assert modes == ["off", "off", "token_truncate"]
    all_weights, vllm = {"use_peft": False}, {"engine": "vllm", "llm_arguments": {"enable_lora": True}}
    for options, words in ((all_weights, " with use_peft=False.*set model.use_peft to true"), (vllm, ".*enable_lora")):
        raises(ConfigError, f"quantization='nf4'{words}", GRPOConfig, quantization="nf4", **options)
    for kind in ("nf4", "torchao_int8"):  # adapters that are more than LoRA, by the sampler
        config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=True)
        with pytest.raises(ModelError, match="use plain LoRA"):
            Engine(Policy.load(tiny_model("llama"), tiny_tokenizer(), quantization=kind, lora_config=config).model)
    model = tiny_model("llama")
    load_model(model, tiny_tokenizer(), quantization="int8")
    for what, options, words in (
        (tiny_model("gpt2"), {"quantization": "nf4"}, r"GPT2LMHeadModel\) has no linear layers"),
        (model, {"quantization": "int8"}, "is quantised already"),
        (model, {"dtype": "bfloat16"}, "leave model.device and model.dtype at auto"),
    ):
        raises(ModelError, words, load_model, what, tiny_tokenizer(), **options)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"bitsandbytes is not installed; run pip install 'covey\[quantization\]'"):
        load_model(model, tiny_tokenizer(), quantization="nf4")
