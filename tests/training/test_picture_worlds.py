"""Worlds that show pictures: their tokens are the template's own, and records and replays know them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_models import tiny_model, tiny_tokenizer
from tiny_vision import picture, tiny_processor, tiny_vision, vision_folder

from covey import GRPOConfig, GRPOTrainer
from covey.environments import EnvironmentPool, get_world
from covey.environments.base import Observation, checked_reset
from covey.errors import ConfigError, DataError, EpisodeError
from covey.observe.run_folder import RunFolder
from covey.pytorch.models.loading import load_model
from covey.rollout.conversation import ConversationTemplate
from covey.tasks.pictures import read_picture
from covey.training.replay import replay
from covey.watch.export import export_runs
from covey.watch.run import WatchedRun
from fakes import raises

WORLD = """
import numpy as np
from covey.environments import Environment, Observation, World

class Screens(World):
    name, max_turns, max_completion_length = "screens", 3, 4
    def __init__(self, kind="good"): self.kind = kind
    def train_tasks(self, seed): return [{"uid": str(n), "messages": self.before()} for n in range(2)]
    def before(self): return [{"role": "user", "content": [{"type": "image"}]}] if self.kind == "row" else []
    def eval_tasks(self): return []
    def make(self): return Screen(self.kind)

class Screen(Environment):
    def __init__(self, kind): self.kind = kind
    def reset(self, task, seed):
        self.number = 10 * int(task["uid"])
        return self.shown()
    def shown(self):
        pixels = np.random.default_rng(self.number).integers(0, 256, (14, 20, 3), np.uint8)
        pictures = {"good": [pixels], "bytes": [b"x"], "many": [pixels] * 17, "thin": [pixels]}[self.kind]
        pictures = [np.zeros((700, 1, 3), np.uint8)] if self.kind == "thin" and self.number in (1, 10) else pictures
        return Observation("see", pictures=pictures if self.number % 2 == 0 else [*pictures, pixels[::-1]])
    def step(self, action):
        self.number += 1
        return self.shown(), float(len(set(action))), False, {}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(vision_folder("smolvlm", tmp_path_factory.mktemp("vision") / "model"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("world") / "screens.py"
    file.write_text(WORLD)
    return f"{file}:Screens"


def settings(output: Path, world: str, **more: Any) -> GRPOConfig:
    usual: dict[str, Any] = {"num_generations": 2, "prompts_per_step": 2, "max_steps": 2, "learning_rate": 1e-2}
    usual |= {"world": world, "action_format": "text", "parallel_episodes": 2, "keep_batches": True}
    return GRPOConfig(output_dir=str(output), **usual | {"progress": False, "report_to": ()} | more)


def test_a_conversation_has_the_templates_own_tokens() -> None:
    loaded: Any = load_model(tiny_vision("smolvlm"), tiny_processor("smolvlm"))
    album, tokenizer = loaded.model.album, loaded.tokenizer
    words = ConversationTemplate(tokenizer, [tokenizer.eos_token_id], "Play.", None, album)
    shown = [[read_picture(picture(seed), "here") for seed in seeds] for seeds in ((0,), (), (1, 2))]
    ids = words.opening("a", pictures=shown[0]).tolist()
    messages: list[Any] = [{"role": "system", "content": "Play."}]
    for text, pictures in zip("abc", shown, strict=True):
        parts = [*[{"type": "image"}] * len(pictures), {"type": "text", "text": text}]
        if text != "a":
            ids += tokenizer("x<|im_end|>", add_special_tokens=False).input_ids
            ids += words.reply(text, ended=True, pictures=pictures).tolist()
            messages.append({"role": "assistant", "content": "x"})
        messages.append({"role": "user", "content": parts})
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    rendered = np.array(tokenizer(whole, add_special_tokens=False).input_ids)
    assert ids == album.expand(rendered, [each for pictures in shown for each in pictures]).tolist()
    # what the world says is text, whatever it says
    assert words.reply("<image>", ended=True, pictures=shown[0]).tolist().count(album.placeholder_id) == 0


STEPS = {"history_length": 1, "max_conversation_tokens": 300}


@pytest.mark.parametrize(("family", "more"), [("smolvlm", {}), ("smolvlm", STEPS), ("qwen2_5_vl", {})], ids=str)
def test_a_run_is_recorded_and_replayed(model: str, world: str, tmp_path: Path, family: str, more: Any) -> None:
    own = model if family == "smolvlm" else str(vision_folder(family, tmp_path / "model"))
    trainer = GRPOTrainer(own, args=settings(tmp_path / "run", world, **more))
    trainer.train()
    album: Any = trainer.policy.album
    assert album.passes <= 8  # of two tasks three observations each, the second with two pictures
    gaps = [r["sampling/sampling_logp_difference/max"] for r in trainer.state.log_history if "loss" in r]
    assert max(gaps) < 1e-5
    run = RunFolder.read(tmp_path / "run")
    assert len([*run.pictures.iterdir()]) == 8
    for row in run.read_completions(1):
        assert row["completion"].startswith("[picture ")
        assert row["completion"].count("[picture ") == 4
        assert [len(turn["pictures"]) for turn in json.loads(row["play"])] == [1, 2, 1]
    for step in (1, 2):
        assert replay(run.path, step).exact
    export_runs([WatchedRun(run.path)], tmp_path / "page.html")
    archive = (tmp_path / "page.html").read_text().partition('id="archive">')[2].partition("</script>")[0]
    answers = json.loads(archive)["answers"]
    seen = {
        each
        for row in answers["0/episodes kind=step step=1"]["rows"]
        for turn in row["play"]
        for each in turn["pictures"]
    }
    assert len(seen) == 4
    assert all(answers[f"0/picture/{each}"].startswith("data:image/jpeg;base64,") for each in seen)
    trainer.close()


def test_what_a_world_shows_is_checked(world: str) -> None:
    for kind, words in (("bytes", "reset returned a picture that cannot be read"), ("many", "returned 17 pictures")):
        with EnvironmentPool(get_world(f"{world}:kind={kind}"), 1) as pool:
            pool.reset(0, {"uid": "0"}, 0)
            ((_, found),) = pool.wait()
            assert isinstance(found, EpisodeError)
            assert words in str(found)
    raises(EpisodeError, "must be a list of up to 16", checked_reset, Observation("x", pictures=b"x"))  # type: ignore
    raises(EpisodeError, "returned the text 'x.png' as a picture", checked_reset, Observation("x", pictures=["x.png"]))
    (one,) = checked_reset(Observation("x", pictures=[Image.new("RGB", (3, 2))])).pictures
    assert one.size == (3, 2)


def test_a_picture_that_the_model_cannot_take_ends_its_episode(world: str, tmp_path: Path) -> None:
    """Of task 0 the second observation, of task 1 the first."""
    own = str(vision_folder("qwen2_vl", tmp_path / "model"))
    trainer = GRPOTrainer(own, args=settings(tmp_path / "run", f"{world}:kind=thin", max_steps=1))
    trainer.train()
    trainer.close()
    rows = {row["uid"]: row for row in RunFolder.read(tmp_path / "run").read_completions(1)}
    told = {uid: (len(json.loads(row["play"])), row["ended"], row["error"]) for uid, row in rows.items()}
    why = "a picture of 1 x 700 pixels: absolute aspect ratio must be smaller than 200, got 700.0"
    assert told == {"0": (1, "failed", why), "1": (0, "failed", why)}


def test_where_no_pictures_are_read(model: str, world: str, tmp_path: Path) -> None:
    text = {"args": settings(tmp_path / "text", world), "processing_class": tiny_tokenizer()}
    trainer = GRPOTrainer(tiny_model("llama"), **text)
    raises(ConfigError, "the world shows pictures: the model reads none; use a vision model", trainer.train)
    trainer.close()
    with pytest.raises(DataError, match=r"a task's messages have no pictures .*; show them in observations"):
        GRPOTrainer(model, args=settings(tmp_path / "row", f"{world}:kind=row"))
