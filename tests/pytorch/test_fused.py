"""The fused layers against the model's own layers under autograd, in float64: values, gradients, memory, refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import episode, fill
from peft import LoraConfig
from test_policy import PACK, assert_near, gradients
from tiny_models import DENSE, VOCAB_SIZE, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from covey.errors import ModelError
from covey.pytorch import Policy
from covey.pytorch.fused import FusedDecoder, _Activations
from covey.rollout.packing import Pack, pack_episodes


def policy_of(family: str = "llama", *, dtype: torch.dtype = torch.float64, window: int = 64, **options: Any) -> Policy:
    model = tiny_model(family, sliding_window=window).to(dtype)
    if dtype == torch.float64:
        use_exact_norms(model)
    return fill(Policy.load(model, tiny_tokenizer(), **{"lora_r": 4, **options}))


def use_exact_norms(model: torch.nn.Module) -> None:
    """The norms of transformers compute in float32 whatever the model's dtype: no reference for float64."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):

            def forward(x: Tensor, norm: Any = module) -> Tensor:
                gemma = "Gemma" in type(norm).__name__
                scale = (x.square().mean(-1, keepdim=True) + (norm.eps if gemma else norm.variance_epsilon)).rsqrt()
                return (norm.weight + gemma) * (x * scale)

            module.forward = forward  # type: ignore[method-assign]


def fused(policy: Policy) -> FusedDecoder:
    assert policy.fused_obstacle is None
    return policy.held.fused


def assert_same(policy: Policy, pack: Pack = PACK, tolerance: float = 1e-9) -> None:
    assert fused(policy).can_run()
    expected = policy.held.hidden_packed(pack)
    expected_grads = gradients(policy, weighted(expected))
    found = policy.held.hidden(pack)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    grads = gradients(policy, weighted(found))
    assert grads.keys() == policy.state_dict().keys()
    assert_near(grads, expected_grads, tolerance)


def weighted(hidden: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (hidden * torch.randn(hidden.shape, generator=generator, dtype=torch.float64).to(hidden.dtype)).sum()


RANKS = {"r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": "all-linear", "rank_pattern": {"k_proj": 2}}
LORAS: dict[str, dict[str, Any]] = {
    "all": {},
    "checkpoint": {"gradient_checkpointing": True},
    "some layers": {"lora_target_modules": ["q_proj", "v_proj", "down_proj"]},
    "ranks": {"lora_config": LoraConfig(**RANKS)},
}


@pytest.mark.parametrize("options", LORAS.values(), ids=LORAS)
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
                episodes.append(episode(ids, sampled))
        for pack in pack_episodes(episodes, tokens_per_pack=300):
            assert_same(policy, pack)


def test_finite_differences() -> None:
    policy, rng, step = policy_of("qwen3"), np.random.default_rng(0), 1e-5
    decoder = fused(policy)
    grads = gradients(policy, weighted(decoder.hidden(PACK)))
    with torch.no_grad():
        for name, parameter in policy.named_trainable_parameters():
            flat, values = parameter.view(-1), []
            at = int(rng.integers(flat.numel()))
            before = float(flat[at])
            for sign in (1, -1):
                flat[at] = before + sign * step
                values.append(float(weighted(decoder.hidden(PACK))))
            flat[at] = before
            assert grads[name].view(-1)[at] == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-6)


def test_half_precision_is_as_close_as_the_models_own() -> None:
    """In the median of five adapters: how far rounding leads is a matter of chance."""
    forward, backward = [], []
    for seed in range(5):
        exact, half = fill(policy_of(), seed), fill(policy_of(dtype=torch.bfloat16), seed)
        truth, own, mine = exact.held.hidden_packed(PACK), half.held.hidden_packed(PACK), half.held.hidden(PACK)
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


def test_less_memory_than_autograds_is_kept_and_freed_by_the_backward() -> None:
    policy = policy_of()
    kept_by_autograd: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept_by_autograd[storage.data_ptr()] = storage.nbytes()
        return tensor

    def kept_of(hidden: Tensor) -> list[dict[int, int]]:
        found = []
        for layer in hidden.grad_fn.layers:  # type: ignore[union-attr]
            assert isinstance(layer, _Activations)
            held = [getattr(layer, name) for name in layer.__slots__ if not name.endswith("adapters")]
            storages = [tensor.untyped_storage() for tensor in held if tensor is not None]
            found.append({storage.data_ptr(): storage.nbytes() for storage in storages})
        return found

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        policy.held.hidden_packed(PACK)
    hidden = fused(policy).hidden(PACK)
    assert sum(sum(layer.values()) for layer in kept_of(hidden)) < 0.65 * sum(kept_by_autograd.values())
    checkpointed = kept_of(fused(policy_of(gradient_checkpointing=True)).hidden(PACK))
    assert sum(sum(layer.values()) for layer in checkpointed) == 2 * PACK.num_tokens * 32 * 8
    weighted(hidden).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ran twice"):
        weighted(hidden).backward()


def test_the_reference_is_the_base_model_and_an_exchange_does_not_reach_an_earlier_pass() -> None:
    policy = policy_of()
    hidden = fused(policy).hidden(PACK)
    with policy.reference.active():
        reference = policy.held.hidden(PACK)
        torch.testing.assert_close(reference, policy.held.hidden_packed(PACK), rtol=1e-9, atol=1e-9)
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
    assert policy.prefix_sharing_obstacle.startswith("lora_dropout=0.5")
    assert policy.fused_obstacle == policy.prefix_sharing_obstacle
    assert "lora_dropout=0.5" in caplog.text
    (pack,) = pack_episodes([episode(np.arange(4, 9), np.arange(5) > 2)] * 2, shared=False)
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
    policy = policy_of(family, window=6, dtype=dtype)
    assert_same(policy, tolerance=tolerance)
    wide = policy_of(family, dtype=dtype)
    assert float((policy.held.hidden(PACK) - wide.held.hidden(PACK)).detach().abs().max()) > 1e-2


def lora(*targets: str, **options: Any) -> dict[str, Any]:
    return {"lora_config": LoraConfig(r=2, target_modules=list(targets) or "all-linear", **options)}


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("qwen3_moe", {}, "Qwen3MoeForCausalLM is not one of"),
        ("gpt2", {}, "GPT2LMHeadModel is not one of"),
        ("llama", {"use_peft": False}, "something else than LoRA"),
        ("llama", {"prefix_sharing": False}, "prefix_sharing is off"),
        ("llama", {"fused_layers": False}, "fused_layers is off"),
        ("llama", lora("q_proj", modules_to_save=["norm"]), "something else"),
        ("llama", lora("q_proj", "lm_head"), "something else"),
    ],
    ids=str,
)
def test_other_models_say_why(family: str, options: dict[str, Any], why: str) -> None:
    policy = Policy.load(tiny_model(family, tie_word_embeddings=False), tiny_tokenizer(), **options)
    assert policy.held.fused is None
    assert why in policy.fused_obstacle


@pytest.mark.parametrize("variant", [{"use_dora": True}, {"lora_bias": True}], ids=str)
def test_other_kinds_of_lora_go_through_the_models_own_layers(variant: dict[str, Any]) -> None:
    policy = Policy.load(tiny_model("llama"), tiny_tokenizer(), **lora(**variant))
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
        assert torch.equal(mine, value), name
    fill(policy, 1)
    scores = policy.score(PACK).logp
    policy.model.merge_and_unload().save_pretrained(tmp_path)
    plain = Policy.load(AutoModelForCausalLM.from_pretrained(tmp_path), tiny_tokenizer(), use_peft=False)
    torch.testing.assert_close(plain.score(PACK).logp, scores, rtol=1e-4, atol=1e-4)
