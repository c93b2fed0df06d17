"""Pictures on several machines: what samples or trains there computes what one process does."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import COUNTED, HERE, RAY, covey, ended_well, learned
from tiny_vision import picture, tiny_processor, tiny_vision, vision_folder

from covey.errors import ModelError
from covey.pytorch.models.loading import load_model
from covey.pytorch.models.lora import pictures_in
from covey.tasks.pictures import read_picture
from covey.types import PICTURES
from fakes import slow

Train = Callable[..., tuple[list[str], bytes]]
WORLD = """
import numpy as np
from covey.environments import Environment, Observation, World

class Screens(World):
    name, max_turns, max_completion_length = "screens", 2, 6
    def train_tasks(self, seed): return [{"uid": str(n)} for n in range(3)]
    def eval_tasks(self): return []
    def make(self): return Screen()

class Screen(Environment):
    def reset(self, task, seed):
        self.number = 10 * int(task["uid"])
        return self.shown()
    def shown(self):
        pixels = np.random.default_rng(self.number).integers(0, 256, (14, 20, 3), np.uint8)
        return Observation("see", pictures=[pixels])
    def step(self, action):
        self.number += 1
        return self.shown(), float(len(set(action))), False, {}
"""


def test_pictures_go_with_what_is_asked() -> None:
    here, there = ((load_model(tiny_vision("qwen3_vl"), tiny_processor("qwen3_vl")).model) for _ in range(2))
    shown = [read_picture(picture(seed), "here") for seed in range(2)]
    ids, other = (here.album.open(each) for each in shown)
    asked = torch.from_numpy(ids)[None]
    with pytest.raises(ModelError, match="of no picture that is open here"):
        there(input_ids=asked)
    sent = pickle.loads(pickle.dumps(pictures_in(here, [ids, ids])))
    assert [each.sha256 for each in sent] == [shown[0].sha256]
    there.album.hold(sent)
    with torch.no_grad():
        assert torch.equal(there(input_ids=asked).logits, here(input_ids=asked).logits)
    there.album.hold(pickle.loads(pickle.dumps(pictures_in(here, [ids, other]))))
    assert not there.album.unknown(other)
    there.album.hold(sent := [])
    assert there.album.unknown(ids)
    assert pictures_in(here, [ids[ids < PICTURES]]) == sent


RECIPE = """
sampling = { num_generations = 4, max_completion_length = 8 }
schedule = { max_steps = 2 }
optim = { learning_rate = 0.01 }
distributed = { groups_per_unit = 1 }
"""
ROWS = 'data = { dataset = "rows.jsonl", prompts_per_step = 2 }\nrewards = { functions = ["rewards.py:variety"] }'
PLAYED = 'data = { prompts_per_step = 2 }\nenvironment = { world = "screens.py:Screens", action_format = "text" }'
REWARD = "def variety(completions, **columns): return [len(set(each[0]['content'])) for each in completions]"


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """A run of the command, in a folder of its own, on a tiny vision model; what it has learned."""
    monkeypatch.chdir(tmp_path)
    for seed in range(4):
        picture(seed, 50 if seed % 2 else 20).save(f"{seed}.png")
    asked = [{"role": "user", "content": "What?"}]
    Path("rows.jsonl").write_text("\n".join(json.dumps({"prompt": asked, "image": f"{n}.png"}) for n in range(4)))
    Path("screens.py").write_text(WORLD)
    Path("rewards.py").write_text(REWARD)

    def made(name: str, *settings: str, family: str = "smolvlm", world: bool = False) -> tuple[list[str], bytes]:
        if not Path("model").exists():
            vision_folder(family, Path("model"))
        Path("recipe.toml").write_text(RECIPE + (PLAYED if world else ROWS))
        ended_well(covey("train", "recipe.toml", "model.model=model", f"run.output_dir={name}", HERE, *settings))
        return learned(name, without=COUNTED)

    return made


FAMILIES = ["smolvlm", slow("qwen3_vl")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_two_learners_are_one(train: Train, family: str) -> None:
    assert train("two", "distributed.learners=2", family=family) == train(
        "one", "distributed.samplers=0", family=family
    )


@pytest.mark.slow
def test_worlds_on_two_learners(train: Train) -> None:
    assert largest_gap(train("two", "distributed.learners=2", world=True)) < 1e-5


def largest_gap(learned: tuple[list[str], bytes]) -> float:
    """Between sampler and trainer: turns are sampled one by one elsewhere, in one process they are not."""
    return max(json.loads(line)["sampling/sampling_logp_difference/max"] for line in learned[0])


class TestRay:
    pytestmark = RAY

    @pytest.fixture(autouse=True)
    def ray(self) -> None:
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'covey[ray]'")

    @pytest.mark.parametrize("family", FAMILIES)
    def test_two_samplers_are_one_process(self, train: Train, family: str) -> None:
        two = train("two", "distributed.samplers=2", family=family)
        assert two == train("one", "distributed.samplers=0", family=family)

    def test_worlds_on_two_samplers(self, train: Train) -> None:
        assert largest_gap(train("two", "distributed.samplers=2", world=True)) < 1e-5
