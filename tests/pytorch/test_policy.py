"""Scoring a pack gives the plain model's numbers, one sequence at a time; fused layers the own layers' in float64."""

import copy
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import assert_plain, episode, fill, generated, grads_of, texts
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import DENSE, EVERY_FAMILY, VOCAB_SIZE, tiny_model, tiny_tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM

from covey.algorithms.kl import Distillation
from covey.errors import ModelError
from covey.pytorch import Policy
from covey.pytorch.attention.probe import find_obstacle
from covey.pytorch.attention.tree_attention import NAME_PREFIX
from covey.pytorch.engine import Engine
from covey.pytorch.fused import FusedDecoder, _Activations
from covey.pytorch.logprobs import ReferenceDistribution
from covey.rollout.packing import Pack, pack_episodes
from covey.types import Episode, Request, SamplingSettings, Support
from fakes import raises

TEMPERATURE = 0.8
LORA_OR_FULL = pytest.mark.parametrize("use_peft", [True, False], ids=["lora", "full"])
PROMPTS = [np.random.default_rng(7).integers(4, VOCAB_SIZE, length) for length in (4, 9, 17)]
"""Two of three are longer than the families' sliding windows."""
RANKS = {"r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": "all-linear", "rank_pattern": {"k_proj": 2}}
LORAS: dict[str, dict[str, Any]] = {
    "all": {},
    "checkpoint": {"gradient_checkpointing": True},
    "some layers": {"lora_target_modules": ["q_proj", "v_proj", "down_proj"]},
    "last layer": {"lora_target_modules": r".*layers\.1\..*_proj"},
    "ranks": {"lora_config": LoraConfig(**RANKS)},
}


def make_episodes() -> list[Episode]:
    """Three prompts, one of them longer than every sliding window, groups of 4, 2 and 1; two agent episodes."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, VOCAB_SIZE, length) for length in (9, 3, 14)]
    # each prompt's number, then lengths of what was sampled and, in between, of what was not
    plans = ((0, [5]), (0, [1]), (1, [12]), (0, [8]), (1, [3, 4, 2, 2]), (0, [2, 1, 1]), (2, [7]))
    episodes = []
    for prompt, lengths in plans:
        ids = np.concatenate([prompts[prompt], *(rng.integers(4, VOCAB_SIZE, length) for length in lengths)])
        turns = np.arange(1 + len(lengths)) % 2 == 1
        episodes.append(episode(ids, np.repeat(turns, [len(prompts[prompt]), *lengths])))
    return episodes


EPISODES = make_episodes()
(PACK,) = pack_episodes(EPISODES)
WEIGHTS = torch.linspace(-1, 1, len(PACK.targets))


def policy_of(family: str = "llama", *, use_peft: bool = True, filled: bool = True, **options: Any) -> Policy:
    policy = Policy.load(tiny_model(family), tiny_tokenizer(), use_peft=use_peft, lora_r=4, **options)
    return fill(policy) if use_peft and filled else policy


def plain_scores(model: Any, temperature: float = TEMPERATURE) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and entropies `[U]` and all `[U, V]`, without padding."""
    logps, entropies, wholes = [], [], []
    for row in PACK.rows:
        ids, at = EPISODES[row].token_ids, np.flatnonzero(EPISODES[row].sampled)
        logp = (model(torch.from_numpy(ids)[None], use_cache=False).logits[0, at - 1] / temperature).log_softmax(-1)
        logps.append(logp[torch.arange(len(at)), ids[at]])
        entropies.append(-(logp.exp() * logp).sum(-1))
        wholes.append(logp)
    # of each target its place among all rows' sampled tokens, one row after another
    order = torch.from_numpy(np.lexsort((PACK.column, PACK.row)).argsort()[PACK.first])
    return torch.cat(logps)[order], torch.cat(entropies)[order], torch.cat(wholes)[order]


def gradients(policy: Policy, loss: Tensor) -> dict[str, Tensor]:
    policy.model.zero_grad()
    loss.backward()
    return grads_of(policy)


def assert_gradients(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert mine.keys() == expected.keys()
    for name, grad in mine.items():
        assert float((grad - expected[name]).abs().max()) <= 2e-4 * float(expected[name].abs().max()) + 1e-6, name


def assert_near(mine: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert mine.keys() == expected.keys()
    for name, grad in mine.items():
        assert float((grad - expected[name]).norm()) <= tolerance * float(expected[name].norm()), name


@pytest.mark.parametrize("options", [{"gradient_checkpointing": True}, {"prefix_sharing": False}], ids=str)
@LORA_OR_FULL
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_slower_ways_give_the_same(family: str, use_peft: bool, options: dict[str, Any]) -> None:
    results = []
    for policy in (policy_of(family, use_peft=use_peft), policy_of(family, use_peft=use_peft, **options)):
        scores = policy.score(PACK, temperature=TEMPERATURE, entropy=True, entropy_grad=True)
        results.append((scores.logp, gradients(policy, (scores.logp * WEIGHTS - scores.entropy).sum())))
    (first, first_grads), (second, second_grads) = results
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)
    assert_gradients(first_grads, second_grads)


def test_gradient_checkpointing_recomputes_each_layer_and_leaves_generation_alone() -> None:
    calls = {True: 0, False: 0}
    for checkpointing in calls:
        policy = policy_of(gradient_checkpointing=checkpointing, fused_layers=False)
        for module in policy.model.modules():
            if isinstance(module, LlamaAttention):
                module.q_proj.register_forward_hook(lambda *_, on=checkpointing: calls.update({on: calls[on] + 1}))
        policy.score(PACK).logp.sum().backward()
    assert calls == {False: 2, True: 4}  # two layers
    policy = policy_of(gradient_checkpointing=True)
    with policy.held.plain() as model, torch.no_grad():
        assert model(torch.arange(4, 9)[None], use_cache=True).past_key_values is not None
    policy.held.eval()  # must not switch checkpointing off
    assert policy.score(PACK).logp.requires_grad


def test_packs_do_not_show() -> None:
    policy, expected = policy_of(), np.full((len(EPISODES), 12), np.nan)
    with torch.no_grad():
        PACK.put(policy.score(PACK).logp.numpy()[PACK.pair], expected)
        for budget in (1, 15, 40):
            found, packs = np.full_like(expected, np.nan), pack_episodes(EPISODES, tokens_per_pack=budget)
            assert len(packs) > 1
            for pack in packs:
                pack.put(policy.score(pack).logp.numpy()[pack.pair], found)
            np.testing.assert_allclose(found, expected, atol=1e-4)


def test_half_precision_stays_close() -> None:
    policy = fill(Policy.load(tiny_model("llama").bfloat16(), tiny_tokenizer(), lora_r=4))
    assert policy.prefix_sharing_obstacle is None
    with torch.no_grad(), policy.held.plain() as model:
        exact = policy_of().score(PACK).logp
        plain = (plain_scores(model, temperature=1.0)[0] - exact).abs().mean()
        mine = (policy.score(PACK).logp - exact).abs().mean()
    assert mine < 1.5 * plain  # rounding to bfloat16 costs the plain model as much
    policy.score(PACK).logp.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in policy.trainable_parameters())


def by_reference(policy: Policy, **how: Any) -> Any:
    with policy.reference.active():
        return policy.score(PACK, **how)


def exact_kl(policy: Policy, kind: str = "exact", **how: Any) -> torch.Tensor:
    hidden, logits = by_reference(policy, states=True).hidden, policy.head_under(policy.reference)
    compared = ReferenceDistribution(hidden, logits, Distillation(estimator=kind))
    return policy.score(PACK, compared=compared, **how).exact_kl


@LORA_OR_FULL
def test_the_reference_is_the_starting_policy(use_peft: bool) -> None:
    policy = policy_of(use_peft=use_peft, filled=False)
    start = policy.score(PACK).logp.detach()
    assert exact_kl(policy).abs().max() < 1e-5
    fill(policy, 3)
    assert not torch.allclose(policy.score(PACK).logp, start, atol=0.1)
    reference = by_reference(policy)
    torch.testing.assert_close(reference.logp, start, rtol=1e-5, atol=1e-5)
    assert not reference.logp.requires_grad


@LORA_OR_FULL
@pytest.mark.parametrize("kind", ["exact", "exact_weighted"])
def test_exact_kl_is_the_sum_over_the_vocabulary(kind: Any, use_peft: bool) -> None:
    policy = fill(policy_of(use_peft=use_peft), 2)
    got = exact_kl(policy, kind, temperature=TEMPERATURE)
    with policy.reference.active():
        logq = plain_scores(policy.model)[2]
    logp = plain_scores(policy.model)[2]
    expected = (logp.exp() * (logp - logq)).sum(-1)
    if kind == "exact_weighted":
        expected = expected * (logp.exp() / (logq.exp() + 1e-8)).mean(-1)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
    assert_gradients(gradients(policy, got.sum()), gradients(policy, expected.sum()))


def test_lora_on_the_head_is_served_through_the_module() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    policy = fill(Policy.load(tiny_model("llama", tie_word_embeddings=False), tiny_tokenizer(), lora_config=config))
    with policy.held.plain() as model:
        expected = plain_scores(model)[0]
    logp = policy.score(PACK, temperature=TEMPERATURE).logp
    torch.testing.assert_close(logp, expected, rtol=1e-4, atol=1e-4)
    grads, expected_grads = (gradients(policy, (each * WEIGHTS).sum()) for each in (logp, expected))
    assert any("lm_head" in name for name in grads)
    assert_gradients(grads, expected_grads)
    assert exact_kl(policy).mean() > 0.1


def test_support_renormalises() -> None:
    policy, count = policy_of(), len(PACK.targets)
    assert policy.score(PACK, supports=Support(PACK.targets, np.arange(count + 1))).logp.abs().max() < 1e-5
    everything = Support(np.tile(np.arange(VOCAB_SIZE), count), np.arange(count + 1) * VOCAB_SIZE)
    torch.testing.assert_close(policy.score(PACK, supports=everything).logp, policy.score(PACK).logp)


class ForgetfulAttention(LlamaAttention):
    """Drops what it is passed, as models outside transformers' attention interface do."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **_: Any) -> Any:
        return super().forward(hidden_states, position_embeddings, attention_mask)


class DoubledLogits(LlamaForCausalLM):
    """Its logits are no function of hidden states and head that we know."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 2
        return out


def test_a_model_that_cannot_share_is_padded_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = ForgetfulAttention
    with caplog.at_level(logging.WARNING, logger="covey.pytorch"):
        policy = Policy.load(model, tiny_tokenizer(), lora_r=4)
        policy.score(PACK)
        scores = policy.score(PACK, temperature=TEMPERATURE)
    assert "differ by" in policy.prefix_sharing_obstacle
    (record,) = caplog.records
    assert "tokens are not shared" in record.getMessage()
    assert model.config._attn_implementation == "sdpa"
    with policy.held.plain() as plain:
        torch.testing.assert_close(scores.logp, plain_scores(plain)[0], rtol=1e-4, atol=1e-4)


def test_what_the_probe_cannot_feel_is_read_from_the_config_and_unknown_logits_are_an_error() -> None:
    for attribute, value, reason in (
        ("attention_chunk_size", 4, "chunked"),
        ("layer_types", ["full_attention", "linear_attention"], "linear_attention"),
        ("sliding_window", 64, "sliding windows"),  # longer than the probe, and Llama's attention is not told
        ("_attn_implementation_internal", "flash_attention_2", "flash_attention_2"),
    ):
        policy = policy_of()
        model: Any = policy.model.get_base_model()  # type: ignore[operator]
        setattr(model.config, attribute, value)
        assert reason in find_obstacle(model, policy.held.probe_packed)
    model = tiny_model("llama")
    model.__class__ = DoubledLogits
    for wrong, options, words in (
        (model, {}, "cannot be computed from hidden states and output head"),
        (nn.Linear(2, 2), {"use_peft": False}, "not a transformers model"),
        (tiny_model("llama").requires_grad_(False), {"use_peft": False}, "no trainable parameter"),
    ):
        raises(ModelError, words, Policy.load, wrong, tiny_tokenizer(), **options)


@pytest.mark.parametrize("tied", [True, False])
def test_parameter_groups(tied: bool) -> None:
    policy = Policy.load(tiny_model("qwen2", tie_word_embeddings=tied), tiny_tokenizer(), use_peft=False)
    groups = {group["name"]: group for group in policy.parameter_groups(1e-3, embedding_lr=1e-5, weight_decay=0.1)}
    told = {name: (group["lr"], group["weight_decay"]) for name, group in groups.items()}
    assert told == {"weights": (1e-3, 0.1), "weights_without_decay": (1e-3, 0.0), "embeddings": (1e-5, 0.1)}
    assert len(groups["embeddings"]["params"]) == (1 if tied else 2)
    assert all(p.dim() == 1 for p in groups["weights_without_decay"]["params"])
    assert sum(len(group["params"]) for group in groups.values()) == len(policy.trainable_parameters())
    (lora,) = policy_of().parameter_groups(1e-3, embedding_lr=1e-5)
    assert (lora["name"], lora["lr"]) == ("weights", 1e-3)


def test_a_peft_model_is_taken_as_it_is_and_dropout_is_off_unless_lora_asks_for_it() -> None:
    inner = policy_of().model
    policy = Policy.load(inner, tiny_tokenizer())
    assert (policy.model, policy.eos_token_ids) == (inner, (2,))
    assert not policy.reference.is_base_model
    policy = policy_of("gpt2")  # resid, embd and attention dropout of 0.1 in its config
    policy.held.train()
    assert torch.equal(policy.score(PACK).logp, policy.score(PACK).logp)
    policy = policy_of(lora_dropout=0.5)
    steady = policy.score(PACK).logp
    for training in (False, True, False):
        policy.held.train() if training else policy.held.eval()
        assert torch.equal(steady, policy.score(PACK).logp) == (not training)


@LORA_OR_FULL
def test_state_goes_round(use_peft: bool) -> None:
    policy, other = policy_of(use_peft=use_peft), fill(policy_of(use_peft=use_peft), 9)
    other.load_state_dict(policy.state_dict())
    assert torch.equal(other.score(PACK).logp, policy.score(PACK).logp)
    state, before = policy.state_dict(), other.state_dict()
    first, *_, last = state
    fill(policy, 4)
    assert not torch.equal(policy.state_dict()[first], state[first])
    with pytest.raises(ModelError, match="1 tensors missing"):
        other.load_state_dict({n: torch.zeros(3) if n == first else state[n] for n in state if n != last})
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_a_saved_adapter_is_peft_s_own_a_saved_model_transformers_and_a_policy_starts_from_it(tmp_path: Path) -> None:
    policy, ids = policy_of(), torch.arange(4, 9)[None]
    adapter, whole = tmp_path / "adapter", tmp_path / "whole"
    for folder, each in ((adapter, policy), (whole, policy_of(use_peft=False))):
        each.save_pretrained(folder)
        (folder / "plain").touch()  # everyone may read the weights, as far as the umask lets others read a new file
        assert {file.stat().st_mode for file in folder.glob("*.safetensors")} == {(folder / "plain").stat().st_mode}
    assert NAME_PREFIX not in (whole / "config.json").read_text()
    assert torch.equal(AutoModelForCausalLM.from_pretrained(whole)(ids).logits, tiny_model("llama")(ids).logits)
    start = policy.score(PACK).logp.detach()
    model = PeftModel.from_pretrained(tiny_model("llama"), str(adapter))
    torch.testing.assert_close(model(ids).logits, policy.model(ids).logits, rtol=1e-5, atol=1e-5)
    assert AutoTokenizer.from_pretrained(adapter).chat_template == policy.tokenizer.chat_template
    continued = Policy.load(tiny_model("llama"), tiny_tokenizer(), adapter=adapter)
    assert torch.equal(continued.score(PACK).logp, start)
    fill(continued, 5)
    torch.testing.assert_close(by_reference(continued).logp, start, rtol=1e-5, atol=1e-5)


def plain_of(family: str, policy: Policy) -> Any:
    """A model made beside the policy from the same arguments, with PEFT's own layers, which Covey never touches."""
    plain: Any = tiny_model(family)
    if policy.uses_peft:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an attribute's old name; ranks of experts that a layer does not have
            plain = get_peft_model(plain, copy.deepcopy(policy.model.active_peft_config)).eval()
    state = policy.state_dict()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(state.pop(name))
    assert not state
    return plain


def assert_parity(family: str, policy: Policy) -> None:
    plain = plain_of(family, policy)
    expected, entropies, _ = plain_scores(plain)
    (expected * WEIGHTS).sum().backward()
    expected_grads = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    scores = policy.score(PACK, temperature=TEMPERATURE, entropy=True)
    torch.testing.assert_close(scores.entropy, entropies.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores.logp, expected, rtol=1e-4, atol=1e-4)
    grads = gradients(policy, (scores.logp * WEIGHTS).sum())
    assert len(grads) >= 14
    assert grads.keys() == policy.state_dict().keys()
    assert_gradients(grads, expected_grads)


def assert_published(family: str, policy: Policy) -> None:
    """Before an update and after it: the tokens of `generate`, and the log-probabilities that go to the trainer."""
    engine, chosen, asked = Engine(policy.model), [], [Request(ids) for ids in PROMPTS]
    for version in range(2):
        fill(policy, 1 + version)
        engine.publish(policy.weights(version))
        plain, greedy = plain_of(family, policy), SamplingSettings(temperature=0.0, max_tokens=12)
        chosen.append(texts(engine(asked, greedy, policy_version=version)))
        assert chosen[-1] == [generated(plain, ids, 12) for ids in PROMPTS]
        assert_plain(plain, asked, engine(asked, SamplingSettings(max_tokens=12), policy_version=version), rtol=1e-4)
    assert chosen[0] != chosen[1]


@LORA_OR_FULL
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_scores_gradients_and_what_is_published(family: str, use_peft: bool) -> None:
    assert_parity(family, policy := policy_of(family, use_peft=use_peft))
    if use_peft:
        assert_published(family, policy)


def test_adapters_on_experts_for_those_who_ask_for_them(tmp_path: Path) -> None:
    """Those of "all-linear" wrap the experts' and the router's own parameters; by default only attention is adapted."""
    policy = policy_of("qwen3_moe", lora_config=LoraConfig(r=4, target_modules="all-linear"))
    assert sum("mlp.experts" in name for name, _ in policy.named_trainable_parameters()) == 8
    assert_parity("qwen3_moe", policy)
    assert_published("qwen3_moe", policy)
    policy.save_pretrained(tmp_path)
    again = Policy.load(tiny_model("qwen3_moe"), tiny_tokenizer(), adapter=tmp_path)
    assert torch.equal(again.score(PACK).logp, policy.score(PACK).logp)
    for family in ("qwen3_moe", "gpt_oss"):
        policy = policy_of(family)
        assert all("self_attn" in name for name, _ in policy.named_trainable_parameters())
        assert len(policy.weights(0).sha256) == 64


def exact_of(family: str = "llama", *, dtype: torch.dtype = torch.float64, window: int = 64, **options: Any) -> Policy:
    model = tiny_model(family, sliding_window=window).to(dtype)
    if dtype == torch.float64:
        use_exact_norms(model)
    return fill(Policy.load(model, tiny_tokenizer(), **{"lora_r": 4, **options}))


def narrow_of(family: str = "llama", **options: Any) -> Policy:
    """Frozen matrices in bfloat16, all else in float32."""
    model = tiny_model(family, sliding_window=64)
    return fill(Policy.load(model, tiny_tokenizer(), dtype="bfloat16", lora_r=4, **options))


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
    expected_grads, found = gradients(policy, weighted(expected)), policy.held.hidden(pack)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    grads = gradients(policy, weighted(found))
    assert grads.keys() == policy.state_dict().keys()
    assert_near(grads, expected_grads, tolerance)


def weighted(hidden: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (hidden * torch.randn(hidden.shape, generator=generator, dtype=torch.float64).to(hidden.dtype)).sum()


@pytest.mark.parametrize("options", LORAS.values(), ids=LORAS)
@pytest.mark.parametrize("family", DENSE)
def test_hidden_states_and_gradients_are_those_of_the_models_own_layers(family: str, options: dict[str, Any]) -> None:
    assert_same(exact_of(family, **options))


def test_random_packs_agree() -> None:
    """Prompts of 1 to 70 tokens, completions of 1 to 150, groups of 1 to 5, agents among them."""
    policy, rng = exact_of("qwen2"), np.random.default_rng(5)
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
    policy, rng, step = exact_of("qwen3"), np.random.default_rng(0), 1e-5
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


@pytest.mark.parametrize("narrow", [False, True])
def test_half_precision_is_as_close_as_the_models_own(narrow: bool) -> None:
    """In the median of five adapters: how far rounding leads is a matter of chance."""
    forward, backward = [], []
    for seed in range(5):
        exact = fill(exact_of(), seed)
        half = fill(narrow_of() if narrow else exact_of(dtype=torch.bfloat16), seed)
        truth, own, mine = exact.held.hidden_packed(PACK), half.held.hidden_packed(PACK), half.held.hidden(PACK)
        assert mine.dtype == (torch.float32 if narrow else torch.bfloat16)
        forward.append(float(((mine - truth).norm() / (own - truth).norm()).detach()))
        true_grads, own_grads = gradients(exact, weighted(truth)), gradients(half, weighted(own))
        grads = gradients(half, weighted(mine))
        assert all(grad.dtype == torch.float32 for grad in grads.values())  # PEFT keeps adapters wide
        off = [
            [float((g[n] - true).norm() / true.norm()) for n, true in true_grads.items()] for g in (grads, own_grads)
        ]
        backward.append(sum(off[0]) / sum(off[1]))
    assert max(np.median(forward), np.median(backward)) <= 1.2


@pytest.mark.parametrize("family", DENSE)
def test_narrow_matrices_leave_all_else_in_float32(family: str) -> None:
    policy = narrow_of(family)
    assert fused(policy).can_run()
    held = {(p.dim() > 1, p.requires_grad): p.dtype for p in policy.model.parameters()}
    assert held == {(True, False): torch.bfloat16, (False, False): torch.float32, (True, True): torch.float32}
    own, mine = policy.held.hidden_packed(PACK), policy.held.hidden(PACK)
    assert own.dtype == mine.dtype == torch.float32
    torch.testing.assert_close(mine, own, rtol=0.05, atol=0.05)
    expected, found = gradients(policy, weighted(own)), gradients(policy, weighted(mine))
    assert_near(found, expected, 0.1)


def test_what_is_trained_itself_is_not_narrow() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = tiny_model("llama", tie_word_embeddings=False)
    policy = Policy.load(model, tiny_tokenizer(), dtype="bfloat16", lora_config=config)
    assert {p.dtype for p in policy.trainable_parameters()} == {torch.float32}
    policy.score(PACK).logp.sum().backward()
    assert all(float(grad.abs().max()) > 0 for name, grad in grads_of(policy).items() if "lm_head" in name)
    trained = Policy.load(tiny_model("llama"), tiny_tokenizer(), dtype="float32", use_peft=False)
    assert all(type(m) is nn.Linear for m in trained.model.modules() if isinstance(m, nn.Linear))


def test_less_memory_than_autograds_is_kept_and_freed_by_the_backward() -> None:
    policy = exact_of()
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
    checkpointed = kept_of(fused(exact_of(gradient_checkpointing=True)).hidden(PACK))
    assert sum(sum(layer.values()) for layer in checkpointed) == 2 * PACK.num_tokens * 32 * 8
    weighted(hidden).backward(retain_graph=True)
    raises(RuntimeError, "ran twice", weighted(hidden).backward)


def test_the_reference_is_the_base_model_and_merged_adapters_go_through_the_models_own_layers() -> None:
    policy = exact_of()
    hidden = fused(policy).hidden(PACK)
    with policy.reference.active():
        reference = policy.held.hidden(PACK)
        torch.testing.assert_close(reference, policy.held.hidden_packed(PACK), rtol=1e-9, atol=1e-9)
    assert float((reference - hidden.detach()).abs().max()) > 1e-2
    snapshot = exact_of()
    snapshot.reference.copy_current()  # an exchange, which does not reach an earlier pass
    fill(snapshot, 2)
    hidden = fused(snapshot).hidden(PACK)
    with snapshot.reference.active():
        torch.testing.assert_close(snapshot.held.hidden(PACK), fused(policy).hidden(PACK), rtol=1e-9, atol=1e-9)
    fill(policy, 2)
    expected = gradients(policy, weighted(fused(policy).hidden(PACK)))
    found = gradients(snapshot, weighted(hidden))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    policy = exact_of()
    assert fused(policy).can_run()
    policy.model.merge_adapter()
    assert not fused(policy).can_run()
    torch.testing.assert_close(policy.held.hidden(PACK), exact_of().held.hidden(PACK), rtol=1e-9, atol=1e-9)


def test_dropout_shares_nothing_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """A mask for each token of each sequence: sequences that share a token would share its mask."""
    policy = exact_of(lora_dropout=0.5)
    assert policy.prefix_sharing_obstacle.startswith("lora_dropout=0.5")
    assert policy.fused_obstacle == policy.prefix_sharing_obstacle
    assert "lora_dropout=0.5" in caplog.text
    (pack,) = pack_episodes([episode(np.arange(4, 9), np.arange(5) > 2)] * 2, shared=False)
    assert pack.pair.tolist() == [0, 1, 2, 3]
    logp = policy.score(pack).logp
    assert torch.equal(logp[:2], logp[2:])
    policy.held.train()
    logp = policy.score(pack).logp
    assert not torch.isclose(logp[:2], logp[2:]).any()


@pytest.mark.parametrize("family", ["mistral", "phi3", "gemma2", "gemma3"])
def test_windows_shorter_than_the_sequences(family: str) -> None:
    # in float64 Gemma 2's own code returns NaN for padding outside of the window
    dtype, tolerance = (torch.float32, 1e-4) if family == "gemma2" else (torch.float64, 1e-9)
    policy = exact_of(family, window=6, dtype=dtype)
    assert_same(policy, tolerance=tolerance)
    wide = exact_of(family, dtype=dtype)
    assert float((policy.held.hidden(PACK) - wide.held.hidden(PACK)).detach().abs().max()) > 1e-2


def lora(*targets: str, **options: Any) -> dict[str, Any]:
    return {"lora_config": LoraConfig(r=2, target_modules=list(targets) or "all-linear", **options)}


def test_other_models_say_why_and_are_left_alone() -> None:
    for family, options, why in (
        ("qwen3_moe", {}, "Qwen3MoeForCausalLM is not one of"),
        ("gpt2", {}, "GPT2LMHeadModel is not one of"),
        ("llama", {"use_peft": False}, "something else than LoRA"),
        ("llama", {"prefix_sharing": False}, "prefix_sharing is off"),
        ("llama", {"fused_layers": False}, "fused_layers is off"),
        ("llama", lora("q_proj", modules_to_save=["norm"]), "something else"),
        ("llama", lora("q_proj", "lm_head"), "something else"),
    ):
        policy = Policy.load(tiny_model(family, tie_word_embeddings=False), tiny_tokenizer(), **options)
        assert policy.held.fused is None
        assert why in policy.fused_obstacle
    for variant in ({"use_dora": True}, {"lora_bias": True}):
        policy = Policy.load(tiny_model("llama"), tiny_tokenizer(), **lora(**variant))
        assert policy.fused_obstacle is not None or not fused(policy).can_run()
    model = tiny_model("llama")
    before = [p.data_ptr() for p in model.parameters()]
    raises(ModelError, "something else than LoRA", FusedDecoder, model)
    assert before == [p.data_ptr() for p in model.parameters()]


def test_the_owner_keeps_its_weights_and_can_save_them(tmp_path: Path) -> None:
    """Joined weights are views of one matrix; saving the merged model must not trip over that."""
    expected = tiny_model("qwen2").state_dict()
    policy = Policy.load(tiny_model("qwen2"), tiny_tokenizer(), lora_r=4)
    base = policy.model.get_base_model().state_dict()
    for name, value in expected.items():
        assert torch.equal(base.get(name, base.get(name.replace("proj.", "proj.base_layer."))), value), name
    fill(policy, 1)
    scores = policy.score(PACK).logp
    policy.model.merge_and_unload().save_pretrained(tmp_path)
    plain = Policy.load(AutoModelForCausalLM.from_pretrained(tmp_path), tiny_tokenizer(), use_peft=False)
    torch.testing.assert_close(plain.score(PACK).logp, scores, rtol=1e-4, atol=1e-4)
