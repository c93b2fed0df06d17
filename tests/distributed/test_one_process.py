"""Units in one process and on two `covey serve`: the same run wherever it is cut, killed or resumed."""

import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import covey, data, ended_well, events, finished, learned, train
from servers import ServerProcess

from covey import GRPOConfig, GRPOTrainer
from covey.distributed.fleet import Fleet
from covey.distributed.servers import RemoteMember
from covey.errors import ConfigError, ServingError
from covey.observe.run_folder import RunFolder
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


def trained_on(settings: dict[str, Any], folder: Path, *servers: ServerProcess, **changes: Any) -> GRPOTrainer:
    where = {"inference_server_url": ",".join(server.url for server in servers), "output_dir": str(folder)}
    where |= {"upload_adapters_to_server": True, "server_retry_seconds": 1.0, "samplers": 0}
    trainer = GRPOTrainer(args=GRPOConfig(**(settings | where | changes)), **data())
    trainer.train()
    return trainer


def assert_alike(trainer: GRPOTrainer, other: GRPOTrainer) -> None:
    """The same texts in the first step, and the same numbers but for rounding, which batches of servers change."""
    texts = [RunFolder.read(one.args.run.output_dir).read_completions(1) for one in (trainer, other)]
    assert [row["completion"] for row in texts[0]] == [row["completion"] for row in texts[1]]
    for ours, theirs in zip(trainer.state.log_history, other.state.log_history, strict=True):
        assert ours["step"] == theirs["step"]
        for name in ("reward", "loss", "grad_norm", "num_tokens", "policy_version", "eval/reward"):
            assert ours.get(name, 0) == pytest.approx(theirs.get(name, 0), rel=1e-3, abs=1e-5), name
        assert ours.get("sampling/sampling_logp_difference/max", 0.0) < 1e-3


def kill_in_unit(monkeypatch: pytest.MonkeyPatch, doomed: ServerProcess, at: int) -> None:
    """The server takes the request and dies before it answers."""
    begin, calls = RemoteMember.begin, itertools.count(1)

    def stopping(member: RemoteMember, *arguments: Any) -> Any:
        if member.name == doomed.url and next(calls) == at:
            assert doomed._process is not None
            os.kill(doomed._process.pid, signal.SIGSTOP)
            threading.Timer(0.5, doomed.kill).start()
        return begin(member, *arguments)

    monkeypatch.setattr(RemoteMember, "begin", stopping)


@pytest.mark.slow
def test_a_server_that_is_killed_costs_a_unit(
    by_units: Any, model_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    with ServerProcess(model_folder) as first, ServerProcess(model_folder) as second:
        gone = ServerProcess(model_folder)
        with pytest.raises(ServingError, match=rf"{gone.url}/health does not answer.*Start it \(covey serve, vllm"):
            trained_on(by_units, tmp_path / "run", first, gone)
        one = trained_on(by_units, tmp_path / "one", first)
        assert_alike(trained_on(by_units, tmp_path / "two", first, second), one)
        kill_in_unit(monkeypatch, second, at=4)
        killed = trained_on(by_units, tmp_path / "killed", first, second, max_restarts=0)
        assert_alike(killed, one)
        assert sum(record.get("samplers/reissued_units", 0) for record in killed.state.log_history) == 1
        (sentence,) = events(tmp_path / "killed", "sampler")
        assert sentence.startswith(f"sampler 2 ({second.url}) failed while sampling: ")
        assert "1 time in a row: the run continues with 1 of 2" in sentence


@pytest.mark.slow
def test_a_server_that_comes_back(by_units: Any, model_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    with ServerProcess(model_folder) as only:
        kill, killed = only.kill, threading.Event()

        def kill_and_start() -> None:
            kill()
            if not killed.is_set():
                killed.set()
                only.begin()  # the run waits for it; this thread may not outlive the test

        monkeypatch.setattr(only, "kill", kill_and_start)
        kill_in_unit(monkeypatch, only, at=3)
        run = trained_on(by_units, tmp_path / "run", only, max_restarts=1000)
        monkeypatch.undo()
        assert killed.is_set()
        assert_alike(run, trained_on(by_units, tmp_path / "again", only))
    first, *others = [record["samplers/restarts"] for record in run.state.log_history if "loss" in record]
    assert first >= 1
    assert others == [0, 0, 0]
