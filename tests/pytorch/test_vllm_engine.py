"""vLLM in this process, where it is installed (`make test-vllm`): it samples from what was published, and says so."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import assert_plain, finish, texts
from tiny_models import VOCAB_SIZE, tiny_tokenizer, with_lora
from tiny_vision import IMAGE_ID, picture, tiny_processor, vision_folder
from transformers import LlamaConfig, LlamaForCausalLM

from covey import GRPOConfig, GRPOTrainer
from covey.config.sampling import VLLMConfig
from covey.errors import ConfigError, GenerationError, ModelError
from covey.observe.run_folder import RunFolder
from covey.pytorch.engine import Engine
from covey.pytorch.engine.merge import weights_of
from covey.pytorch.engine.vllm_engine import VLLMEngine
from covey.pytorch.policy import Policy
from covey.tasks.pictures import read_picture
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


def seeing_folder(name: str, folder: Path) -> str:
    """A vision model whose heads are as wide, and what vLLM asks of a processor for video."""
    vision_folder(name, folder, head=32, tied=name == "qwen2_5_vl")
    if name == "qwen2_5_vl":
        settings: Any = tiny_processor(name).image_processor  # type: ignore[attr-defined]
        told = settings.to_dict() | {"video_processor_type": "Qwen2VLVideoProcessor"}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(told))
    return str(folder)


@pytest.fixture(scope="module", params=["idefics3", "qwen2_5_vl"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Policy, VLLMEngine]:
    """A policy that reads pictures and vLLM with its adapter, or with the merged weights."""
    name = request.param
    if name == "qwen2_5_vl" and find_spec("torchvision") is None:
        pytest.skip("vLLM reads this family with torchvision")
    policy = Policy.load(seeing_folder(name, tmp_path_factory.mktemp("vision") / "model"), lora_r=2)
    asked: Any = {"size": {"longest_edge": 32}} if name == "idefics3" else {"do_normalize": False}
    policy.album.options = asked  # type: ignore[union-attr]
    chosen = VLLMConfig(llm_arguments={"enforce_eager": True, "max_model_len": 256, "enable_lora": name == "idefics3"})
    more = {"folder": policy.folder, "kv_cache_bytes": 64 << 20, "logprobs_mode": "processed_logprobs"}
    return policy, VLLMEngine(policy.model, policy.tokenizer, dtype=torch.float32, options=chosen, **more)


def test_pictures_are_seen_as_the_own_engine_sees_them(
    seeing: tuple[Policy, VLLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In prompts and in what is said later, with every version; where vLLM expands otherwise, nothing is sampled."""
    policy, engine = seeing
    album: Any = policy.album
    around = [np.array(ids) for ids in ([99], [100])] if "qwen" in album.whole.config.model_type else []
    one, two, three = (read_picture(picture(*how), "here") for how in ((0,), (1, 50), (2, 40, 50)))

    def asked(words: list[int], seen: list[Any]) -> Any:
        each = [
            np.concatenate([*around[:1], album.expand(np.array([IMAGE_ID]), [shown]), *around[1:]]) for shown in seen
        ]
        return np.concatenate([words, *each, words])

    prompts = [asked([5, 6], [one]), asked([8], [two, three]), asked([4, 7], [one, one]), asked([9, 5, 6], [])]
    given = [Request(ids, (0, place)) for place, ids in enumerate(prompts)]
    own, greedy = Engine(policy.model), SamplingSettings(temperature=0, max_tokens=10)
    for version in (3, 4):
        change(policy.model, version)
        for each in (own, engine):
            each.publish(policy.weights(version))
        ours, theirs = (each(given, greedy, policy_version=version) for each in (own, engine))
        assert texts(ours) == texts(theirs)
        assert max(np.abs(a.logprobs - b.logprobs).max() for a, b in zip(ours, theirs, strict=True)) < 1e-4
    session = engine.session(greedy, policy_version=4, rows=1, own_tokens=200, prompt_lengths=[len(prompts[0])])
    row = session.start(given[0], keep=True)
    finish(session)
    session.extend(row, asked([11], [two]), (1,))
    history = row.history()
    (said,) = own([Request(history, (0,))], greedy, policy_version=4)
    assert texts([finish(session)[id(row)]]) == texts([said])
    assert session.room_for_turn(row, 3) == 10
    row.own[-1] = IMAGE_ID  # the policy says that there is a picture
    assert session.room_for_turn(row, 3) == 0
    session.drop(row)
    collapse = album.collapse
    monkeypatch.setattr(album, "collapse", lambda ids: (collapse(ids)[0], collapse(ids)[1][:1]))
    words = "vLLM made .* tokens of a prompt, .* of them places of pictures, that the policy reads as"
    raises(GenerationError, words, engine, given[1:2], greedy, policy_version=4)
    monkeypatch.setattr(album, "collapse", lambda ids: (collapse(ids)[0][:1], collapse(ids)[1]))
    raises(GenerationError, "vLLM refuses a prompt", engine, given[1:2], greedy, policy_version=4)


def test_a_processor_of_which_vllm_has_another_or_none(tmp_path: Path) -> None:
    folder, processor = seeing_folder("idefics3", tmp_path), tiny_processor("idefics3")
    tiles: Any = processor.image_processor  # type: ignore[attr-defined]
    tiles.image_mean = [0.1, 0.5, 0.5]
    more = {"folder": folder, "dtype": torch.float32, "kv_cache_bytes": 64 << 20, "logprobs_mode": "processed_logprobs"}

    def start(words: str, policy: Policy) -> None:
        given = VLLMConfig(llm_arguments={"max_model_len": 256})
        raises(ConfigError, words, VLLMEngine, policy.model, policy.tokenizer, options=given, **more)

    start(
        "has another .*image_mean than the one that vLLM reads from .*; pass that one", Policy.load(folder, processor)
    )
    policy: Any = Policy.load(folder)
    policy.album.options = {"return_tensors": "np"}
    start("processor_kwargs={'return_tensors': 'np'}: the processor cannot read a picture with them", policy)
    policy.album.options = {}
    (tmp_path / "processor_config.json").unlink()
    start("vLLM does not start: OSError: Can't load image processor", policy)


def test_a_run_on_pictures(tmp_path: Path) -> None:
    def variety(completions: list[Any], images: list[Any], **_: Any) -> list[float]:
        assert all(len(each) == 1 for each in images)
        return [float(len(set(done[0]["content"]))) for done in completions]

    changed = {"num_generations": 4, "prompts_per_step": 2, "max_completion_length": 8, "max_steps": 2}
    changed |= {"learning_rate": 1e-2, "engine": "vllm", "kv_cache_gb": 0.1, "progress": False, "report_to": ()}
    changed |= {"llm_arguments": {"enforce_eager": True, "max_model_len": 256}}
    asked = [{"role": "user", "content": "What?"}]
    rows = [{"prompt": asked, "images": [picture(seed, 50 if seed % 2 else 20)]} for seed in range(4)]
    args = GRPOConfig(output_dir=str(tmp_path / "run"), **changed)
    trainer = GRPOTrainer(seeing_folder("idefics3", tmp_path / "model"), variety, args, rows)
    trainer.train()
    records = [one for one in trainer.state.log_history if "loss" in one]
    assert len(records) == 2
    assert max(one["sampling/sampling_logp_difference/max"] for one in records) < 2e-5


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
