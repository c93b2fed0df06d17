"""Trackers, by fakes that have the interface of the real ones: what they are told, how much of it, and what they cannot
do to a run.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from covey import GRPOTrainer
from covey.config import GRPOConfig
from covey.observe import RunFolder, make_observers
from covey.observe.observers import Observers
from covey.observe.trackers import MLflowTracker, Sender, _Tracker, bounded_table, bounded_text, is_due


def tell_a_run(observers: Observers) -> None:
    observers.on_run_start({"optim": {"learning_rate": 0.1}}, {"name": "demo", "run_id": "abc", "start_step": 0})
    observers.on_eval(0, {"eval/accuracy": 0.25})
    for step in (1, 2):
        observers.on_step(step, {"reward": step / 10, "kl": float("nan"), "note": "text"})
        rows = [{"group": 0, "sample": n, "prompt": "p", "completion": "c" * 2000, "reward": 1.0} for n in range(5)]
        observers.on_completions(step, rows)
    observers.on_event("diagnosis", "all is well")
    observers.on_run_end("finished")


class FakeRun(ModuleType):
    """`wandb` or `trackio`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[Any] = []
        self.Table = lambda columns, data, allow_mixed_types: (columns, data)

    def init(self, **options: Any) -> None:
        self.calls.append(options)

    def log(self, values: dict[str, Any], step: int) -> None:
        self.calls.append((step, values))

    def finish(self) -> None:
        self.calls.append("finish")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_run_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fake = FakeRun(name)
    monkeypatch.setitem(sys.modules, name, fake)
    with RunFolder.create(tmp_path / "my-run") as run:
        tell_a_run(make_observers([name, name], run, console=False, report_completions=2))
    options, *rest = fake.calls
    assert (options["name"], options["config"]) == ("my-run", {"optim": {"learning_rate": 0.1}})
    assert options["resume"] == "allow"
    assert options.get("id") == ("abc" if name == "wandb" else None)
    columns = ["group", "sample", "prompt", "completion", "reward"]
    sent = {"completions": (columns, [[0, n, "p", "c" * 1000 + " [...]", 1.0] for n in range(2)])}
    heads = ["step", "kind", "message"]
    assert rest == [
        (0, {"events": (heads, [[0, "run", "started"]])}),
        (0, {"eval/accuracy": 0.25}),
        (1, {"reward": 0.1}),
        (1, sent),
        (2, {"reward": 0.2}),
        (2, sent),
        (2, {"events": (heads, [[0, "run", "started"], [2, "diagnosis", "all is well"]])}),
        (2, {"events": (heads, [[0, "run", "started"], [2, "diagnosis", "all is well"], [2, "run", "finished"]])}),
        "finish",
    ]


def test_completions_stay_here_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRun("wandb")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with RunFolder.create(tmp_path / "run") as run:
        tell_a_run(make_observers("wandb", run, console=False))
    assert not [call for call in fake.calls if isinstance(call, tuple) and "completions" in call[1]]


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int | None = None) -> None:
            calls.append((folder, purge_step))

        def add_text(self, tag: str, text: str, step: int | None = None) -> None:
            calls.append((tag, text, step))

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            calls.append((tag, value, step))

        def close(self) -> None:
            calls.append("close")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    with RunFolder.create(tmp_path) as run:
        observers = make_observers("tensorboard", run, console=False, logging_steps=2, report_completions=1)
        observers.on_run_start({}, {"start_step": 3})
        for step in (4, 5):
            observers.on_step(step, {"reward": 0.5, "kl": None})
            observers.on_completions(step, [{"completion": "# no\nheading", "reward": 1.0}, {"completion": "second"}])
        observers.on_run_end("failed")
    assert calls == [
        (str(tmp_path / "tensorboard"), 4),
        ("event/run", "    resumed at step 3", 3),
        ("reward", 0.5, 4),
        ("completions", "    completion: # no\n    heading\n    reward: 1.0", 4),
        ("event/run", "    failed", 5),
        "close",
    ]


class FakeMLflow(ModuleType):
    """`mlflow`, and its client."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.calls: list[Any] = []
        self.runs: list[Any] = []
        self.entities = SimpleNamespace(
            Param=lambda *entry: entry, Metric=lambda name, value, _, step: (name, value, step)
        )

    def MlflowClient(self, tracking_uri: str | None) -> Any:  # noqa: N802
        self.uri = tracking_uri
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="7")

    def search_runs(self, experiments: list[str], wanted: str, max_results: int) -> list[Any]:
        assert wanted == "tags.`covey.run_id` = 'abc'"
        return self.runs

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        self.runs = [SimpleNamespace(info=SimpleNamespace(run_id="r1"))]
        return self.runs[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **named: self.calls.append((name, *arguments, *named.values()))


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with RunFolder.create(tmp_path / "run") as run:
        tell_a_run(make_observers("mlflow", run, console=False, report_completions=1))
        first, fake.calls = fake.calls, []
        again = make_observers("mlflow", run, console=False)
        again.on_run_start({}, {"run_id": "abc", "start_step": 2})
        again.on_run_end("stopped")
    assert fake.uri == f"sqlite:///{tmp_path / 'run' / 'mlflow' / 'mlflow.db'}"
    names = [call[0] for call in first]
    assert first[names.index("log_batch")] == ("log_batch", "r1", [("optim.learning_rate", "0.1")])
    assert ("log_batch", "r1", [("eval/accuracy", 0.25, 0)]) in first
    (text, path) = next(call[2:] for call in first if call[0] == "log_text" and "completions" in call[3])
    assert path == "completions/step_000001.json"
    assert len(json.loads(text)["data"]) == 1
    events = [call[2] for call in first if call[-1] == "events/from_step_000000.txt"][-1]
    assert events == "step 0 run: started\nstep 2 diagnosis: all is well\nstep 2 run: finished\n"
    assert first[-1] == ("set_terminated", "r1", "FINISHED")
    assert ("update_run", "r1", "RUNNING") in fake.calls
    assert ("log_text", "r1", "step 2 run: resumed at step 2\n", "events/from_step_000002.txt") in fake.calls
    assert fake.calls[-1] == ("set_terminated", "r1", "KILLED")


# ---------------------------------------------------------------------- what a tracker cannot do


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    fake = FakeRun("wandb")

    def fail(*_: Any, **__: Any) -> None:
        sys.exit("no key") if where == "init" else (_ for _ in ()).throw(ConnectionError("no network"))

    monkeypatch.setattr(fake, where, fail)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with RunFolder.create(tmp_path / "run") as run, caplog.at_level(logging.WARNING, logger="covey.observe"):
        observers = make_observers("wandb", run, console=False)
        tell_a_run(observers)
        assert [type(each).__name__ for each in observers] == ["RunFolderWriter"]
        assert [line["step"] for line in run.read_metrics()] == [0, 1, 2]
        said = [event["message"] for event in run.read_events() if event["kind"] == "observer"]
    assert len(said) == 1
    assert ("SystemExit('no key')" if where == "init" else "no network") in said[0]
    assert caplog.text.count("is switched off") == 1


def test_a_tracker_that_hangs_does_not_hold_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    fake = FakeRun("trackio")
    monkeypatch.setattr(fake, "init", lambda **_: release.wait(60))
    monkeypatch.setitem(sys.modules, "trackio", fake)
    monkeypatch.setattr(_Tracker, "patience", 0.2)
    started = time.monotonic()
    with RunFolder.create(tmp_path / "run") as run:
        tell_a_run(make_observers("trackio", run, console=False))
        (said,) = [event["message"] for event in run.read_events() if event["kind"] == "observer"]
    release.set()
    assert time.monotonic() - started < 30
    assert "did not finish within 0.2 s" in said


def test_a_run_trains_on_without_its_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    fake = FakeRun("wandb")

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(fake, "log", fail)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    args = GRPOConfig(
        model=str(model_folder), output_dir=str(tmp_path / "run"), num_generations=2, prompts_per_step=1, max_steps=2,
        max_completion_length=4, lora_r=4, progress=False, report_to="wandb", report_completions=2,
    )  # fmt: skip
    rows = [{"prompt": "say one"}, {"prompt": "say two"}]

    def length(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    GRPOTrainer(reward_funcs=[length], args=args, train_dataset=rows).train()
    run = RunFolder.read(tmp_path / "run")
    assert run.is_finished()
    assert len([event for event in run.read_events() if event["kind"] == "observer"]) == 1


def test_too_many_waiting_calls_are_an_error() -> None:
    release, done = threading.Event(), []
    sender = Sender("slow", most=2, patience=30)
    sender.submit(release.wait, 60)
    sender.submit(done.append, 1)

    def more() -> None:
        for _ in range(5):
            sender.submit(done.append, 1)

    with pytest.raises(TimeoutError, match="2 calls wait for slow, which takes none"):
        more()
    release.set()
    sender.close()
    assert len(done) in (1, 2)  # whether the first call had begun by then
    assert not any(thread.name == "covey-slow" for thread in threading.enumerate())


# ---------------------------------------------------------------------- how much


def test_long_runs_send_rarely() -> None:
    taken = [number for number in range(1, 1001) if is_due(number)]
    assert taken[:50] == list(range(1, 51))
    assert taken[50:100] == list(range(52, 152, 2))
    assert taken[100:103] == [152, 156, 160]
    assert sum(map(is_due, range(1, 1_000_001))) < 750


def test_tables_are_bounded() -> None:
    rows = [{"reward": float(n), "completion": "x" * 5000, "other": [n], "bad": "\ud800\0"} for n in range(1000)]
    columns, table = bounded_table(rows, 3)
    assert columns == ["completion", "reward", "other", "bad"]
    assert table[2] == ["x" * 1000 + " [...]", 2.0, "[2]", "??"]
    assert len(table) == 3
    assert len(bounded_table(rows, 1000)[1]) == 200
    wide = [{f"column {n}": "y" * 5000 for n in range(100)}] * 200
    columns, table = bounded_table(wide, 200)
    assert len(columns) == 30
    assert len(json.dumps(table)) < 260_000
    assert bounded_table([], 5) == ([], [])
    assert bounded_text("abc", 2) == "ab [...]"


def test_events_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", FakeMLflow())
    tracker = MLflowTracker(tmp_path, "run")
    told: list[Any] = []
    monkeypatch.setattr(tracker, "_send_events", lambda every: told.append(every[-1]))
    for number in range(600):
        tracker.on_event("note", f"{number} " + "z" * 5000)
    tracker._sender.close()
    assert len(told) == 500
    assert len(told[0][2]) < 2100
    assert told[-1][2] == "further events are in events.jsonl of the run folder"
