"""The engine against plain transformers models: what it samples and records, its memory, its copy of the weights."""

import copy
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import assert_plain, generated, groups, plain_logits, plain_logprobs, prompts, texts
from peft import IA3Config, LoraConfig, PrefixTuningConfig
from tiny_models import DENSE, FAMILIES, VOCAB_SIZE, adapted, byte_tokenizer, tiny_model, tiny_tokenizer, with_lora

from covey.errors import ConfigError, GenerationError, ModelError
from covey.pytorch.engine import Engine
from covey.pytorch.engine.merge import EffectiveWeights, copy_without_adapters, weights_of
from covey.pytorch.engine.sampling import sample
from covey.pytorch.models.narrow import _packed, packed
from covey.pytorch.models.narrow import narrow as narrowed
from covey.rollout.drawing import StopMatcher, stream_key, uniforms
from covey.rollout.learning import Weights
from covey.types import Completion, Request, SamplingSettings
from fakes import raises

GREEDY = SamplingSettings(temperature=0.0, max_tokens=12)
SAMPLED = SamplingSettings(temperature=1.0, max_tokens=12)
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore about it")
CUTS: dict[str, list[float]] = {"top_k": [0, 1, 4, 90], "top_p": [0.2, 0.9, 0.999, 1.0], "min_p": [0.0, 0.1, 0.5]}
CHOICES = {"temperature": [0.5, 1.0, 1.7]} | CUTS
CHOSEN = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()})
LETTERS = "ab é€😀\n"


def run(engine: Engine, requests: list[Request], version: int = 0, **settings: Any) -> list[Completion]:
    return engine(requests, SamplingSettings(**settings), policy_version=version)


@pytest.mark.parametrize("family", [*FAMILIES, "untied"])
def test_greedy_tokens_and_recorded_logprobs_are_the_plain_models(family: str) -> None:
    model = tiny_model("llama", tie_word_embeddings=False) if family == "untied" else tiny_model(family)
    engine = Engine(model)
    assert engine.runner == ("fast" if family in (*DENSE, "untied") else "general")
    found = engine(groups(2), GREEDY, policy_version=0)
    assert {completion.finish_reason for completion in found} == {"length"}
    assert texts(found) == [generated(model, ids, 12) for ids in prompts() for _ in range(2)]
    for temperature in (1.0, 0.6):
        found = run(engine, groups(3), temperature=temperature, max_tokens=10, eos_token_ids=(2, 9))
        assert_plain(model, groups(3), found, temperature)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_is_merged_into_the_copy_only(family: str) -> None:
    model, requests = with_lora(family), groups(2)
    before, completions = copy.deepcopy(model.state_dict()), run(Engine(model), requests, max_tokens=8)
    assert_plain(model, requests, completions)
    with model.disable_adapter():
        for request, completion in zip(requests, completions, strict=True):
            assert np.abs(completion.logprobs - plain_logprobs(model, request, completion)).max() > 1e-2
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("narrow", [False, True])
def test_sync_takes_new_adapter_weights_and_their_version_and_leaves_the_training_mode_alone(narrow: bool) -> None:
    model, requests = with_lora(narrowed(tiny_model("llama").bfloat16()) if narrow else "llama").train(), groups(1)
    model.base_model.model.model.norm.eval()
    modes, engine = [m.training for m in model.modules()], Engine(model)
    assert [m.training for m in model.modules()] == modes
    first = run(engine, requests, max_tokens=8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-1)
    snapshot = copy.deepcopy(model.state_dict())
    assert texts(run(engine, requests, max_tokens=8)) == texts(first)
    engine.publish(weights_of(model, 7))
    assert engine.policy_version == 7
    with pytest.raises(GenerationError, match=r"policy_version=0.*version 7.*engine\.publish\(policy\.weights\(0\)\)"):
        run(engine, requests)
    second = run(engine, requests, 7, max_tokens=8)
    assert texts(second) != texts(first)
    assert [c.policy_version for c in second] == [7] * 3
    assert_plain(model, requests, second, atol=0.05 if narrow else 1e-4)
    assert narrow == bool(_packed)
    if narrow:
        held = set(map(id, _packed.values()))
        Engine(model)
        assert set(map(id, _packed.values())) == held  # no second copy
    assert all(torch.equal(snapshot[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("narrow", [False, True])
def test_products_in_int8_are_close_to_the_models_own_and_take_new_adapters(narrow: bool) -> None:
    weights = [torch.tensor([[127.0, 3.0], [-2.0, 127.0]]), torch.tensor([[254.0, -2.0]])]  # a step of 1, 1 and 2
    found = packed(weights, torch.int8).multiply(torch.tensor([[127.0, -1.0], [10.0, 63.5]]), torch.tensor([0.0, 1, 2]))
    assert found.tolist() == [[16126.0, -380.0, 32262.0], [1460.5, 8045.5, 2415.0]]
    model, requests = with_lora(narrowed(tiny_model("llama").bfloat16()) if narrow else "llama"), groups(2)
    engine = Engine(model, dtype=torch.int8)
    first = run(engine, requests, max_tokens=8)
    assert_plain(model, requests, first, atol=0.4)
    with pytest.raises(AssertionError):
        assert_plain(model, requests, first, atol=1e-4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-1)
    engine.publish(weights_of(model, 1))
    assert_plain(model, requests, run(engine, requests, 1, max_tokens=8), atol=0.4)
    if not narrow:
        raises(ConfigError, "general runner in torch.float32 on cpu", Engine, tiny_model("gpt2"), dtype=torch.int8)
        trained, requests = tiny_model("llama"), groups(1)
        engine = Engine(trained, dtype=torch.int8)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.05, fused=True)  # which tells no tensor's version
        trained(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        optimizer.step()
        engine.publish(weights_of(trained, 1))
        assert_plain(trained, requests, run(engine, requests, 1, max_tokens=8), atol=0.4)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_full_fine_tuning_copies_the_weights(family: str) -> None:
    model, requests = tiny_model(family), groups(1, (5,))
    engine = Engine(model)
    before = engine(requests, GREEDY, policy_version=0)
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    still = engine(requests, GREEDY, policy_version=0)
    assert texts(still) == texts(before)
    np.testing.assert_array_equal(still[0].logprobs, before[0].logprobs)
    engine.publish(weights_of(model, 1))
    assert_plain(model, requests, engine(requests, GREEDY, policy_version=1))


def test_interrupted_syncs_are_never_sampled_from_and_weights_that_diverged_do_not_poison_the_next_call() -> None:
    engine = Engine(tiny_model("llama"))
    with pytest.raises(KeyError):
        engine.publish(weights_of(tiny_model("gpt2"), 1))
    assert engine.policy_version == -1
    raises(GenerationError, "no weights", engine, groups(1), GREEDY, policy_version=1)
    engine.publish(weights_of(tiny_model("llama"), 1))
    assert len(engine(groups(1), GREEDY, policy_version=1)) == 3
    model, broken = tiny_model("llama"), tiny_model("llama")
    engine = Engine(model)
    expected = engine(groups(2), GREEDY, policy_version=0)
    broken.model.layers[0].self_attn.k_proj.weight.data.fill_(float("nan"))
    engine.publish(weights_of(broken, 1))
    said = r"not finite. Before any update .* another copy, or model.dtype=float32. After updates"
    raises(GenerationError, said, engine, groups(2), GREEDY, policy_version=1)
    engine.publish(weights_of(model, 2))
    assert texts(engine(groups(2), GREEDY, policy_version=2)) == texts(expected)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
def test_company_does_not_matter(family: str) -> None:
    model = tiny_model(family)
    engine, settings = Engine(model), SamplingSettings(max_tokens=14, eos_token_ids=(2, 7, 30))
    requests = groups(5, (3, 11, 40, 33))
    crowd = engine(requests, settings, policy_version=0)
    assert engine.last_stats.peak_batch > 10
    assert len({len(c.token_ids) for c in crowd}) > 3  # rows did leave at different times
    token = engine._cache.bytes_per_token
    for name, found in {
        "waves": Engine(model, max_batch_size=2)(requests, settings, policy_version=0),
        "small cache": Engine(model, kv_cache_bytes=token * (48 + 32 + 2 * 13))(requests, settings, policy_version=0),
        "shuffled": engine(requests[::-1], settings, policy_version=0)[::-1],
        "alone": [engine([r], settings, policy_version=0)[0] for r in requests[::3]],
    }.items():
        expected = crowd[::3] if name == "alone" else crowd
        assert texts(found) == texts(expected), name
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_a_prompt_is_prefilled_once_and_finished_rows_leave_the_batch() -> None:
    engine = Engine(tiny_model("llama"), max_batch_size=2)
    run(engine, groups(5), max_tokens=6)
    stats = engine.last_stats
    # each prompt once, although its five completions ran in three waves
    assert (stats.prefill_tokens, stats.decoded_tokens, stats.peak_batch) == (3 + 11 + 40, 15 * 6, 2)
    assert stats.cache_bytes == engine._cache.bytes_per_token * (2 * 5 + (48 + 32) * 5 // 4)  # two prompts run at once
    engine = Engine(tiny_model("llama"))
    long = run(engine, groups(4, (11,)), max_tokens=20)
    assert engine.last_stats.decode_steps == 19
    ends = tuple(int(c.token_ids[3]) for c in long)
    short = run(engine, groups(4, (11,)), max_tokens=20, eos_token_ids=ends)
    assert engine.last_stats.decode_steps <= 3
    assert all(len(c.token_ids) <= 4 and c.finish_reason == "stop" and c.token_ids[-1] in ends for c in short)


def test_first_tokens_follow_the_models_distribution() -> None:
    """Pearson's chi-square over 4000 streams, tokens expected at least 5 times apart; 6 sigma bound."""
    model, count, (ids,) = tiny_model("qwen3"), 4000, prompts((9,))
    completions = run(Engine(model, max_batch_size=512), [Request(ids, (3, i)) for i in range(count)], max_tokens=1)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)[None]).logits[0, -1].double().softmax(-1).numpy() * count
    observed = np.bincount([c.token_ids[0] for c in completions], minlength=VOCAB_SIZE)
    often = expected >= 5
    cells = [(observed[often], expected[often]), (observed[~often].sum(), expected[~often].sum())]
    chi_square, freedom = sum(float(np.sum((o - e) ** 2 / e)) for o, e in cells), int(often.sum())
    assert freedom > 20
    assert abs(chi_square - freedom) < 6 * np.sqrt(2 * freedom)


def test_any_of_several_ends_or_stop_strings_stops_and_stays() -> None:
    engine, requests, ends = Engine(tiny_model("llama")), groups(6), (5, 40, 77)
    free = run(engine, requests, max_tokens=20)
    stopped = run(engine, requests, max_tokens=20, eos_token_ids=ends)
    assert any(c.finish_reason == "stop" for c in stopped)
    for a, b in zip(texts(free), stopped, strict=True):
        places = [i for i, token in enumerate(a) if token in ends]
        assert b.token_ids.tolist() == a[: places[0] + 1 if places else 20]
        assert b.finish_reason == ("stop" if places else "length")
    tokenizer, requests = tiny_tokenizer(), groups(4, (5, 9))
    engine = Engine(tiny_model("llama"), tokenizer)
    whole = [tokenizer.decode(c.token_ids) for c in run(engine, requests, max_tokens=24)]
    stops = (whole[0][5:8], whole[3][2:4])
    stopped = run(engine, requests, max_tokens=24, stop_strings=stops)
    assert stopped[0].finish_reason == stopped[3].finish_reason == "stop"
    for text, completion in zip(whole, stopped, strict=True):
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        assert tokenizer.decode(completion.token_ids) == (text[: min(ends)] if ends else text)
    raises(GenerationError, "no tokenizer", run, Engine(tiny_model("llama")), requests, stop_strings=("x",))


@pytest.mark.parametrize("settings", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.8}])
def test_kept_support_and_its_logprobs(settings: dict[str, float]) -> None:
    """With keep_support: renormalised over the recorded ids. Without: the same tokens, whole vocabulary."""
    model, requests = tiny_model("llama"), groups(2)
    engine = Engine(model)
    kept = run(engine, requests, temperature=0.8, max_tokens=6, keep_support=True, **settings)
    plain = run(engine, requests, temperature=0.8, max_tokens=6, **settings)
    assert texts(kept) == texts(plain)
    assert_plain(model, requests, plain, 0.8)
    assert all(b.support is None for b in plain)
    for request, a in zip(requests, kept, strict=True):
        assert len(a.support.offsets) == len(a.token_ids) + 1
        logits = plain_logits(model, request, a) / 0.8
        for t, token in enumerate(a.token_ids):
            ids = a.support.ids[a.support.offsets[t] : a.support.offsets[t + 1]]
            assert 1 <= len(ids) < VOCAB_SIZE
            assert token in ids
            expected = logits[t, token] - logits[t, torch.from_numpy(ids)].logsumexp(-1)
            assert abs(a.logprobs[t] - float(expected)) < 1e-4
    (nothing_cut_off,) = run(engine, groups(1, (4,)), max_tokens=3, keep_support=True)
    assert nothing_cut_off.support is None


def test_context_and_memory_that_are_too_small_and_settings_that_describe_no_distribution() -> None:
    engine = Engine(tiny_model("gpt2", max_position_embeddings=16))
    (completion,) = run(engine, groups(1, (11,)), max_tokens=100)
    assert (len(completion.token_ids), completion.finish_reason) == (5, "length")
    raises(GenerationError, "request 1: the prompt has 16 tokens, the context 16", run, engine, groups(1, (3, 16)))
    raises(GenerationError, "no tokens", run, engine, [Request(np.array([], dtype=np.int64))])
    raises(ModelError, "context_length=17", Engine, tiny_model("gpt2", max_position_embeddings=16), context_length=17)
    engine = Engine(tiny_model("llama"), kv_cache_bytes=10_000)
    assert engine._cache.bytes_per_token == 256  # 2 layers x 2 heads x 8 dimensions x (key, value) x 4 bytes
    with pytest.raises(GenerationError, match=rf"kv_cache_bytes=10000: .* needs {256 * (48 + 99)} bytes"):
        run(engine, groups(1, (40,)), max_tokens=100)
    assert len(run(engine, groups(3, (4,)), max_tokens=6)) == 3
    for bad in ({"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"min_p": 2.0}, {"max_tokens": 0}):
        raises(ConfigError, next(iter(bad)), run, engine, groups(1), **bad)
    assert run(engine, []) == []


def test_progress_and_reuse_after_an_exception() -> None:
    engine = Engine(tiny_model("llama"), max_batch_size=3)
    requests, settings = groups(3), SamplingSettings(max_tokens=10, eos_token_ids=(7, 30, 50, 60))
    seen: list[tuple[int, int]] = []
    expected = engine(requests, settings, policy_version=0, progress=lambda *x: seen.append(x))
    assert seen == sorted({*seen})
    assert {total for _, total in seen} == {seen[-1][0]} == {9}

    def interrupt(finished: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine(requests, settings, policy_version=0, progress=interrupt)
    assert texts(engine(requests, settings, policy_version=0)) == texts(expected)


def test_a_model_without_interface_is_recomputed_and_a_bfloat16_copy_is_close(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="covey"):
        engine = Engine(tiny_models.without_interface(tiny_model("gpt2")))
    assert engine.runner == "recompute"
    assert "does not use transformers' attention interface" in caplog.text
    expected = run(Engine(tiny_model("gpt2")), groups(2), max_tokens=5)
    assert texts(run(engine, groups(2), max_tokens=5)) == texts(expected)
    model, requests = tiny_model("llama"), groups(2)
    for request, one in zip(requests, run(Engine(model, dtype=torch.bfloat16), requests, max_tokens=8), strict=True):
        assert 1e-5 < np.abs(one.logprobs - plain_logprobs(model, request, one)).max() < 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_continuations_are_as_likely_as_the_plain_model_says(family: str) -> None:
    model, requests = tiny_model(family), groups(2)
    settings = SamplingSettings(temperature=0.7, top_k=5, max_tokens=3, eos_token_ids=(2, 9), keep_support=True)
    continuations = [np.array(ids) for ids in ([7], [9], [4, 2, 9, 30, 31])]  # end tokens, and more than may be sampled
    alone = Engine(model)(requests, settings, policy_version=0)
    for room in (1 << 30, 40_000):  # all at once, and a few at a time
        both = [one for r in requests for one in (r, *(Request(r.token_ids, forced=ids) for ids in continuations))]
        found = Engine(model, kv_cache_bytes=room)(both, settings, policy_version=0)
        assert texts(found[::4]) == texts(alone)
        assert all(one.support is not None for one in found[::4])
        for request, one in zip(both, found, strict=True):
            if request.forced is not None:
                assert one.token_ids.tolist() == request.forced.tolist()
                assert one.logprobs == pytest.approx(plain_logprobs(model, request, one), abs=2e-4)
    context = len(requests[0].token_ids) + 4
    small, said = Engine(model, context_length=context), f"no room in the context of {context}"
    raises(GenerationError, said, small, both[:4], settings, policy_version=0)


def fails_beyond(engine: Engine, rows: int, patch: pytest.MonkeyPatch, error: Exception = OUT_OF_MEMORY) -> list[int]:
    """Let passes that decode more rows at once fail; returns the sizes of all that were tried."""
    forward, tried = engine._runner.forward, []

    def limited(step: Any) -> Any:
        if step.last is None:
            tried.append(len(step.token_ids))
            if len(step.token_ids) > rows:
                raise error
        return forward(step)

    patch.setattr(engine._runner, "forward", limited)
    return tried


def test_half_as_many_at_once_draw_the_same_and_other_errors_are_not_tried_again(monkeypatch: Any, caplog: Any) -> None:
    expected = Engine(tiny_model("llama"))(groups(4), SAMPLED, policy_version=0)
    engine = Engine(tiny_model("llama"))
    tried = fails_beyond(engine, 4, monkeypatch)
    found = engine(groups(4), SAMPLED, policy_version=0)
    assert texts(found) == texts(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert tried[:2] == [12, 6]
    assert engine.max_batch_size == max(tried[2:]) == 3
    assert "at most 3 at a time" in caplog.text
    assert "more about it" not in caplog.text
    fails_beyond(engine, 0, monkeypatch)
    with pytest.raises(GenerationError, match=r"one completion at a time; .* sampling\.kv_cache_gb"):
        engine(groups(4), SAMPLED, policy_version=0)
    engine = Engine(tiny_model("llama"))
    tried = fails_beyond(engine, 0, monkeypatch, RuntimeError("a kernel failed"))
    raises(RuntimeError, "a kernel failed", engine, groups(1), SAMPLED, policy_version=0)
    assert len(tried) == 1


def test_keys_and_values_are_given_back_and_taken_anew() -> None:
    model = tiny_model("llama")
    engine = Engine(model)
    expected = engine(groups(2), SAMPLED, policy_version=0)
    engine.release()
    assert engine._cache.allocated_bytes > 0  # on a CPU new pages cost more than they are worth
    engine._device = torch.device("cuda")  # nothing is computed on it
    engine.release()
    assert engine._cache.allocated_bytes == 0
    engine._device = torch.device("cpu")
    engine.publish(weights_of(model, 1))
    assert texts(engine(groups(2), SAMPLED, policy_version=1)) == texts(expected)


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


def test_lora_by_hand_and_disabled_and_already_merged_adapters_and_virtual_tokens_are_refused() -> None:
    model, name = with_lora("llama"), "model.layers.1.mlp.up_proj.weight"
    layer = model.base_model.model.model.layers[1].mlp.up_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = (layer.base_layer.weight + 7 / 3 * (b @ a)).detach()
    torch.testing.assert_close(EffectiveWeights(model)[name], expected)
    assert EffectiveWeights(model).base is model.get_base_model()
    with model.disable_adapter():
        torch.testing.assert_close(EffectiveWeights(model)[name], tiny_model("llama").get_parameter(name).detach())
    model.merge_adapter()
    torch.testing.assert_close(EffectiveWeights(model)[name], expected)
    config = PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    raises(ModelError, "PREFIX_TUNING", EffectiveWeights, adapted(tiny_model("llama"), config))


def test_published_weights_are_references_with_a_hash() -> None:
    model = with_lora("llama")
    weights, embedding = weights_of(model, 4), model.get_input_embeddings().weight
    assert weights.tensors()["model.embed_tokens.weight"].data_ptr() == embedding.data_ptr()
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


def reference_kept(logits: np.ndarray, s: SamplingSettings) -> tuple[np.ndarray, np.ndarray]:
    """Kept mask `[V]` and probabilities `[V]` before cutting, by sorting, in float64."""
    scaled = logits.astype(np.float64) / (s.temperature or 1.0)
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order, kept = np.argsort(-p, kind="stable"), np.ones(len(p), dtype=bool)
    if s.top_k:
        kept[order[s.top_k :]] = False
    if s.top_p < 1:
        ranked = p[order] * kept[order]
        kept[order[np.concatenate([[0.0], np.cumsum(ranked)[:-1]]) >= s.top_p * ranked.sum()]] = False
    if s.min_p:
        kept &= p >= s.min_p * p.max()
    return kept, p


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([5, 97, 256, 700, 3000]), st.sampled_from([0.05, 1.0, 8.0]), CHOSEN)
def test_support_token_and_logprob_are_those_of_sorting(seed: int, vocab: int, spread: float, chosen: Any) -> None:
    rng = np.random.default_rng(seed)
    logits = (spread * rng.standard_normal((4, vocab))).astype(np.float32)
    chosen |= {"top_k": min(chosen["top_k"], vocab)}
    s, u = SamplingSettings(**chosen, keep_support=True), rng.random(4)
    draw = sample(torch.from_numpy(logits.copy()), s, u)
    free = sample(torch.from_numpy(logits.copy()), SamplingSettings(**chosen), u)
    np.testing.assert_array_equal(draw.token_ids, free.token_ids)
    for row in range(4):
        kept, p = reference_kept(logits[row], s)
        token = draw.token_ids[row]
        found = np.isin(np.arange(vocab), draw.support[row]) if draw.support is not None else np.ones(vocab, dtype=bool)
        # float32 may decide differently about a token whose probability sits on a threshold: one, not more
        assert (found ^ kept).sum() <= 1
        assert found[token]
        assert abs(draw.logprobs[row] - np.log(p[token] / p[found].sum())) < 1e-4
        assert abs(free.logprobs[row] - np.log(p[token])) < 1e-4


def test_whole_vocabulary_is_the_inverse_cdf_in_vocabulary_order() -> None:
    rng = np.random.default_rng(0)
    logits = (3 * rng.standard_normal((1, 1000))).astype(np.float32)
    cumulative, u = np.cumsum(reference_kept(logits[0], SamplingSettings())[1]), rng.random(3000)
    draw = sample(torch.from_numpy(logits).repeat(3000, 1), SamplingSettings(), u)
    expected = np.searchsorted(cumulative, u, side="right")
    edge = np.abs(cumulative[expected] - u) + np.abs(cumulative[np.maximum(expected - 1, 0)] - u)
    agree = draw.token_ids == expected
    assert agree[edge > 1e-5].all()
    assert agree.mean() > 0.99


@pytest.mark.parametrize("vocab", [3, 256, 257, 1000])
def test_tokens_of_probability_zero_are_never_drawn(vocab: int) -> None:
    logits = torch.full((6, vocab), -float("inf"))
    logits[:, [vocab // 3, 2 * vocab // 3]] = 0.0
    u = np.array([0.0, 2.0**-53, 0.4999999, 0.5, 0.75, 1 - 2.0**-53])
    for s in (SamplingSettings(), SamplingSettings(top_p=0.99), SamplingSettings(min_p=0.1)):
        draw = sample(logits.clone(), s, u)
        assert set(draw.token_ids) == {vocab // 3, 2 * vocab // 3}
        first, second = draw.token_ids[0], draw.token_ids[-1]
        assert draw.token_ids.tolist() == [first] * 3 + [second] * 3
        np.testing.assert_allclose(draw.logprobs, np.log(0.5), atol=1e-6)


def test_greedy_takes_the_top_token_at_temperature_one() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, -2.0]])
    draw = sample(logits, SamplingSettings(temperature=0.0, top_k=1), np.array([0.99, 0.99]))
    assert (draw.token_ids.tolist(), draw.support) == ([1, 0], None)
    expected = -np.log(np.exp([-2.0, 0.0, -1.0]).sum())  # log softmax of the largest, by hand
    assert abs(draw.logprobs[0] - expected) < 1e-6


def test_uniforms_depend_on_stream_and_position_only() -> None:
    keys = np.array([stream_key((0, 1, 2, j)) for j in range(200)], dtype=np.uint64)
    together = np.stack([uniforms(keys, np.full(200, t, dtype=np.uint64)) for t in range(50)], axis=1)
    assert uniforms(keys[17:18], np.array([33], dtype=np.uint64))[0] == together[17, 33]
    assert 0 <= together.min() <= together.max() < 1
    assert len(np.unique(together)) == together.size
    counts = np.histogram(together, bins=20, range=(0, 1))[0]
    assert np.sum((counts - 500) ** 2 / 500) < 60  # chi-square, 19 degrees of freedom
    assert abs(np.corrcoef(together)[np.triu_indices(200, 1)].mean()) < 0.01
    # SplitMix64: its first output when seeded with 0 is 0xE220A8397B1DCDAF
    (u,) = uniforms(np.array([0], dtype=np.uint64), np.array([0], dtype=np.uint64))
    assert u == (0xE220A8397B1DCDAF >> 11) / 2**53


@given(*[st.lists(st.integers(-(2**70), 2**70), max_size=4)] * 2)
def test_stream_keys_differ_when_streams_do(a: list[int], b: list[int]) -> None:
    assert (stream_key(a) == stream_key(b)) == (a == b)


@settings(max_examples=60, deadline=None)
@given(st.text(LETTERS, max_size=25), st.lists(st.text(LETTERS, min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_matcher_fires_at_the_first_token_that_completes_a_string(text: str, stops: list[str]) -> None:
    """Each token is a byte: every character beyond ASCII takes several."""
    tokenizer = byte_tokenizer()
    matcher = StopMatcher(tokenizer, stops)
    fired = [matcher.push(token) for token in tokenizer(text)["input_ids"]]
    assert len(fired) == len(text.encode())
    ends = [len(text[: text.find(s) + len(s)].encode()) for s in stops if s in text]
    assert fired.index(True) == min(ends) - 1 if ends else not any(fired)


def test_stop_matcher_sees_spaces_that_a_tokenizer_drops_at_the_start() -> None:
    """As sentencepiece decodes: the space before the first word disappears."""

    def decode(ids: list[int], **_: object) -> str:
        return "".join((" one", " two", " END", ".")[i] for i in ids).removeprefix(" ")

    matcher = StopMatcher(SimpleNamespace(decode=decode), [" END"])
    assert [matcher.push(i) for i in (2, 0, 1, 3, 2)] == [False, False, False, False, True]
