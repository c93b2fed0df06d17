"""Pictures, films and sounds are refused by name before anything is trained: a model that reads text would ignore them.

What they may look like in a row is in `docs/models.md`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_models import tiny_model, tiny_tokenizer
from transformers import Idefics3Processor

import covey
from covey.errors import DataError, ModelError
from covey.pytorch.models.empty import empty_model
from covey.pytorch.models.loading import load_model
from covey.serving.chat import chat_text
from covey.serving.neutral import RequestError
from covey.tasks import build_prompts, load_rows
from covey.trl import GRPOConfig, GRPOTrainer
from covey.trl.loading import with_models
from fakes import FakeTokenizer

PICTURE = Image.new("RGB", (2, 2))
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "What is in the picture?"}]
PICTURES = {
    "PIL": PICTURE,
    "a list": [PICTURE],
    "several, the first missing": [None, PICTURE],
    "bytes": b"\x89PNG",
    "datasets' bytes": {"bytes": b"\x89PNG", "path": None},
    "datasets' path": {"bytes": None, "path": "a.png"},
    "an array": np.zeros((2, 2, 3), np.uint8),
    "pixels in lists": [[0, 255], [255, 0]],
    "numbers with a point": [0.5, 0.25],
    "a path": "photos/my cat.JPG",
    "an address": "https://example.org/cat",
    "a data URL": "data:image/png;base64,iVBORw0KGgo=",
    "base64": "iVBORw0KGgoAAAANSUhEUg==",
    "paths": ["a.png", "b.webp"],
}
NO_PICTURES = {
    "none": None,
    "an empty list": [],
    "a list of nothing": [None],
    "a container's name": "ubuntu:24.04",
    "words": "A cat sits on a mat. It looks at me.",
    "no word": "",
    "a number": 3,
    "ids": [3, 4],
    "datasets' empty picture": {"bytes": None, "path": None},
    "a description": {"caption": "a cat"},
}
FAMILIES = {
    "SmolVLMForConditionalGeneration": {"model_type": "smolvlm", "vision_config": {"depth": 1}},
    "Idefics3ForConditionalGeneration": {"model_type": "idefics3", "vision_config": {"depth": 1}},
    "LlavaForConditionalGeneration": {"model_type": "llava", "vision_config": {"depth": 1}},
    "Qwen2VLForConditionalGeneration": {"model_type": "qwen2_vl", "vision_config": {"depth": 1}},
    "Qwen2_5_VLForConditionalGeneration": {"model_type": "qwen2_5_vl", "vision_config": {"depth": 1}},
    "Qwen3VLForConditionalGeneration": {"model_type": "qwen3_vl", "vision_config": {"depth": 1}},
    "Qwen3OmniMoeForConditionalGeneration": {"model_type": "qwen3_omni_moe", "thinker_config": {"depth": 1}},
    "PaliGemmaForConditionalGeneration": {"model_type": "paligemma", "vision_config": {"depth": 1}},
    "MllamaForConditionalGeneration": {"model_type": "mllama", "vision_config": {"depth": 1}},
    "InternVLForConditionalGeneration": {"model_type": "internvl", "vision_config": {"depth": 1}},
    "SomethingNew": {"model_type": "something_new", "vision_config": {"depth": 1}},
}


def reward(completions: list[Any], **columns: Any) -> list[float]:
    return [0.0 for _ in completions]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("column", ["image", "images"])
@pytest.mark.parametrize("kind", PICTURES)
def test_rows_with_pictures(kind: str, column: str) -> None:
    rows = [{"prompt": ASKED}, {"prompt": ASKED, column: PICTURES[kind]}]
    for read in (load_rows, lambda rows: build_prompts(rows, FakeTokenizer())):
        with pytest.raises(
            DataError, match=f"row 1 has pictures \\(column '{column}'\\).*would be ignored; remove the co"
        ):
            read(rows)


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        ("pixel_values", np.zeros((1, 3, 2, 2)), "pictures"),
        ("Image", "a.png", "pictures"),
        ("image", {"type": "image_url", "image_url": {"url": "a"}}, "pictures"),
        ("video", "a.mp4", "video"),
        ("videos", [b"film"], "video"),
        ("audio", {"array": np.zeros(3), "sampling_rate": 16_000}, "sound"),
        ("audios", [[0.0, 0.1]], "sound"),
    ],
)
def test_rows_with_more(column: str, value: Any, what: str) -> None:
    with pytest.raises(DataError, match=f"row 0 has {what} \\(column '{column}'\\)"):
        build_prompts([{"prompt": "a", column: value}], FakeTokenizer())


@pytest.mark.parametrize("kind", NO_PICTURES)
def test_columns_of_that_name_without_a_picture(kind: str) -> None:
    for column in ("image", "images"):
        rows = load_rows([{"prompt": ASKED, column: NO_PICTURES[kind]}])
        (prompt,) = build_prompts(rows, FakeTokenizer())
        assert prompt.columns == {column: NO_PICTURES[kind]}


@pytest.mark.parametrize(
    "message",
    [
        {"content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
        {"content": [{"type": "image", "image": PICTURE}]},
        {"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]},
        {"content": [{"type": "input_audio", "input_audio": {"data": "UklGR", "format": "wav"}}]},
        {"content": "What?", "images": [PICTURE]},
        {"content": "What?", "images": ["iVBORw0KGgo"]},
    ],
)
def test_messages_with_pictures(message: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"row 0: message 0 of the prompt has (content=.*images .* are not|pictures)"):
        build_prompts([{"prompt": [{"role": "user", **message}]}], FakeTokenizer())
    with pytest.raises(RequestError, match=r"messages.0"):
        chat_text(FakeTokenizer(), [{"role": "user", **message}], {}, 1_000)


def test_both_doors_refuse_rows_and_processors(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": ASKED, "image": PICTURE}]
    processor = object.__new__(Idefics3Processor)
    ours = covey.GRPOConfig(output_dir=str(tmp_path / "ours"), num_generations=2)
    theirs = GRPOConfig(str(tmp_path / "theirs"), num_generations=2, per_device_train_batch_size=2, report_to="none")
    with pytest.raises(DataError, match="row 0 has pictures"):
        covey.GRPOTrainer(str(folder), reward, ours, rows)
    with pytest.raises(DataError, match="row 0 has pictures"):
        GRPOTrainer(str(folder), reward, theirs, rows)
    words = [{"prompt": ASKED}]
    for door, args in ((covey.GRPOTrainer, ours), (GRPOTrainer, theirs)):
        with pytest.raises(ModelError, match=r"processing_class=Idefics3Processor: .*pass processor\.tokenizer"):
            door(str(folder), reward, args, words, processing_class=processor)  # type: ignore[operator]
    with pytest.raises(ModelError, match=r"reward_processing_classes\[0\]=Idefics3Processor"):
        with_models([tiny_model("llama")], [processor])


@pytest.mark.parametrize("name", FAMILIES)
def test_vision_models(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [name], **FAMILIES[name]}))
    asked = rf"{folder}: a vision model \({name}\); none of these is loaded"
    with pytest.raises(ModelError, match=asked):
        load_model(str(folder))
    with pytest.raises(ModelError, match=asked):
        empty_model(str(folder), dtype="float32")
    theirs = GRPOConfig(
        str(tmp_path / "out"), report_to="none", num_generations=2, per_device_train_batch_size=2,
        model_init_kwargs={"cache_dir": str(tmp_path)},
    )  # fmt: skip
    with pytest.raises(ModelError, match=asked):
        GRPOTrainer(str(folder), reward, theirs, [{"prompt": ASKED}], processing_class=tiny_tokenizer())


def test_an_audio_model(tmp_path: Path) -> None:
    config = {"architectures": ["VoxtralForConditionalGeneration"], "model_type": "voxtral", "audio_config": {"a": 1}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"an audio model \(VoxtralForConditionalGeneration\)"):
        load_model(str(tmp_path))
