"""Runs on pictures: what rewards see, what the run folder holds, and that interrupted runs have the same bits."""

import json
import pickle
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from peft import PeftModel
from PIL import Image
from rich.console import Console
from tiny_models import tiny_model, tiny_tokenizer
from tiny_vision import picture, tiny_processor, tiny_vision, vision_folder
from transformers import AutoModelForImageTextToText, AutoProcessor

from covey import GRPOConfig, GRPOTrainer, trl
from covey.cli.results import print_summary
from covey.errors import ConfigError, DataError, RunFolderError
from covey.observe.run_folder import RunFolder
from covey.rollout.scoring import Scorer
from covey.tasks.pictures import read_picture
from covey.training.export import export_run, kept_weights
from covey.training.replay import replay
from covey.training.setup import picture_reader
from covey.types import PICTURES, Episode
from covey.watch.app import create_app
from covey.watch.export import export_runs
from covey.watch.run import WatchedRun
from fakes import raises

SEEN: list[Any] = []


def variety(prompts: Any, completions: Any, images: Any, **columns: Any) -> list[float]:
    """The number of different characters, and a note of what was seen."""
    SEEN[:] = [prompts, images]
    return [float(len(set(completion[0]["content"]))) for completion in completions]


def variety_of_text(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(set(completion[0]["content"]))) for completion in completions]


def rows() -> list[dict[str, Any]]:
    asked = [{"role": "user", "content": "What?"}]
    return [{"prompt": asked, "images": [picture(seed, 50 if seed % 2 else 20)]} for seed in range(4)]


def settings(output: Path, **more: Any) -> GRPOConfig:
    usual: dict[str, Any] = {"num_generations": 4, "prompts_per_step": 2, "max_completion_length": 8, "max_steps": 4}
    usual |= {
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "save_steps": 2,
        "keep_batches": True,
        "progress": False,
        "report_to": (),
    }
    return GRPOConfig(output_dir=str(output), **usual | more)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(vision_folder("smolvlm", tmp_path_factory.mktemp("vision") / "model"))


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    """A run of four steps."""
    trainer = GRPOTrainer(model, variety, settings(tmp_path_factory.mktemp("runs") / "whole"), rows())
    trainer.train()
    return trainer


def test_a_run_reads_each_picture_once(whole: GRPOTrainer) -> None:
    album: Any = whole.policy.album
    assert album.passes == 4
    assert whole.policy.fused_obstacle is None
    assert whole.learner._can_walk
    first = next(record for record in whole.state.log_history if "tokens/raw" in record)
    lengths = [len(prompt.token_ids) for prompt in whole.prompts]
    assert first["tokens/computed"] <= max(lengths) + sorted(lengths)[-2] + 8 * 8  # two prompts once, eight answers
    assert first["tokens/raw"] >= 8 * min(lengths)
    gaps = [r["sampling/sampling_logp_difference/max"] for r in whole.state.log_history if "loss" in r]
    assert max(gaps) < 1e-5
    said = StringIO()
    print_summary(Console(file=said, width=1000), whole, Path(whole.args.run.output_dir))
    assert f"try it: covey watch {whole.args.run.output_dir}\n" in said.getvalue()


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.slow
def test_qwen_trains_on_pictures_and_resumes_with_the_same_bits(name: str, tmp_path: Path) -> None:
    model = str(vision_folder(name, tmp_path / "model"))
    given = [*rows()[:3], {"prompt": [{"role": "user", "content": "Or text?"}], "images": None}]
    ran = []
    for output, steps in (("whole", (4,)), ("begun", (2, 4))):
        for number, most in enumerate(steps):
            trainer = GRPOTrainer(model, variety_of_text, settings(tmp_path / output, max_steps=most), given)
            trainer.train(resume_from_checkpoint=number > 0)
        ran.append(trainer)
    whole, again = ran
    assert whole.policy.album is not None
    assert whole.policy.album.passes == 3
    assert whole.policy.fused_obstacle is None
    gaps = [r["sampling/sampling_logp_difference/max"] for r in whole.state.log_history if "loss" in r]
    assert max(gaps) < 1e-5
    assert {key: value.tolist() for key, value in again.policy.state_dict().items()} == {
        key: value.tolist() for key, value in whole.policy.state_dict().items()
    }
    for step in (1, 4):
        assert replay(whole.args.run.output_dir, step).exact


def test_rewards_see_pictures(whole: GRPOTrainer) -> None:
    prompts, images = SEEN
    (message,) = prompts[0]
    shown, text = message["content"]
    assert text == {"type": "text", "text": "What?"}
    assert isinstance(shown["image"], Image.Image)
    assert images[0][0] is prompts[1][0]["content"][0]["image"]  # opened once for a group
    own = {picture(seed, 50 if seed % 2 else 20).tobytes() for seed in range(4)}
    assert {image.convert("RGB").tobytes() for (image,) in images} <= own


def test_an_interrupted_run_has_the_same_bits(whole: GRPOTrainer, model: str, tmp_path: Path) -> None:
    begun = GRPOTrainer(model, variety, settings(tmp_path / "run", max_steps=2), rows())
    begun.train()
    again = GRPOTrainer(model, variety, settings(tmp_path / "run"), rows())
    again.train(resume_from_checkpoint=True)
    assert {key: value.tolist() for key, value in again.policy.state_dict().items()} == {
        key: value.tolist() for key, value in whole.policy.state_dict().items()
    }


def test_a_step_is_computed_again_from_the_folder(whole: GRPOTrainer, tmp_path: Path) -> None:
    run = RunFolder.read(whole.args.run.output_dir)
    for step in (1, 4):
        assert replay(run.path, step).exact
    (first,) = [row for row in run.read_completions(1) if row["group"] == 0 and row["sample"] == 0]
    (message,) = json.loads(first["prompt"])
    sha256 = message["content"][0]["image"]
    data, ending = run.read_picture(sha256)
    assert read_picture(data, "here").size in ((20, 14), (50, 14))
    assert len([*run.pictures.iterdir()]) == 4
    (run.pictures / f"{sha256}.{ending}").write_bytes(data[:-1])
    raises(RunFolderError, f"no whole file of the picture {sha256}", replay, run.path, 1)
    (run.pictures / f"{sha256}.{ending}").write_bytes(data)


def test_the_page_and_the_report_show_pictures(whole: GRPOTrainer, tmp_path: Path) -> None:
    run = WatchedRun(whole.args.run.output_dir)
    client, key = TestClient(create_app([run], "secret")), {"Authorization": "Bearer secret"}
    groups = client.get("/api/0/completions?step=1", headers=key).json()["groups"]
    (message,) = groups[0]["prompt"]
    (sha256,) = message["pictures"]
    assert message["content"] == f"[picture {sha256[:8]}]What?"
    found = client.get(f"/api/0/picture/{sha256}", headers=key)
    assert (found.headers["content-type"], found.headers["x-content-type-options"]) == ("image/png", "nosniff")
    assert found.content.startswith(b"\x89PNG")
    assert client.get(f"/api/0/picture/{sha256}").status_code == 401
    for wrong in ("0" * 64, "..%2fconfig.toml", "x"):
        assert client.get(f"/api/0/picture/{wrong}", headers=key).status_code == 404
    export_runs([run], tmp_path / "page.html")
    assert f'"0/picture/{sha256}":"data:image/jpeg;base64,' in (tmp_path / "page.html").read_text()


def test_trl_takes_a_vision_model_with_its_processor(tmp_path: Path) -> None:
    args = trl.GRPOConfig(str(tmp_path / "out"), report_to="none", num_generations=2, per_device_train_batch_size=4,
                          max_steps=1, max_completion_length=6, learning_rate=1e-2, save_strategy="no")  # fmt: skip
    processor = tiny_processor("llava")
    trainer = trl.GRPOTrainer(tiny_vision("llava"), variety, args, rows(), processing_class=processor)
    trainer.train()
    assert isinstance(SEEN[1][0][0], Image.Image)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    assert type(loaded).__name__ == "LlavaForConditionalGeneration"
    assert type(AutoProcessor.from_pretrained(tmp_path / "saved")) is type(processor)

    how: Any = {"processing_class": processor, "rollout_func": lambda prompts, trainer: {}}
    with pytest.raises(ConfigError, match="no prompt may have pictures yet"):
        trl.GRPOTrainer(tiny_vision("llava"), variety, args, rows(), **how)


def test_the_adapter_of_a_run_fits_the_whole_model(whole: GRPOTrainer, model: str) -> None:
    folder = Path(whole.args.run.output_dir) / "adapter"
    theirs = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(model), folder)
    assert sum(".lora_A" in key for key, _ in theirs.named_parameters()) == 14


def test_questions_and_cards_of_a_vision_run(whole: GRPOTrainer, model: str, tmp_path: Path) -> None:
    album: Any = whole.policy.album
    before, shown = album.passes, picture(9)
    asked = [{"role": "user", "content": "What?"}]
    parts = [{"type": "image", "image": shown}, {"type": "text", "text": "What?"}]
    (column,) = whole.generate([{"prompt": asked, "image": shown}])
    assert album.passes == before + 1
    assert whole.generate([[{"role": "user", "content": parts}]]) == [column]
    assert album.passes == before + 1
    for kind, line in (("adapter", "PeftModel.from_pretrained(model, "), ("model", "AutoProcessor.from_pretrained(")):
        folder = RunFolder.read(whole.args.run.output_dir)
        done = export_run(folder, whole.args, kept_weights(folder, whole.args), tmp_path / kind, kind=kind)
        card = (done / "README.md").read_text()
        assert "AutoModelForImageTextToText" in card
        assert line in card
        assert "CausalLM" not in card
        assert "pipeline_tag: image-text-to-text" in card


def test_units_of_one_process_have_pictures(model: str, tmp_path: Path) -> None:
    trainer = GRPOTrainer(model, variety, settings(tmp_path, samplers=0, max_steps=1), rows())
    trainer.train()
    assert trainer.state.log_history[0]["sampling/sampling_logp_difference/max"] < 1e-5


def test_where_pictures_are_not_read_yet(whole: GRPOTrainer, model: str, tmp_path: Path) -> None:
    taught = {"teacher": {"context": "none", "weights": "ema"}}
    with pytest.raises(ConfigError, match=r"^algorithm\.teacher: pictures are read by Covey's own engine"):
        GRPOTrainer(model, variety, settings(tmp_path / "taught", **taught), rows())
    sharded: Any = SimpleNamespace(album=whole.policy.album, in_shards=True)
    for name, policy, more in (
        ("distributed.learner_kind", sharded, {}),
        ("server", whole.policy, {"upload_adapters_to_server": True}),
    ):
        told = "pictures are read by Covey's own engines, in-process vLLM and replicated learners"
        assert picture_reader(settings(tmp_path / "away", **more), policy) == (None, f"{name}: {told}")
    words = r"row 0 has pictures \(column 'images'\), and the model reads none"
    with pytest.raises(DataError, match=words):
        GRPOTrainer(
            tiny_model("llama"), variety, settings(tmp_path / "text"), rows(), processing_class=tiny_tokenizer()
        )


def test_a_worker_of_rewards_gets_files(whole: GRPOTrainer) -> None:
    prompt = pickle.loads(pickle.dumps(whole.prompts[0]))
    ids = prompt.token_ids
    assert (ids >= PICTURES).any()
    episode = Episode(ids, ids < 0, np.zeros(len(ids), np.float32), "abc", "stop", 0)
    rewards, _ = Scorer(variety).score([prompt], [episode])
    assert rewards.tolist() == [3.0]
