"""Pictures in prompts: logits, scores, gradients and samples are those of the whole model on pixels."""

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_models import END_ID
from tiny_vision import (
    FAMILIES,
    IMAGE_ID,
    QWEN,
    SEEING,
    picture,
    tiny_processor,
    tiny_vision,
    vision_folder,
    vision_tokenizer,
)
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForImageTextToText, Idefics3Processor

from covey.errors import ConfigError, DataError, ModelError
from covey.pytorch.engine import Engine
from covey.pytorch.models import pictures as albums
from covey.pytorch.policy import Policy
from covey.rollout.packing import count_tokens, pack_episodes
from covey.tasks.pictures import Picture, read_picture
from covey.types import PICTURES, Episode, Request, SamplingSettings
from fakes import raises

WORDS = np.array([5, 6, IMAGE_ID, 7, 8, IMAGE_ID, 9, 10])


@cache
def pictures(*seeds: int) -> list[Picture]:
    """Pictures of one tile and, of odd seeds, of several; they are held."""
    return [read_picture(picture(seed, 50 if seed % 2 else 20), "here") for seed in seeds]


def moved(policy: Policy) -> Policy:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return policy


def by_whole(policy: Policy, seen: Sequence[Picture], answer: NDArray[Any]) -> Tensor:
    """`[T]` log-probabilities of an answer to `WORDS` with pictures, by the checkpoint's own processor and forward."""
    album: Any = policy.album
    text = "".join(policy.tokenizer.convert_ids_to_tokens(WORDS.tolist()))
    how: dict[str, Any] = {"return_tensors": "pt", "add_special_tokens": False}
    inputs = album.processor(text=[text], images=[[one.open() for one in seen]], **how)
    ids = torch.cat([inputs.pop("input_ids"), torch.from_numpy(answer)[None]], 1)
    inputs.pop("attention_mask")
    if "mm_token_type_ids" in inputs:
        inputs["mm_token_type_ids"] = functional.pad(inputs["mm_token_type_ids"], (0, len(answer)))
    logits = album.whole(input_ids=ids, **inputs).logits[0, -len(answer) - 1 : -1]
    found: Tensor = logits.log_softmax(-1)[range(len(answer)), answer]
    return found


@pytest.mark.parametrize("name", SEEING)
@pytest.mark.slow
def test_a_group_with_pictures_is_scored_as_the_whole_model_does(name: str, tmp_path: Path) -> None:
    policy = moved(Policy.load(vision_folder(name, tmp_path / "model"), lora_r=2))
    album: Any = policy.album
    rng = np.random.default_rng(0)
    seen = [pictures(0, 1)] * 3 + [pictures(2, 0)] * 3 + [pictures(2, 1)]  # the last: other picture, same words
    answers = [rng.integers(4, 90, length) for length in (6, 3, 8, 6, 3, 8)]
    answers.append(answers[0])
    episodes = []
    for own, answer in zip(seen, answers, strict=True):
        ids = np.concatenate([album.expand(WORDS, own), answer])
        sampled = np.arange(len(ids)) >= len(ids) - len(answer)
        episodes.append(Episode(ids, sampled, np.zeros(len(ids), np.float32), "", "stop", 0))
    (pack,) = pack_episodes(episodes, tokens_per_pack=10_000)
    counted = count_tokens(episodes, range(7), pack.num_tokens)
    prompts = [len(e.token_ids) - e.num_sampled for e in episodes]
    assert counted.computed == pack.num_tokens < sum(prompts[::3]) + sum(map(len, answers))
    assert album.passes == 0  # nothing was asked of the tower

    advantages = torch.tensor([1.0, -0.5, 0.7, 0.3, -1.0, 0.2, 0.9])
    assert policy.held.fused is not None
    logp = policy.score(pack).logp[torch.from_numpy(pack.pair)]
    (-logp * advantages[torch.from_numpy(pack.rows[pack.row])]).sum().backward()
    ours = {key: p.grad.clone() for key, p in policy.named_trainable_parameters() if p.grad is not None}
    assert album.passes == 3  # pictures 0, 1 and 2, once each
    policy.model.zero_grad()
    own = [by_whole(policy, pictures_, answer) for pictures_, answer in zip(seen, answers, strict=True)]
    for row, expected in enumerate(own):
        got = logp.detach()[torch.from_numpy(pack.rows[pack.row] == row)]
        assert (got - expected.detach()).abs().max() < 5e-6
    assert (own[0] - own[-1]).abs().max() > 1e-3
    (-torch.stack([(a * lp.sum()) for a, lp in zip(advantages, own, strict=True)]).sum()).backward()
    for key, parameter in policy.named_trainable_parameters():
        grad: Any = parameter.grad
        assert (ours[key] - grad).norm() < 1e-5 * grad.norm() + 1e-9
    assert not any(p.grad is not None for part in album.tower for p in part.parameters())

    for runner in ("fast", "general"):
        engine = Engine(policy.model, policy.tokenizer, runner=runner, max_batch_size=16)
        engine.publish(policy.weights(0))
        requests = [Request(album.expand(WORDS, own), (0, n, s)) for n, own in enumerate(seen[2:4]) for s in range(3)]
        said = engine(requests, SamplingSettings(max_tokens=5, eos_token_ids=(END_ID,)), policy_version=0)
        assert engine.last_stats.prefill_tokens < 3 * len(requests[0].token_ids)
        for number, completion in enumerate(said):
            if IMAGE_ID in completion.token_ids:  # the whole model counts it as a place without a vector, and fails
                continue
            expected = by_whole(policy, seen[2:4][number // 3], completion.token_ids).detach()
            assert np.abs(completion.logprobs - expected.numpy()).max() < 5e-6
    assert album.passes == 3


@pytest.mark.parametrize("name", QWEN)
@pytest.mark.slow
def test_positions_of_any_prompt_are_the_checkpoints_own(name: str, tmp_path: Path) -> None:
    """Pictures first, last and alone, text alone; through the fused layers, the model's own layers and padded rows; the
    checkpoint is loaded by itself, and its own state is stale.
    """
    folder = vision_folder(name, tmp_path / "model")
    whole: Any = AutoModelForImageTextToText.from_pretrained(folder).eval()
    policy = Policy.load(folder, use_peft=False)
    album: Any = policy.album
    seen = [read_picture(picture(n, *size), "here") for n, size in enumerate(((20, 14), (12, 60), (60, 12)))]
    prompts = [([IMAGE_ID, 5, 6], [0]), ([5, IMAGE_ID], [1]), ([IMAGE_ID], [2]), ([7, 8], []), ([5, IMAGE_ID, 6], [1])]
    prompts.append(([5, IMAGE_ID, 6, IMAGE_ID, 7, IMAGE_ID], [1, 2, 1]))
    answer = np.array([11, 12, 13, 14])
    episodes, truth = [], []
    whole.model.rope_deltas = torch.tensor([[-77]])  # of whatever ran before
    for words, numbers in prompts:
        own = [seen[number] for number in numbers]
        ids = np.concatenate([album.expand(np.array(words), own), answer])
        episodes.append(
            Episode(ids, np.arange(len(ids)) >= len(ids) - 4, np.zeros(len(ids), np.float32), "", "stop", 0)
        )
        narrow = torch.from_numpy(album.placeholders(ids))[None]
        told: Any = {}
        if own:
            pixels = [album._pixels(one) for one in own]
            told = {key: torch.cat([one[key] for one in pixels]) for key in pixels[0]}
            told["mm_token_type_ids"] = (narrow == IMAGE_ID).long()
        with torch.no_grad():
            logits = whole(input_ids=narrow, **told, use_cache=False).logits[0, -5:-1].log_softmax(-1)
        truth.append(logits[range(4), answer])
    (pack,) = pack_episodes(episodes, tokens_per_pack=10_000)
    fused = Policy.load(folder, lora_r=2)
    fused.album.expand(np.array([IMAGE_ID] * 3), seen)  # type: ignore[union-attr]
    assert policy.held.fused is None
    assert fused.held.fused is not None
    padded = Policy.load(folder, lora_r=2, prefix_sharing=False)
    padded.album.expand(np.array([IMAGE_ID] * 3), seen)  # type: ignore[union-attr]
    for each in (policy, fused, padded):
        with torch.no_grad():
            logp = each.score(pack).logp[torch.from_numpy(pack.pair)]
        for row, expected in enumerate(truth):
            got = logp[torch.from_numpy(pack.rows[pack.row] == row)]
            assert (got - expected).abs().max() < 5e-6


def test_a_picture_with_too_many_rows(tmp_path: Path) -> None:
    album: Any = Policy.load(vision_folder("qwen2_vl", tmp_path / "model")).album
    album.options = {"size": {"shortest_edge": 64, "longest_edge": 1 << 20}}
    long = read_picture(picture(0, 24, 8 * 600), "here")
    raises(DataError, "600 places on a side, more than 512; make it smaller", album.open, long)
    line = read_picture(picture(0, 8, 8 * 600), "here")
    raises(DataError, "8 x 4,800 pixels: .* aspect ratio must be smaller than 200", album.open, line)


def test_ids_come_from_content(tmp_path: Path) -> None:
    folder = vision_folder("smolvlm", tmp_path / "model")
    first, second = (Policy.load(folder).album for _ in range(2))
    assert first is not None
    assert second is not None
    (one, other), (again,) = pictures(0, 2), pictures(0)
    ids = first.expand(WORDS, [one, other])
    assert (ids == second.expand(WORDS, [again, other])).all()
    assert ids.dtype == np.int64
    assert ((ids >= PICTURES) == (first.placeholders(ids) == IMAGE_ID)).all()
    places = ids[ids >= PICTURES]
    assert len(places) == len(set(places.tolist())) == 40  # 4 tiles and the whole, 4 places each
    second.__dict__.pop("_settings")
    second.options = {"do_image_splitting": False}
    assert set(places.tolist()).isdisjoint(second.open(one).tolist())  # other settings make other pictures of it
    assert first.unknown(second.open(one))
    assert not first.unknown(ids)


def test_vectors_that_are_dropped_are_made_again_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy.load(vision_folder("llava", tmp_path / "model"))
    album: Any = policy.album
    ids = torch.from_numpy(album.expand(WORDS, pictures(0, 2)))
    before = album.rows(ids[ids >= PICTURES])
    assert album.passes == 2
    monkeypatch.setattr(albums, "_KEPT_BYTES", 1)
    album.expand(WORDS, pictures(4, 0))
    album._vectors.clear()
    assert torch.equal(album.rows(ids[ids >= PICTURES]), before)
    assert torch.equal(album.rows(ids[ids >= PICTURES]), before)
    assert album.passes == 2 + 2 + 2


def test_a_place_that_nobody_knows_is_an_error(tmp_path: Path) -> None:
    policy = Policy.load(vision_folder("llava", tmp_path / "model"))
    album: Any = policy.album
    album.expand(WORDS, pictures(0, 2))
    with pytest.raises(ModelError, match="of no picture that is open"):
        policy.model(input_ids=torch.tensor([[5, PICTURES | 7 << 14]]))


def test_a_sampled_placeholder_is_a_word(tmp_path: Path) -> None:
    """What the policy writes has no picture behind it: sampler and trainer both read the token's own embedding."""
    policy = Policy.load(vision_folder("smolvlm", tmp_path / "model"))
    album: Any = policy.album
    prompt = album.expand(WORDS, pictures(0, 2))
    only = ((IMAGE_ID, IMAGE_ID, 5),)
    engine = Engine(policy.model, policy.tokenizer)
    engine.publish(policy.weights(0))
    (said,) = engine([Request(prompt, choices=only)], SamplingSettings(max_tokens=3), policy_version=0)
    assert said.token_ids.tolist() == list(only[0])
    ids = np.concatenate([prompt, said.token_ids])
    with torch.no_grad():
        logits = policy.model(input_ids=torch.from_numpy(ids)[None]).logits
    assert torch.isfinite(logits).all()


def test_the_processor_of_smolvlm_needs_no_packages_for_video(tmp_path: Path) -> None:
    folder = vision_folder("smolvlm", tmp_path / "model")
    file = folder / "processor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"processor_class": "SmolVLMProcessor"}))
    album: Any = Policy.load(folder).album
    assert isinstance(album.processor, Idefics3Processor)
    assert len(album.expand(WORDS, pictures(1, 0))) == 61
    album.save_processor(tmp_path)
    assert json.loads((tmp_path / file.name).read_text())["processor_class"] == "SmolVLMProcessor"


@pytest.mark.parametrize("built", [True, False])
def test_a_saved_processor_has_the_options(built: bool, tmp_path: Path) -> None:
    """So a model that is served from its folder sees pictures as in training."""
    folder = vision_folder("smolvlm", tmp_path / "model")
    if built:
        album: Any = Policy.load(tiny_vision("smolvlm"), tiny_processor("smolvlm")).album  # type: ignore[arg-type]
    else:
        album = Policy.load(folder).album
    assert len(album.expand(WORDS, pictures(1, 0))) == 61
    album.options = {"do_image_splitting": False, "size": {"longest_edge": 32}}
    album.save_processor(other := Path(shutil.copytree(folder, tmp_path / "other")))
    again: Any = Policy.load(other).album
    assert len(again.expand(WORDS, pictures(1, 0))) < 30


def test_a_built_model_comes_with_its_processor() -> None:
    policy = Policy.load(tiny_vision("llava"), tiny_processor("llava"))  # type: ignore[arg-type]
    album: Any = policy.album
    assert int((album.expand(WORDS, pictures(0, 1)) >= PICTURES).sum()) == 32


@pytest.mark.parametrize("fused", [True, False])
def test_a_policy_that_computes_something_else_is_found(fused: bool) -> None:
    """With text it would not be: what Qwen3-VL adds behind its first layers is missing in training alone."""
    policy = Policy.load(tiny_vision("qwen3_vl"), tiny_processor("qwen3_vl"), fused_layers=fused)  # type: ignore
    album: Any = policy.album
    assert (policy.fused_obstacle is None) == fused
    scores, deep = album.scores, album.deep

    def without(pack: Any) -> Any:
        album.deep = lambda ids: None
        try:
            return scores(pack)
        finally:
            album.deep = deep

    album.scores = without
    raises(ModelError, "with a picture, the model's own code computes something else", album.check)
    album.scores = scores
    album.check()


def test_what_is_refused(tmp_path: Path) -> None:
    for name in FAMILIES:
        if name not in SEEING:
            album: Any = Policy.load(tiny_vision(name), vision_tokenizer()).album
            album.__dict__["processor"] = tiny_processor("llava")
            raises(ModelError, f"of a {name} model text is read here; .* smolvlm, idefics3, llava, qwen2_vl",
                   album.expand, WORDS, pictures(0, 1))  # fmt: skip
    album = Policy.load(vision_folder("llava", tmp_path / "model")).album
    raises(DataError, "2 times '<image>' for 1 pictures", album.expand, WORDS, pictures(0))
    for wrong, fix in (("pixels_max", "use one of crop_size"), ("do_resizing", "did you mean 'do_resize'")):
        album.options = {wrong: 1}
        words = f"data.processor_kwargs: the processor takes no '{wrong}'; {fix}"
        raises(ConfigError, words, album.expand, WORDS, pictures(0, 1))
    album.options = {"size": "large"}
    raises(
        ConfigError, r"data.processor_kwargs=\{'size': 'large'\}: the processor", album.expand, WORDS, pictures(0, 1)
    )
    for options, words in (({"sise": 1}, "did you mean 'size'"), ({"return_tensors": "np"}, "return_tensors")):
        album.options = options
        raises(ConfigError, f"data.processor_kwargs.*{words}", album.expand, WORDS, pictures(0, 1))
    adapted = Policy.load(tmp_path / "model", lora_r=2, lora_target_modules=["q_proj", "embed_tokens"]).album
    words = "model.lora_target_modules: an adapter of the embedding knows words alone"
    raises(ConfigError, words, adapted.expand, WORDS, pictures(0, 1))
    for file in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / "model" / file).unlink(missing_ok=True)
    album = Policy.load(tmp_path / "model").album
    raises(ModelError, "its processor cannot be loaded .*; save it beside", album.expand, WORDS, pictures(0, 1))
