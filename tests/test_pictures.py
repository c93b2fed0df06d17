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
from covey.pytorch.footprint import empty_model
from covey.pytorch.models.loading import load_model
from covey.serving.requests import RequestError, chat_text
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
    "SmolVLM": "smolvlm", "Idefics3": "idefics3", "Llava": "llava", "Qwen2VL": "qwen2_vl", "Qwen2_5_VL": "qwen2_5_vl",
    "Qwen3VL": "qwen3_vl", "PaliGemma": "paligemma", "Mllama": "mllama", "InternVL": "internvl",
}  # fmt: skip
CONFIGS = {
    f"{name}ForConditionalGeneration": {"model_type": kind, "vision_config": {"depth": 1}}
    for name, kind in FAMILIES.items()
}
CONFIGS["Qwen3OmniMoeForConditionalGeneration"] = {"model_type": "qwen3_omni_moe", "thinker_config": {"depth": 1}}
CONFIGS["SomethingNew"] = {"model_type": "something_new", "vision_config": {"depth": 1}}


def reward(completions: list[Any], **columns: Any) -> list[float]:
    return [0.0 for _ in completions]


def refused(words: str, *rows: dict[str, Any]) -> None:
    for read in (load_rows, lambda rows: build_prompts(rows, FakeTokenizer())):
        with pytest.raises(DataError, match=words):
            read(list(rows))


def test_rows_with_pictures_films_or_sounds() -> None:
    for column in ("image", "images"):
        words = f"row 1 has pictures \\(column '{column}'\\).*would be ignored; remove the co"
        for picture in PICTURES.values():
            refused(words, {"prompt": ASKED}, {"prompt": ASKED, column: picture})
        for other in NO_PICTURES.values():
            (prompt,) = build_prompts(load_rows([{"prompt": ASKED, column: other}]), FakeTokenizer())
            assert prompt.columns == {column: other}
    for column, value, what in (
        ("pixel_values", np.zeros((1, 3, 2, 2)), "pictures"),
        ("Image", "a.png", "pictures"),
        ("image", {"type": "image_url", "image_url": {"url": "a"}}, "pictures"),
        ("video", "a.mp4", "video"),
        ("videos", [b"film"], "video"),
        ("audio", {"array": np.zeros(3), "sampling_rate": 16_000}, "sound"),
        ("audios", [[0.0, 0.1]], "sound"),
    ):
        refused(f"row 0 has {what} \\(column '{column}'\\)", {"prompt": "a", column: value})


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


def theirs(output: Path, **options: Any) -> GRPOConfig:
    return GRPOConfig(str(output), report_to="none", num_generations=2, per_device_train_batch_size=2, **options)


def test_both_doors_refuse_rows_and_processors(model_folder: Path, tmp_path: Path) -> None:
    processor = object.__new__(Idefics3Processor)
    ours = covey.GRPOConfig(output_dir=str(tmp_path / "ours"), num_generations=2)
    for door, args in ((covey.GRPOTrainer, ours), (GRPOTrainer, theirs(tmp_path / "theirs"))):
        given: Any = (str(model_folder), reward, args)
        with pytest.raises(DataError, match="row 0 has pictures"):
            door(*given, [{"prompt": ASKED, "image": PICTURE}])
        with pytest.raises(ModelError, match=r"processing_class=Idefics3Processor: .*pass processor\.tokenizer"):
            door(*given, [{"prompt": ASKED}], processing_class=processor)  # type: ignore[operator]
    with pytest.raises(ModelError, match=r"reward_processing_classes\[0\]=Idefics3Processor"):
        with_models([tiny_model("llama")], [processor])


@pytest.mark.parametrize("name", CONFIGS)
def test_vision_models(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [name], **CONFIGS[name]}))
    args = theirs(tmp_path / "out", model_init_kwargs={"cache_dir": str(tmp_path)})
    for load in (
        lambda: load_model(str(folder)),
        lambda: empty_model(str(folder), dtype="float32"),
        lambda: GRPOTrainer(str(folder), reward, args, [{"prompt": ASKED}], processing_class=tiny_tokenizer()),
    ):
        with pytest.raises(ModelError, match=rf"{folder}: a vision model \({name}\); none of these is loaded"):
            load()


def test_an_audio_model(tmp_path: Path) -> None:
    config = {"architectures": ["VoxtralForConditionalGeneration"], "model_type": "voxtral", "audio_config": {"a": 1}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"an audio model \(VoxtralForConditionalGeneration\)"):
        load_model(str(tmp_path))
