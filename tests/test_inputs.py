"""Input that would be waited for, that overflows, of the wrong type, or with pictures: one sentence each."""

import importlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_models import tiny_model, tiny_tokenizer
from transformers import Idefics3Processor

from covey import GRPOConfig, GRPOTrainer, trl
from covey.environments.base import get_world
from covey.errors import ConfigError, CoveyError, DataError, ModelError, RewardError
from covey.functions import load_function
from covey.pytorch.footprint import empty_model
from covey.pytorch.models.loading import load_model
from covey.pytorch.models.lora import attach_lora
from covey.rollout.calls import read_rewards
from covey.serving.requests import RequestError, chat_prompt
from covey.tasks import build_prompts, load_rows
from covey.training.refusals import require_memory
from covey.training.setup import load_task
from covey.trl.loading import with_models
from fakes import FakeTokenizer, raises


def length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_pipes_are_refused(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "recipe.toml"):
        os.mkfifo(tmp_path / name)
    raises(DataError, "is a pipe or a device", load_rows, tmp_path / "rows.jsonl")
    raises(ConfigError, "is not a file", GRPOConfig.from_toml, tmp_path / "recipe.toml")


def test_rewards_that_overflow_are_refused_in_short() -> None:
    for value in (1e300, -2e30, 10**400):
        with pytest.raises(RewardError, match=r"larger than 1e\+30") as caught:
            read_rewards("f", [value], ["0"])
        assert len(str(caught.value)) < 300
    assert read_rewards("f", [1e30], ["0"]).tolist() == [1e30]


def test_values_of_the_wrong_type_are_named() -> None:
    raises(ConfigError, "rooms='abc' is str, and must be a whole number", get_world, "house:rooms=abc")
    raises(CoveyError, r"optim\.learning_rate=inf: must be finite", GRPOConfig, learning_rate=float("inf"))
    with pytest.raises(ConfigError, match=r"data\.dataset='a\.jsonl': it does not go with data\.task='arithmetic'"):
        load_task(GRPOConfig(task="arithmetic", dataset="a.jsonl"))
    for field in ("loss_type", "lr_scheduler_type", "beta"):
        raises(ConfigError, rf"{field}=[(\[]1, 2[)\]]: ", GRPOConfig, **{field: np.array([1, 2])})
    config = GRPOConfig(learning_rate=np.float64(1e-4), num_generations=np.int64(4), reward_weights=np.array([1, 0.5]))
    assert config.to_dict() == GRPOConfig(learning_rate=1e-4, num_generations=4, reward_weights=[1.0, 0.5]).to_dict()


def test_paths_that_are_none(tmp_path: Path) -> None:
    for path, why in (("a\0.jsonl", "NUL"), ("x" * 6000 + ".csv", "too long for"), ("\ud800.jsonl", "surrogate pair")):
        with pytest.raises(DataError, match=why) as caught:
            load_rows(path)
        assert len(str(caught.value)) < 500
    for recipe in ("a\0b", None, 5.5):
        raises(ConfigError, r"cannot be read .*; give the path of a TOML file", GRPOConfig.from_toml, recipe)
    (tmp_path / "rows.csv").write_text("prompt,answer,prompt\na,b,c\n")
    raises(DataError, r"rows\.csv: its header has 'prompt' twice", load_rows, tmp_path / "rows.csv")


def make(settings: dict[str, Any], **given: Any) -> GRPOTrainer:
    usual = {"args": GRPOConfig(**settings), "reward_funcs": length, "train_dataset": [{"prompt": "a"}]}
    return GRPOTrainer(**(usual | given))


def test_arguments_of_the_wrong_kind(settings: dict[str, Any]) -> None:
    for given, message in (
        ({"args": {"beta": 0.1}}, r"args=\{'beta': 0\.1\}: a dict; pass a GRPOConfig"),
        ({"args": "runs/first"}, "args='runs/first': a str; pass a GRPOConfig"),
        ({"callbacks": 5}, "callbacks=5: a int; pass a list"),
        ({"callbacks": [print]}, "built-in function print> has no method such as on_step_end"),
        ({"model": 5}, "model=5: a int is not a model"),
        ({"model": dict}, "model=<class 'dict'>: a type is not a model"),
        ({"processing_class": 5}, "processing_class=5: a int is not a tokenizer"),
        ({"peft_config": 5}, "peft_config=5: a int; pass a peft.LoraConfig"),
    ):
        raises(CoveyError, message, make, settings, **given)


def test_what_a_trainer_is_asked_later(settings: dict[str, Any]) -> None:
    with pytest.raises(CoveyError, match=r"model\.lora_target_modules='\(': PEFT cannot attach it"):
        make(settings | {"lora_target_modules": "("})
    trainer = make(settings)
    for resume, why in ((5, "a int is not a path"), ("a\0b", "NUL")):
        raises(ConfigError, f"resume_from_checkpoint=.*{why}", trainer.train, resume_from_checkpoint=resume)
    for folder, why in ((5, "a int is not a path"), ("a\0b", "NUL"), ("/proc/nothing", "cannot write")):
        raises(CoveyError, why, trainer.save_model, folder)


def test_values_that_nothing_takes() -> None:
    for field, value, reason in (
        ("output_dir", "a\0b", "NUL"),
        ("run_name", "a\0b", "NUL"),
        ("functions", ["f.py:f", "a\0b"], "NUL"),
        ("output_dir", "x" * 5000, "too long for a path"),
        ("model", "~nobody-here/x", "home of a user"),
        ("dataset", "\ud800", "surrogate"),
        ("seed", 2**70, "64 bits"),
        ("seed", -1, "must be int, >= 0"),
        ("lora_alpha", 1e300, "too large"),
        ("reward_timeout", 1e12, "<= 1000000000"),
        ("stop_strings", ["x"] * 100_000, "100,000 entries"),
        ("num_iterations", 10**9, "<= 1000"),
        ("system_prompt", "x" * 10**6, "too long for a setting"),
    ):
        with pytest.raises(ConfigError, match=field) as error:
            GRPOConfig(**{field: value})
        assert reason in str(error.value)
        assert len(str(error.value)) < 1000


def test_more_than_memory_holds_or_anybody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in (
        {"num_generations": 10**9},
        {"prompts_per_step": 10**9},
        {"max_completion_length": 10**12},
        {"num_generations_eval": 10**9, "eval_temperature": 1.0},
        {"phases": [{"steps": 1, "num_generations": 10**9}]},
        {"world": "house", "parallel_episodes": 10**9},
    ):
        with pytest.raises(ConfigError, match=r"needs at least [\d,]+ GB of memory, and this machine has \d+ GB"):
            require_memory(GRPOConfig(**settings))
    require_memory(GRPOConfig())
    monkeypatch.setattr("covey.training.refusals.total_memory", lambda: 10**13)  # also where they would fit
    for settings in (
        {"num_generations": 10**6, "prompts_per_step": 1},
        {"prompts_per_step": 10**6, "num_generations": 2},
        {"phases": [{"steps": 1, "num_generations": 10**6}], "prompts_per_step": 1},
        {"num_generations_eval": 10**6, "eval_temperature": 1.0},
    ):
        with pytest.raises(ConfigError, match=r"1000000.*[12],000,000 completions at once; use up to 250,000"):
            require_memory(GRPOConfig(**({"max_completion_length": 8} | settings)))
    require_memory(GRPOConfig(num_generations=1024, prompts_per_step=128))


def test_adapters_larger_than_memory_or_than_the_model() -> None:
    for rank, reason in ((10**9, "GB with gradients"), (5_000, "more than the 384 rows or columns")):
        with pytest.raises(ModelError, match=rf"model\.lora_r={rank}: .*{reason}"):
            attach_lora(tiny_model("llama", vocab_size=384), r=rank)


def test_broken_and_quantised_models_are_named(tmp_path: Path) -> None:
    broken, quantised = tiny_model("llama"), tiny_model("llama")
    next(broken.parameters()).data.view(-1)[0] = float("nan")
    quantised.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    settings = '{"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}'
    (tmp_path / "config.json").write_text(settings)
    for model, words in (
        (broken, r"embed_tokens\.weight holds NaN"),
        (quantised, r"is quantised \(bitsandbytes, 4 bits\)"),
        (tmp_path, r"is quantised \(gptq, 4 bits\).*use the model that it was made from"),
    ):
        raises(ModelError, words, load_model, model, None if model is tmp_path else tiny_tokenizer())


def test_functions_come_from_a_file_or_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, broken = tmp_path / "random.py", tmp_path / "broken.py"  # a name that would hide a library's
    file.write_text("def reward(completions, **columns):\n    return [2.0]\n")
    function = load_function(f"{file}:reward")
    assert function([]) == [2.0]
    assert load_function(f"{file}:reward") is function
    assert importlib.import_module("random").__file__ != str(file)
    assert load_function("math:sqrt")(4) == 2
    broken.write_text("1 / 0\n")
    (tmp_path / "unread.py").write_text("def reward(:\n")
    monkeypatch.chdir(tmp_path)
    for name, reason in (
        ("unread:reward", r"write unread\.py:reward"),
        ("unread.py:reward", r"SyntaxError: .*\(unread\.py, line 1\); correct it"),
        ("reward", "FILE.py:FUNCTION"),
        (":reward", "FILE.py:FUNCTION"),
        ("nowhere.py:reward", "no such file"),
        ("no_such_module:reward", "No module named"),
        ("math:no_such_function", "math has no 'no_such_function'"),
        ("math:pi", "is a float"),
        (f"{broken}:reward", "ZeroDivisionError"),
    ):
        raises(ConfigError, reason, load_function, name)


PICTURE = Image.new("RGB", (2, 2))
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "What is in the picture?"}]
PICTURES = (PICTURE, [PICTURE], [None, PICTURE], np.zeros((2, 2, 3), np.uint8))
UNREADABLE = (
    *(b"\x89PNG", [[0, 255], [255, 0]], [0.5, 0.25], {"bytes": b"\x89PNG", "path": None}),
    *({"bytes": None, "path": "a.png"}, "photos/my cat.JPG", "https://example.org/cat", ["a.png", "b.webp"]),
    *("data:image/png;base64,iVBORw0KGgo=", "iVBORw0KGgoAAAANSUhEUg=="),
)
NO_PICTURES = (
    *(None, [], [None], {"bytes": None, "path": None}, {"caption": "a cat"}, 3, [3, 4]),
    *("", "ubuntu:24.04", "A cat sits on a mat. It looks at me."),
)
FAMILIES = {"PaliGemma": "paligemma", "Mllama": "mllama", "InternVL": "internvl"}
DEPTH = {"depth": 1}
CONFIGS = {f"{n}ForConditionalGeneration": {"model_type": k, "vision_config": DEPTH} for n, k in FAMILIES.items()}
CONFIGS["Qwen3OmniMoeForConditionalGeneration"] = {"model_type": "qwen3_omni_moe", "thinker_config": {"depth": 1}}
CONFIGS["SomethingNew"] = {"model_type": "something_new", "vision_config": {"depth": 1}}
CONFIGS["VoxtralForConditionalGeneration"] = {"model_type": "voxtral", "audio_config": {"a": 1}}


def refused(words: str, *rows: dict[str, Any]) -> None:
    for read in (load_rows, lambda rows: build_prompts(rows, FakeTokenizer())):
        raises(DataError, words, read, list(rows))


def test_rows_with_pictures_films_or_sounds() -> None:
    for column in ("image", "images"):
        words = f"row 1 has pictures \\(column '{column}'\\), and the model reads none: they would be ignored; use a vi"
        for picture in PICTURES:
            rows = load_rows([{"prompt": ASKED}, {"prompt": ASKED, column: picture}])
            raises(DataError, words, build_prompts, rows, FakeTokenizer())
        for picture in UNREADABLE:
            refused("row 1: picture 0", {"prompt": ASKED}, {"prompt": ASKED, column: picture})
        for other in NO_PICTURES:
            (prompt,) = build_prompts(load_rows([{"prompt": ASKED, column: other}]), FakeTokenizer())
            assert prompt.columns == {column: other}
    for column, value, what in (
        ("pixel_values", np.zeros((1, 3, 2, 2)), "pictures"),
        ("video", "a.mp4", "video"),
        ("videos", [b"film"], "video"),
        ("audio", {"array": np.zeros(3), "sampling_rate": 16_000}, "sound"),
        ("audios", [[0.0, 0.1]], "sound"),
    ):
        refused(f"row 0 has {what} \\('{column}'\\)", {"prompt": "a", column: value})


def test_messages_with_pictures() -> None:
    for message in (
        {"content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
        {"content": [{"type": "image", "image": PICTURE}]},
        {"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]},
        {"content": [{"type": "input_audio", "input_audio": {"data": "UklGR", "format": "wav"}}]},
        {"content": "What?", "images": [PICTURE]},
        {"content": "What?", "images": ["iVBORw0KGgo"]},
    ):
        asked = [{"role": "user", **message}]
        words = "row 0.* (it must be text, or parts of|has pictures .messages of 'prompt'|a key of pictures|holds 0)"
        raises(DataError, words, build_prompts, [{"prompt": asked}], FakeTokenizer())
        raises(RequestError, r"messages.0", chat_prompt, FakeTokenizer(), asked, {}, 1_000)


def theirs(output: Path, **options: Any) -> trl.GRPOConfig:
    return trl.GRPOConfig(str(output), report_to="none", num_generations=2, per_device_train_batch_size=2, **options)


def test_both_doors_refuse_rows_and_processors(model_folder: Path, tmp_path: Path) -> None:
    processor = object.__new__(Idefics3Processor)
    ours = GRPOConfig(output_dir=str(tmp_path / "ours"), num_generations=2)
    for door, args in ((GRPOTrainer, ours), (trl.GRPOTrainer, theirs(tmp_path / "theirs"))):
        given: Any = (str(model_folder), length, args)
        raises(DataError, "row 0 has pictures", door, *given, [{"prompt": ASKED, "image": PICTURE}])
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
        lambda: trl.GRPOTrainer(str(folder), length, args, [{"prompt": ASKED}], processing_class=tiny_tokenizer()),
    ):
        kind = "an audio" if "audio_config" in CONFIGS[name] else "a vision"
        raises(ModelError, rf"{folder}: {kind} model \({name}\); of these only smolvlm, .* are trained", load)
