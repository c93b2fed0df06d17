"""vLLM in this process, where it is installed (`make test-vllm`): it samples from what was published, and says so."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import assert_plain, finish, texts
from tiny_models import VOCAB_SIZE, tiny_tokenizer, with_lora
from transformers import LlamaConfig, LlamaForCausalLM

from covey import GRPOConfig, GRPOTrainer
from covey.config.sampling import VLLMConfig
from covey.errors import ConfigError, GenerationError, ModelError
from covey.observe.run_folder import RunFolder
from covey.pytorch.engine import Engine
from covey.pytorch.engine.merge import weights_of
from covey.pytorch.engine.vllm_engine import VLLMEngine
from covey.types import Request, SamplingSettings
from fakes import raises

pytest.importorskip("vllm", reason="vLLM is not installed here: see make test-vllm")

MODEL = os.environ.get("COVEY_VLLM_MODEL")
pytestmark = pytest.mark.filterwarnings("ignore")
PROMPTS = [[5, 9, 12, 7], [8, 4, 6], [5, 9, 12, 7]]


def whole() -> Any:
    """A tiny model whose heads are as wide as vLLM's attention on CPUs wants them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
        more = {"num_hidden_layers": 2, "max_position_embeddings": 128, "vocab_size": VOCAB_SIZE}
        return LlamaForCausalLM(LlamaConfig(**sizes, **more, initializer_range=0.3)).eval()


def requests(seed: int = 0) -> list[Request]:
    return [Request(np.array(ids), (seed, place)) for place, ids in enumerate(PROMPTS)]


def build(model: Any, **options: Any) -> VLLMEngine:
    chosen = VLLMConfig(llm_arguments={"enforce_eager": True, "max_model_len": 64, **options})
    more = {"folder": None, "kv_cache_bytes": 64 << 20, "logprobs_mode": "processed_logprobs"}
    return VLLMEngine(model, tiny_tokenizer(), dtype=torch.float32, options=chosen, **more)


@pytest.fixture(scope="module", params=["adapter", "merged", "whole"])
def both(request: pytest.FixtureRequest) -> Iterator[tuple[Any, VLLMEngine]]:
    """A model and the vLLM that was made from it; each is changed and published by the tests."""
    model = whole() if request.param == "whole" else with_lora(whole())
    engine = build(model, enable_lora=request.param != "merged")
    engine.publish(weights_of(model, 0))
    yield model, engine
    engine.close()


def change(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_each_version_is_sampled_from_what_was_published(both: tuple[Any, VLLMEngine], temperature: float) -> None:
    model, engine = both
    settings = SamplingSettings(max_tokens=12, temperature=temperature)
    for version in (3, 4):
        change(model, version)
        engine.publish(weights_of(model, version))
        found = engine(requests(version), settings, policy_version=version)
        assert {completion.policy_version for completion in found} == {version}
        assert_plain(model, requests(version), found, temperature, atol=2e-4)
    raises(GenerationError, "policy_version=3", engine, requests(), settings, policy_version=3)


def test_greedy_tokens_are_those_of_the_own_engine_and_end_where_they_are_to(both: tuple[Any, VLLMEngine]) -> None:
    model, engine = both
    engine.publish(weights_of(model, 8))
    own = Engine(model)
    own.publish(weights_of(model, 8))
    greedy = SamplingSettings(temperature=0, max_tokens=12)
    ours, theirs = (one(requests(), greedy, policy_version=8) for one in (own, engine))
    assert texts(ours) == texts(theirs)
    assert {(c.finish_reason, len(c.token_ids)) for c in (*ours, *theirs)} == {("length", 12)}
    ends = tuple(int(c.token_ids[3]) for c in theirs)
    stopped = engine(requests(), replace(greedy, eos_token_ids=ends), policy_version=8)
    assert all(c.finish_reason == "stop" and c.token_ids[-1] in ends and len(c.token_ids) <= 4 for c in stopped)


def test_a_call_repeats_and_leaves_torchs_generator_alone(both: tuple[Any, VLLMEngine]) -> None:
    model, engine = both
    engine.publish(weights_of(model, 9))
    settings = SamplingSettings(max_tokens=12)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (engine(requests(seed), settings, policy_version=9) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert texts(first) == texts(again) != texts(other)
    assert len(set(map(bytes, (c.token_ids.tobytes() for c in first)))) > 1


def test_turns(both: tuple[Any, VLLMEngine]) -> None:
    model, engine = both
    engine.publish(weights_of(model, 11))
    settings = SamplingSettings(max_tokens=5)
    session = engine.session(settings, policy_version=11, rows=3, own_tokens=40, prompt_lengths=[4, 3, 4])
    rows = [session.start(request, keep=True) for request in requests()]
    histories = [list(ids) for ids in PROMPTS]
    for number in range(3):
        answers = finish(session)
        for row, history in zip(rows, histories, strict=True):
            completion = answers[id(row)]
            assert_plain(model, [Request(np.array(history), (0,))], [completion], atol=2e-4)
            history += completion.token_ids.tolist()
            assert row.history().tolist() == history
        for place, (row, history) in enumerate(zip(rows, histories, strict=True)):
            said = np.array([11, 12, 13][: 1 + (place + number) % 3])
            session.extend(row, said, (place, number))
            history += said.tolist()
    assert len(finish(session)) == 3
    for row in rows:
        session.drop(row)
    assert not session.busy


def test_what_it_refuses(both: tuple[Any, VLLMEngine]) -> None:
    model, engine = both
    engine.publish(weights_of(model, 12))
    with pytest.raises(GenerationError, match="64"):
        engine([Request(np.arange(4, 74), (0,))], SamplingSettings(max_tokens=4), policy_version=12)
    with pytest.raises(GenerationError, match="keep_sampling_mask"):
        engine(requests(), SamplingSettings(keep_support=True), policy_version=12)
    engine.release()
    raises(GenerationError, "no weights", engine, requests(), SamplingSettings(), policy_version=12)
    engine.publish(weights_of(model, 13))
    assert len(engine(requests(), SamplingSettings(max_tokens=2), policy_version=13)) == 3


def test_an_adapter_that_vllm_holds_otherwise_is_not_sampled_from(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_lora(whole())
    engine = build(model, enable_lora=True)
    engine.publish(weights_of(model, 1))
    write = type(weights_of(model, 1).adapter).write

    def otherwise(self: Any, folder: Path) -> None:
        other = with_lora(whole())
        change(other, 1)
        write(weights_of(other, 1).adapter, folder)

    monkeypatch.setattr(type(weights_of(model, 1).adapter), "write", otherwise)
    raises(ModelError, "with other numbers", engine.publish, weights_of(model, 2))
    assert engine.policy_version == -1


def test_a_start_that_fails_says_why() -> None:
    raises(ConfigError, r"vLLM does not start: .*(memory|max_model_len)", build, whole(), max_model_len=1 << 20)


@pytest.mark.skipif(MODEL is None, reason="a real model: see make test-vllm")
def test_five_steps_of_the_demo(tmp_path: Path) -> None:
    """The reward of its fifth step is above that of its first; the two programs' log-probabilities agree."""
    changes = [f"model.model={MODEL}", "sampling.engine=vllm", "schedule.max_steps=5", f"run.output_dir={tmp_path}/run"]
    changes += ["evaluation.eval_on_start=false", "evaluation.eval_at_end=false", "data.prompts_per_step=8"]
    recipe = Path(__file__).parents[3] / "recipes/arithmetic/recipe.toml"
    GRPOTrainer(args=GRPOConfig.from_toml(recipe, changes)).train()
    records = [one for one in RunFolder.read(tmp_path / "run").read_metrics() if "reward" in one]
    assert len(records) == 5
    assert np.mean([one["reward"] for one in records[3:]]) > records[0]["reward"]
    assert all(one["sampling/sampling_logp_difference/mean"] < 1e-3 for one in records)
