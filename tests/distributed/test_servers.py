"""Two `covey serve` processes as one sampler; one is killed while it samples a unit.

Servers batch as they like and remember prompts, so log-probabilities differ in the last digits with who was asked what.
"""

import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from runs import data, events
from servers import ServerProcess

from covey import GRPOConfig, GRPOTrainer
from covey.distributed.servers import RemoteMember
from covey.errors import ServingError
from covey.observe.run_folder import RunFolder


def train(settings: dict[str, Any], folder: Path, *servers: ServerProcess, **changes: Any) -> GRPOTrainer:
    where = {"inference_server_url": ",".join(server.url for server in servers), "output_dir": str(folder)}
    where |= {"upload_adapters_to_server": True, "server_retry_seconds": 1.0, "samplers": 0}
    trainer = GRPOTrainer(args=GRPOConfig(**(settings | where | changes)), **data())
    trainer.train()
    return trainer


def assert_alike(trainer: GRPOTrainer, other: GRPOTrainer) -> None:
    """The same texts in the first step, and the same numbers up to rounding in all."""
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
def test_a_server_that_is_not_there_is_named_and_one_that_is_killed_costs_a_unit(
    by_units: dict[str, Any], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ServerProcess(model_folder) as first, ServerProcess(model_folder) as second:
        gone = ServerProcess(model_folder)
        with pytest.raises(ServingError, match=rf"{gone.url}/health does not answer.*Start it \(covey serve, vllm"):
            train(by_units, tmp_path / "run", first, gone)
        one = train(by_units, tmp_path / "one", first)
        assert_alike(train(by_units, tmp_path / "two", first, second), one)

        kill_in_unit(monkeypatch, second, at=4)
        killed = train(by_units, tmp_path / "killed", first, second, max_restarts=0)
        assert_alike(killed, one)
        assert sum(record.get("samplers/reissued_units", 0) for record in killed.state.log_history) == 1
        (sentence,) = events(tmp_path / "killed", "sampler")
        assert sentence.startswith(f"sampler 2 ({second.url}) failed while sampling: ")
        assert "1 times in a row: the run continues with 1 of 2" in sentence


@pytest.mark.slow
def test_a_server_that_comes_back_is_used_again(
    by_units: dict[str, Any], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ServerProcess(model_folder) as only:
        kill, killed = only.kill, threading.Event()

        def kill_and_start() -> None:
            kill()
            if not killed.is_set():
                killed.set()
                only.begin()  # the run waits for it; this thread may not outlive the test

        monkeypatch.setattr(only, "kill", kill_and_start)
        kill_in_unit(monkeypatch, only, at=3)
        run = train(by_units, tmp_path / "run", only, max_restarts=1000)
        monkeypatch.undo()
        assert killed.is_set()
        assert_alike(run, train(by_units, tmp_path / "again", only))
    first, *others = [record["samplers/restarts"] for record in run.state.log_history if "loss" in record]
    assert first >= 1
    assert others == [0, 0, 0]
