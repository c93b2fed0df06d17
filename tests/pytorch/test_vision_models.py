"""The language half of vision models: the whole model's own numbers on text, and files that fit the whole model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from tiny_models import END_ID
from tiny_vision import FAMILIES, tiny_vision, vision_folder
from torch import Tensor
from transformers import AutoModelForImageTextToText

from covey.errors import ConfigError, ModelError
from covey.pytorch.engine import Engine
from covey.pytorch.footprint import Shape, empty_model
from covey.pytorch.models.loading import load_model
from covey.pytorch.models.saving import load_merged, save_model, write_gguf
from covey.pytorch.policy import Policy
from covey.types import Request, SamplingSettings
from fakes import raises

WORDS = torch.tensor([[*range(5, 30), 4, 4, 90, 96]])


@torch.no_grad()
def logits(model: torch.nn.Module) -> Tensor:
    found: Tensor = model(input_ids=WORDS).logits
    return found


def moved(policy: Policy) -> Policy:
    """A policy whose trained weights are others than at the start."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return policy


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.slow
def test_text_of_a_vision_model(name: str, tmp_path: Path) -> None:
    folder = vision_folder(name, tmp_path / "model", tied=name in ("smolvlm", "qwen3_vl"))
    whole = AutoModelForImageTextToText.from_pretrained(folder).eval()
    policy = Policy.load(folder, lora_r=2)
    assert policy.prefix_sharing_obstacle is None
    assert policy.fused_obstacle is None
    assert (logits(policy.model) - logits(whole)).abs().max() < 2e-5
    names = [key for key, _ in policy.named_trainable_parameters()]
    assert len(names) == 2 * 7 * 2  # A and B, seven linear maps, two layers: none in the tower
    shape = Shape.of(empty_model(str(folder), dtype="float32", r=2))
    assert (shape.layers, shape.trained) == (2, sum(p.numel() for p in policy.trainable_parameters()))

    policy = moved(policy)
    engine = Engine(policy.model, policy.tokenizer)
    assert engine.runner == "fast"
    engine.publish(policy.weights(0))
    ids = WORDS[0].numpy().astype(np.int64)
    (said,) = engine([Request(ids)], SamplingSettings(max_tokens=6, eos_token_ids=(END_ID,)), policy_version=0)

    policy.save_pretrained(tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(whole, tmp_path / "adapter")
    adapted = [key for key, _ in theirs.named_parameters() if ".lora_" in key]
    assert len(adapted) == len(names)
    assert not [key for key in adapted if "vision" in key or "visual" in key]
    assert (logits(theirs) - logits(policy.model)).abs().max() < 2e-5
    both = torch.from_numpy(np.concatenate([ids, said.token_ids]))[None]
    with torch.no_grad():
        own = theirs(input_ids=both).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    assert np.abs(own[range(len(said.token_ids)), said.token_ids].numpy() - said.logprobs).max() < 2e-5

    again = Policy.load(folder, adapter=tmp_path / "adapter")
    assert torch.equal(logits(again.model), logits(policy.model))
    save_model(load_merged(str(folder), tmp_path / "adapter"), tmp_path / "merged")
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").eval()
    assert (logits(merged) - logits(policy.model)).abs().max() < 2e-5


@pytest.mark.parametrize("name", ["smolvlm", "qwen2_5_vl", "gemma3"])
def test_all_weights_of_the_half(name: str, tmp_path: Path) -> None:
    whole = tiny_vision(name)
    before = {key: tensor.clone() for key, tensor in whole.state_dict().items()}
    folder = vision_folder(name, tmp_path / "model")
    policy = moved(Policy.load(folder, use_peft=False))
    policy.save_pretrained(tmp_path / "trained")
    assert names_in(tmp_path / "trained") == names_in(folder)
    trained = AutoModelForImageTextToText.from_pretrained(tmp_path / "trained").eval()
    assert (logits(trained) - logits(policy.model)).abs().max() < 2e-5
    text = policy.album.prefix  # type: ignore[union-attr]
    for key, tensor in trained.state_dict().items():
        assert torch.equal(tensor, before[key]) != (key.startswith(text) or key == "lm_head.weight"), key


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def test_a_conversation_reaches_a_template_that_knows_parts_alone(tmp_path: Path) -> None:
    tokenizer = Policy.load(vision_folder("smolvlm", tmp_path / "model")).tokenizer
    asked = [{"role": "user", "content": "What?"}]
    told = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert told == "<|im_start|>user:What?<|im_end|>\n<|im_start|>assistant:"
    asked[0]["content"] = [{"type": "image"}, {"type": "text", "text": "What?"}]  # type: ignore[assignment]
    assert tokenizer.apply_chat_template(asked, tokenize=False) == "<|im_start|>user:<image>What?<|im_end|>\n"


def test_names_of_the_tower_are_no_targets(tmp_path: Path) -> None:
    folder = vision_folder("llava", tmp_path / "model")
    for names in (["fc1"], ["q_proj", "fc1"], "vision_tower.*", "multi_modal_projector.linear_1"):
        raises(ConfigError, "model.lora_target_modules=", Policy.load, folder, lora_target_modules=names)
    words = "the language half, which alone is trained, has no fc1, fc2"
    raises(ConfigError, words, Policy.load, folder, lora_target_modules=["fc2", "q_proj", "fc1"])


def test_what_a_tower_takes_is_counted(tmp_path: Path) -> None:
    whole = tiny_vision("llava")
    folder = vision_folder("llava", tmp_path / "model")
    parts = (whole.model.vision_tower, whole.model.multi_modal_projector)
    assert Shape.of(empty_model(str(folder), dtype="float32", r=2)).tower == sum(
        parameter.numel() for part in parts for parameter in part.parameters()
    )


def test_a_vision_model_is_not_written_as_gguf(tmp_path: Path) -> None:
    loaded = load_model(vision_folder("llava", tmp_path / "model"))
    words = "a vision model is not written as GGUF; export a Hugging Face folder"
    raises(ModelError, words, write_gguf, loaded, tmp_path / "model.gguf", "float32")
