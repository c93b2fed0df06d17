"""Units in one process: the same run wherever it is cut, killed or resumed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import covey, data, ended_well, events, finished, learned, train

from covey import GRPOConfig, GRPOTrainer
from covey.distributed.fleet import Fleet
from covey.errors import ConfigError
from covey.pytorch.engine import Engine
from covey.types import Request, SamplingSettings
from fakes import raises, slow


@pytest.mark.slow
def test_a_run_that_is_killed_in_a_step_learns_the_same(recipe_folder: Path, tmp_path: Path) -> None:
    """Evaluation (1 unit), steps 1, 2, checkpoint, step 3: killed in the second unit of step 3, the seventh in all."""
    units = {"distributed.samplers": 0, "distributed.groups_per_unit": 1}
    ended_well(train(0, recipe_folder, tmp_path / "whole", **units))
    process = train(0, recipe_folder, tmp_path / "run", environment={"FAULT": "kill in call 7"}, **units)
    printed = finished(process)
    assert process.returncode == -9, printed
    assert (tmp_path / "run" / "checkpoints" / "step_000002").exists()
    ended_well(covey("resume", tmp_path / "run"))
    assert learned(tmp_path / "run") == learned(tmp_path / "whole")


@pytest.mark.parametrize("changes", [{"max_staleness": 1}, slow({}), slow({"use_peft": False})], ids=str)
def test_units_train(by_units: dict[str, Any], changes: dict[str, Any], tmp_path: Path) -> None:
    """With units that are as large as a step, the numbers are those of one call."""
    model = "model.safetensors" if "use_peft" in changes else ""
    found = []
    for name, units in (("units", {"samplers": 0, "groups_per_unit": 4}), ("plain", {"groups_per_unit": 1})):
        args = GRPOConfig(**(by_units | changes | units | {"output_dir": str(tmp_path / name)}))
        trainer = GRPOTrainer(args=args, **data())
        trainer.train()
        assert type(trainer.engine) is (Fleet if name == "units" else Engine)
        names = {key for record in trainer.state.log_history for key in record}
        assert ("samplers/restarts" in names) == (name == "units")
        found.append(learned(tmp_path / name, without=("samplers/",), weights=model))
    assert (found[0], events(tmp_path / "units", "sampler")) == (found[1], [])


def test_a_unit_is_a_function_of_itself(by_units: dict[str, Any]) -> None:
    trainer = GRPOTrainer(args=GRPOConfig(**(by_units | {"samplers": 0})), **data())
    assert isinstance(trainer.engine, Fleet)
    settings, version = SamplingSettings(max_tokens=8), trainer.state.policy_version
    ids = [prompt.token_ids for prompt in trainer.prompts]
    asked = [Request(each, (3, 0, place, n)) for place, each in enumerate(ids) for n in range(4)]
    whole = trainer.engine(asked, settings, policy_version=version)
    for place in range(0, len(asked), 4):
        part = trainer.engine(asked[place : place + 4], settings, policy_version=version)
        for one, other in zip(part, whole[place : place + 4], strict=True):
            assert np.array_equal(one.token_ids, other.token_ids)
            assert np.array_equal(one.logprobs, other.logprobs)


def test_settings_that_cannot_be() -> None:
    for settings, message in (
        ({"learners": 0}, "distributed.learners=0"),
        ({"samplers": -1}, "distributed.samplers=-1"),
        ({"gpus_per_sampler": 2.0}, "distributed.gpus_per_sampler=2.0"),
        ({"sampler_kind": "vllm"}, "sampler_kind='vllm': this setting was removed; to sample with vLLM set"),
        ({"world_workers": 2}, "world_workers=2: this setting was removed"),
        ({"keep_units": False}, "keep_units=False: this setting was removed"),
        ({"samplers": 2, "upload_adapters_to_server": True}, "use either actors or servers to sample"),
        ({"inference_server_url": "http://a:1,http://a:1/"}, "http://a:1 appears twice"),
        ({"inference_server_url": ("http://a:1", "")}, "one address is empty"),
    ):
        raises(ConfigError, message, GRPOConfig, **settings)


def test_addresses_as_text_or_list() -> None:
    for given in ("http://a:1, http://b:2", ["http://a:1", "http://b:2"]):
        assert GRPOConfig(inference_server_url=given).server.urls == ("http://a:1", "http://b:2")
    written = GRPOConfig.from_overrides(["server.inference_server_url=http://a:1,http://b:2"])
    assert written.server.urls == ("http://a:1", "http://b:2")
