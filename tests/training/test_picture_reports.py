"""What public issues of other libraries tell of pictures in GRPO, each tried here.

| reported | tried in |
| -------- | -------- |
| a sampled placeholder ends the run (R1-V#91, trl#3847, EasyR1#110) | `test_a_sampled_placeholder_is_trained_on` |
| padding on the wrong side (trl#5785) | `test_pictures`: rows of different lengths are scored as the whole model does |
| truncation cuts pictures (trl#3879, #4153, #5023; verl#856) | `test_picture_rows`: dropped and never cut |
| several pictures a row are split wrongly (trl#4488, #4169, #6570) | `test_rows_with_none_to_three_pictures` |
| accumulation cuts patches in the wrong place (trl#6650) | `test_rows_with_none_to_three_pictures` |
| Gemma 3 wants `token_type_ids` for text too (trl#4142, #5643, #5807) | `test_gemma_3_is_trained_on_text` |
| sampler and trainer prepare pictures differently (verl#3428) | `test_the_processors_options_hold_everywhere` |
| base64 in logs, files kept twice (verl#7391, agent-lightning#441) | `test_the_processors_options_hold_everywhere` |
| each turn repeats placeholders (prime-rl#1877) | `test_places_do_not_grow_with_turns` |
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import END_ID
from tiny_vision import IMAGE_ID, picture, tiny_vision, vision_folder, vision_tokenizer

from covey import GRPOConfig, GRPOTrainer
from covey.pytorch.engine import Engine
from covey.pytorch.policy import Policy
from covey.rollout.packing import pack_episodes
from covey.tasks.dataset import build_prompts
from covey.tasks.pictures import read_picture
from covey.types import PICTURES, Episode, Request, SamplingSettings
from fakes import SMALL

ASKED = [{"role": "user", "content": "What?"}]


def variety(completions: Any, **columns: Any) -> list[float]:
    return [float(len(set(completion[0]["content"]))) for completion in completions]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(vision_folder("smolvlm", tmp_path_factory.mktemp("seen") / "model"))


def trained(model: Any, folder: Path, rows: list[dict[str, Any]], **more: Any) -> GRPOTrainer:
    settings = SMALL | {"output_dir": str(folder), "lr_scheduler_type": "constant", "report_to": ()} | more
    trainer = GRPOTrainer(model, variety, GRPOConfig(**settings), rows)
    trainer.train()
    return trainer


def largest_gap(trainer: GRPOTrainer) -> float:
    return max(r["sampling/sampling_logp_difference/max"] for r in trainer.state.log_history if "loss" in r)


def places(trainer: GRPOTrainer) -> list[int]:
    return [int((prompt.token_ids >= PICTURES).sum()) for prompt in trainer.prompts]


def test_a_sampled_placeholder_is_trained_on(model: str) -> None:
    """Sampler and trainer give it one log-probability, and its embedding is the vocabulary's."""
    policy = Policy.load(model, lora_r=2)
    album: Any = policy.album
    shown = read_picture(picture(0), "here")
    prompt = album.expand(np.array([5, IMAGE_ID, 7]), [shown])
    engine = Engine(policy.model, policy.tokenizer)
    engine.publish(policy.weights(0))
    asked = [Request(prompt, choices=((IMAGE_ID, 5, IMAGE_ID, END_ID),))]
    (said,) = engine(asked, SamplingSettings(max_tokens=4, eos_token_ids=(END_ID,)), policy_version=0)
    assert said.token_ids.tolist() == [IMAGE_ID, 5, IMAGE_ID, END_ID]
    ids = np.concatenate([prompt, said.token_ids])
    episode = Episode(ids, np.arange(len(ids)) >= len(prompt), np.zeros(len(ids), np.float32), "", "stop", 0)
    (pack,) = pack_episodes([episode], tokens_per_pack=1_000)
    policy.score(pack).logp.sum().backward()
    grads = [p.grad for p in policy.trainable_parameters() if p.grad is not None]
    assert grads
    assert all(torch.isfinite(grad).all() for grad in grads)


@pytest.mark.slow
def test_rows_with_none_to_three_pictures(model: str, tmp_path: Path) -> None:
    """Whatever the size of a pass, the weights after two steps are the same but for rounding."""
    rows = [{"prompt": ASKED, "images": [picture(seed) for seed in range(n, 2 * n)]} for n in range(4)]
    whole, cut = (
        trained(model, tmp_path / str(size), rows, prompts_per_step=4, tokens_per_micro_batch=size)
        for size in (4096, 24)
    )
    assert places(whole) == [0, 20, 40, 60]
    assert largest_gap(whole) < 1e-5
    for name, tensor in whole.policy.state_dict().items():
        assert (tensor - cut.policy.state_dict()[name]).abs().max() < 1e-4, name


def test_gemma_3_is_trained_on_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.pytorch.models.pictures.cached_file", None)  # a built model asks the hub for nothing
    trainer = GRPOTrainer(
        tiny_vision("gemma3"),
        variety,
        GRPOConfig(output_dir=str(tmp_path), **SMALL | {"max_steps": 1}),
        [{"prompt": ASKED}] * 4,
        processing_class=vision_tokenizer(),
    )
    before = {name: tensor.clone() for name, tensor in trainer.policy.state_dict().items()}
    trainer.train()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trainer.policy.state_dict().items())
    assert largest_gap(trainer) < 1e-4


def test_the_processors_options_hold_everywhere(model: str, tmp_path: Path) -> None:
    """A picture of four tiles and a whole is one tile for sampler, trainer and records alike; base64 is nowhere."""
    rows = [{"prompt": ASKED, "image": picture(seed, 50)} for seed in (1, 3)]
    trainer = trained(model, tmp_path / "run", rows, processor_kwargs={"do_image_splitting": False}, keep_batches=True)
    assert places(trainer) == [4, 4]
    assert largest_gap(trainer) < 1e-5
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    kept = {path for path in files if path.parent.name == "pictures"}
    assert len(kept) == 2
    marks = [b"iVBORw0K", *(path.read_bytes()[40:72] for path in kept)]
    for path in set(files) - kept:
        content = path.read_bytes()
        assert not [mark for mark in marks if mark in content], path


def test_places_do_not_grow_with_turns(model: str) -> None:
    """A conversation that is sent back has the places of its pictures once, and begins as the shorter one did."""
    policy = Policy.load(model)
    seen = [picture(seed) for seed in (0, 2, 4)]
    turns = [({"role": "user", "content": [{"type": "image", "image": one}, {"type": "text", "text": "?"}]},
              {"role": "assistant", "content": "A"}) for one in seen]  # fmt: skip
    told = [[message for turn in turns[:n] for message in turn][:-1] for n in (1, 2, 3)]
    prompts = build_prompts([{"prompt": messages} for messages in told], policy.tokenizer, album=policy.album)
    assert [int((prompt.token_ids >= PICTURES).sum()) for prompt in prompts] == [20, 40, 60]
    for shorter, longer in pairwise(prompts):
        assert (longer.token_ids[: len(shorter.token_ids)] == shorter.token_ids).all()
