"""The fused layers against the model's own layers under autograd, in float64: values, gradients, memory, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from test_policy import PACK, fill, gradients
from tiny_models import DENSE, VOCAB_SIZE, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from covey.errors import ModelError
from covey.pytorch import Policy
from covey.pytorch.fused import FusedDecoder, _Activations
from covey.rollout.packing import Pack, pack_episodes
from covey.types import Episode


def policy_of(
    family: str = "llama", *, dtype: torch.dtype = torch.float64, sliding_window: int = 64, **options: Any
) -> Policy:
    model = tiny_model(family, sliding_window=sliding_window).to(dtype)
    if dtype == torch.float64:
        use_exact_norms(model)
    policy = Policy.load(model, tiny_tokenizer(), **{"lora_r": 4, **options})
    fill(policy, 1)
    return policy


def use_exact_norms(model: torch.nn.Module) -> None:
    """The norms of transformers compute in float32 whatever the model's dtype: no reference for float64."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):

            def forward(x: Tensor, norm: Any = module) -> Tensor:
                gemma = "Gemma" in type(norm).__name__
                scale = (x.square().mean(-1, keepdim=True) + (norm.eps if gemma else norm.variance_epsilon)).rsqrt()
                return (norm.weight + gemma) * (x * scale)

            module.forward = forward  # type: ignore[method-assign]


def own_layers(policy: Policy, pack: Pack = PACK) -> Tensor:
    """The hidden states by the model's own modules, under autograd."""
    return policy.held.hidden_packed(pack)


def fused(policy: Policy) -> FusedDecoder:
    assert policy.fused_obstacle is None
    assert policy.held.fused is not None
    return policy.held.fused


def weighted(hidden: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (hidden * torch.randn(hidden.shape, generator=generator, dtype=torch.float64).to(hidden.dtype)).sum()


def assert_same(policy: Policy, pack: Pack = PACK, tolerance: float = 1e-9) -> None:
    assert fused(policy).can_run()
    expected = own_layers(policy, pack)
    expected_grads = gradients(policy, weighted(expected))
    found = policy.held.hidden(pack)
    grads = gradients(policy, weighted(found))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert grads.keys() == expected_grads.keys() == policy.state_dict().keys()
    for name, grad in grads.items():
        assert float((grad - expected_grads[name]).norm()) <= tolerance * float(expected_grads[name].norm()), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True},
        {"lora_target_modules": ["q_proj", "v_proj", "down_proj"]},
        {
            "lora_config": LoraConfig(
                r=3, lora_alpha=5, use_rslora=True, target_modules="all-linear", rank_pattern={"k_proj": 2}
            )
        },
    ],
    ids=["all", "checkpoint", "some layers", "ranks"],
)
@pytest.mark.parametrize("family", DENSE)
def test_hidden_states_and_gradients_are_those_of_the_models_own_layers(family: str, options: dict[str, Any]) -> None:
    assert_same(policy_of(family, **options))


def test_random_packs_agree() -> None:
    """Prompts of 1 to 70 tokens, completions of 1 to 150, groups of 1 to 5, agents among them."""
    policy = policy_of("qwen2")
    rng = np.random.default_rng(5)
    for _ in range(12):
        episodes = []
        for _ in range(rng.integers(1, 4)):
            prompt = rng.integers(4, VOCAB_SIZE, rng.integers(1, 70))
            for _ in range(rng.integers(1, 6)):
                length = int(rng.choice([1, 2, 9, 40, 150]))
                ids = np.concatenate([prompt, rng.integers(4, VOCAB_SIZE, length)])
                sampled = np.arange(len(ids)) >= len(prompt)
                sampled[len(prompt) + 1 :] &= rng.random(length - 1) < 0.8
                episodes.append(Episode(ids, sampled, np.zeros(len(ids), np.float32), "", "stop", 0))
        for pack in pack_episodes(episodes, tokens_per_pack=300):
            assert_same(policy, pack)


def test_finite_differences() -> None:
    policy = policy_of("qwen3")
    decoder = fused(policy)
    grads = gradients(policy, weighted(decoder.hidden(PACK)))
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, parameter in policy.named_trainable_parameters():
            flat = parameter.view(-1)
            at, step = int(rng.integers(flat.numel())), 1e-5
            before = float(flat[at])
            values = []
            for sign in (1, -1):
                flat[at] = before + sign * step
                values.append(float(weighted(decoder.hidden(PACK))))
            flat[at] = before
            assert grads[name].view(-1)[at] == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-6)


def test_half_precision_is_as_close_as_the_models_own() -> None:
    """In the median of five adapters: how far rounding leads is a matter of chance."""
    forward, backward = [], []
    for seed in range(5):
        exact, half = policy_of(), policy_of(dtype=torch.bfloat16)
        for policy in (exact, half):
            fill(policy, seed)
        truth, own, mine = own_layers(exact), own_layers(half), half.held.hidden(PACK)
        assert mine.dtype == torch.bfloat16
        forward.append(float(((mine - truth).norm() / (own - truth).norm()).detach()))
        true_grads, own_grads = gradients(exact, weighted(truth)), gradients(half, weighted(own))
        grads = gradients(half, weighted(mine))
        assert all(grad.dtype == torch.float32 for grad in grads.values())  # PEFT keeps adapters wide
        errors = [
            sum(float((found[name] - grad).norm() / grad.norm()) for name, grad in true_grads.items())
            for found in (grads, own_grads)
        ]
        backward.append(errors[0] / errors[1])
    assert np.median(forward) <= 1.2
    assert np.median(backward) <= 1.2


def test_less_memory_than_autograds_is_kept() -> None:
    policy = policy_of()
    kept_by_autograd: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept_by_autograd[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        own_layers(policy)
    found = fused(policy).hidden(PACK)
    kept = 0
    for layer in found.grad_fn.layers:  # type: ignore[union-attr]
        assert isinstance(layer, _Activations)
        tensors = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in vars_of(layer)}
        kept += sum(tensors.values())
    assert kept < 0.65 * sum(kept_by_autograd.values())
    checkpointed = fused(policy_of(gradient_checkpointing=True)).hidden(PACK)
    inputs = sum(t.nbytes for layer in checkpointed.grad_fn.layers for t in vars_of(layer))  # type: ignore[union-attr]
    assert inputs == 2 * PACK.num_tokens * 32 * 8


def vars_of(layer: _Activations) -> list[Tensor]:
    names = [name for name in layer.__slots__ if not name.endswith("adapters")]
    return [value for name in names if (value := getattr(layer, name)) is not None]


def test_what_the_backward_needs_is_freed_as_it_goes() -> None:
    policy = policy_of()
    loss = weighted(fused(policy).hidden(PACK))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ran twice"):
        loss.backward()


def test_the_reference_is_the_base_model_and_an_exchange_does_not_reach_an_earlier_pass() -> None:
    policy = policy_of()
    expected = gradients(policy, weighted(fused(policy).hidden(PACK)))
    hidden = fused(policy).hidden(PACK)
    with policy.reference.active():
        reference = policy.held.hidden(PACK)
        torch.testing.assert_close(reference, own_layers(policy), rtol=1e-9, atol=1e-9)
    assert float((reference - hidden.detach()).abs().max()) > 1e-2
    snapshot = policy_of(reference_from_current=True)
    snapshot.reference.copy_current()
    fill(snapshot, 2)
    hidden = fused(snapshot).hidden(PACK)
    with snapshot.reference.active():
        torch.testing.assert_close(snapshot.held.hidden(PACK), fused(policy).hidden(PACK), rtol=1e-9, atol=1e-9)
    fill(policy, 2)
    expected = gradients(policy, weighted(fused(policy).hidden(PACK)))
    found = gradients(snapshot, weighted(hidden))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_merged_adapters_go_through_the_models_own_layers() -> None:
    policy = policy_of()
    assert fused(policy).can_run()
    policy.model.merge_adapter()
    assert not fused(policy).can_run()
    torch.testing.assert_close(policy.held.hidden(PACK), policy_of().held.hidden(PACK), rtol=1e-9, atol=1e-9)


def test_dropout_shares_nothing_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """A mask for each token of each sequence: sequences that share a token would share its mask."""
    policy = policy_of(lora_dropout=0.5)
    assert policy.prefix_sharing_obstacle is not None
    assert policy.prefix_sharing_obstacle.startswith("lora_dropout=0.5")
    assert policy.fused_obstacle == policy.prefix_sharing_obstacle
    assert "lora_dropout=0.5" in caplog.text
    equal = Episode(np.arange(4, 9), np.arange(5) > 2, np.zeros(5, np.float32), "", "stop", 0)
    (pack,) = pack_episodes([equal, equal], shared=False)
    assert pack.pair.tolist() == [0, 1, 2, 3]
    logp = policy.score(pack).logp
    assert torch.equal(logp[:2], logp[2:])
    policy.train()
    logp = policy.score(pack).logp
    assert not torch.isclose(logp[:2], logp[2:]).any()


@pytest.mark.parametrize("family", ["mistral", "phi3", "gemma2", "gemma3"])
def test_windows_shorter_than_the_sequences(family: str) -> None:
    # in float64 Gemma 2's own code returns NaN for padding outside of the window
    dtype, tolerance = (torch.float32, 1e-4) if family == "gemma2" else (torch.float64, 1e-9)
    policy = policy_of(family, sliding_window=6, dtype=dtype)
    assert_same(policy, tolerance=tolerance)
    wide = policy_of(family, dtype=dtype)
    assert float((policy.held.hidden(PACK) - wide.held.hidden(PACK)).detach().abs().max()) > 1e-2


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("qwen3_moe", {}, "Qwen3MoeForCausalLM is not one of"),
        ("gpt2", {}, "GPT2LMHeadModel is not one of"),
        ("llama", {"use_peft": False}, "something else than LoRA"),
        ("llama", {"prefix_sharing": False}, "prefix_sharing is off"),
        ("llama", {"fused_layers": False}, "fused_layers is off"),
        (
            "llama",
            {"lora_config": LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"])},
            "something else",
        ),
        ("llama", {"lora_config": LoraConfig(r=2, target_modules=["q_proj", "lm_head"])}, "something else"),
    ],
    ids=str,
)
def test_other_models_say_why(family: str, options: dict[str, Any], why: str) -> None:
    policy = Policy.load(tiny_model(family, tie_word_embeddings=False), tiny_tokenizer(), **options)
    assert policy.held.fused is None
    assert policy.fused_obstacle is not None
    assert why in policy.fused_obstacle


@pytest.mark.parametrize("variant", [{"use_dora": True}, {"lora_bias": True}], ids=str)
def test_other_kinds_of_lora_go_through_the_models_own_layers(variant: dict[str, Any]) -> None:
    policy = Policy.load(
        tiny_model("llama"), tiny_tokenizer(), lora_config=LoraConfig(r=2, target_modules="all-linear", **variant)
    )
    assert policy.fused_obstacle is not None or not fused(policy).can_run()


def test_a_refused_model_is_left_alone() -> None:
    model = tiny_model("llama")
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(ModelError, match="something else than LoRA"):
        FusedDecoder(model)
    assert before == [p.data_ptr() for p in model.parameters()]


def test_the_owner_keeps_its_weights_and_can_save_them(tmp_path: Path) -> None:
    """Joined weights are views of one matrix; saving the merged model must not trip over that."""
    expected = tiny_model("qwen2").state_dict()
    policy = Policy.load(tiny_model("qwen2"), tiny_tokenizer(), lora_r=4)
    base = policy.model.get_base_model().state_dict()
    for name, value in expected.items():
        mine = base.get(name, base.get(name.replace("proj.", "proj.base_layer.")))
        assert mine is not None
        assert torch.equal(mine, value), name
    fill(policy, 1)
    scores = policy.score(PACK).logp
    policy.model.merge_and_unload().save_pretrained(tmp_path)
    plain = Policy.load(AutoModelForCausalLM.from_pretrained(tmp_path), tiny_tokenizer(), use_peft=False)
    torch.testing.assert_close(plain.score(PACK).logp, scores, rtol=1e-4, atol=1e-4)
