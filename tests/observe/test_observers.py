"""Who watches a run: the run folder, the screen; and trackers: what they are told, and what they cannot do to a run."""

import io
import json
import logging
import os
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from rich.console import Console

from covey import GRPOTrainer
from covey.config import GRPOConfig
from covey.errors import ConfigError, RunFolderError
from covey.observe import BaseObserver, ConsoleProgress, Observers, RunFolder, RunFolderWriter, make_observers
from covey.observe.console import format_number, visible
from covey.observe.trackers import MLflowTracker, Sender, _Tracker, bounded_table, bounded_text, is_due
from fakes import raises

HELD_OUT = {"eval/accuracy": 0.25, "eval/accuracy_low": 0.1, "eval/accuracy_high": 0.5}
ROWS = [{"group": 0, "sample": n, "prompt": "p", "completion": "c" * 2000, "reward": 1.0} for n in range(5)]


def tell_a_run(observers: Observers) -> None:
    about = {"total_steps": 2, "name": "demo", "run_id": "abc", "start_step": 0}
    observers.on_run_start({"optim": {"learning_rate": 0.1}}, about)
    observers.on_eval(0, HELD_OUT)
    for step in (1, 2):
        observers.on_progress("sampling", 3, 8)
        observers.on_step(step, {"reward": step / 10, "kl": float("nan"), "note": "text"})
        observers.on_completions(step, ROWS)
    observers.on_event("diagnosis", "all is well")
    observers.on_run_end("finished")


def told_by_observers(run: RunFolder) -> list[str]:
    return [event["message"] for event in run.read_events() if event["kind"] == "observer"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create(tmp_path / "my-run") as run:
        yield run


def test_a_broken_observer_of_events_does_not_recurse() -> None:
    class AlwaysBroken(BaseObserver):
        def on_event(self, kind: str, message: str) -> None:
            raise ValueError(kind)

    observers = Observers([AlwaysBroken(), AlwaysBroken()])
    observers.on_event("a", "b")
    assert observers.active == []


def test_a_run_that_cannot_be_written_ends(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    observers = Observers([RunFolderWriter(run), BaseObserver()])
    observers.on_step(1, {})

    def full(*_args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        raises(RunFolderError, r"the disk is full; free some space", observers.on_step, 2, {})
    assert [record["step"] for record in run.read_metrics()] == [1]


def test_the_run_folder_gets_everything_but_completions_that_are_not_wanted(run: RunFolder) -> None:
    tell_a_run(make_observers((), run, console=False, log_completions=False))
    assert run.completion_steps() == []
    run.truncate_after(-1)
    tell_a_run(make_observers("none", run, console=False))
    rest = {"kl": None, "note": "text"}
    assert run.read_metrics() == [{"step": 0, **HELD_OUT}, *({"step": n, "reward": n / 10, **rest} for n in (1, 2))]
    assert run.read_completions(2) == ROWS
    assert [event["message"] for event in run.read_events()] == 2 * ["started", "all is well", "finished"]


def test_plain_console_prints_a_line_every_few_steps() -> None:
    text = io.StringIO()
    progress = ConsoleProgress(Console(file=text, width=200), logging_steps=2, num_completions_to_print=1)
    progress.on_run_start({}, {"total_steps": 5, "name": "demo [bold]"})
    for step in range(1, 6):
        progress.on_step(step, {"reward": step / 7, "kl": 0.0123456, "completions/mean_length": 31.0})
        progress.on_completions(step, [{"completion": "[red]5[/red]\x1b[2J", "reward": 1.0}, {"completion": "hidden"}])
    progress.on_eval(5, {"eval/accuracy": 0.425, "eval/accuracy_low": 0.36, "eval/accuracy_high": 0.492})
    progress.on_run_end("finished")
    lines = text.getvalue().splitlines()
    assert lines[0] == "demo [bold]: 5 steps"
    assert [line.split("  left")[0] for line in lines if line.startswith("step")] == [
        f"step {step}/5  reward {reward}  KL 0.0123  length 31.0"
        for step, reward in ((2, "0.286"), (4, "0.571"), (5, "0.714"))
    ]
    assert lines.count("  reward 1.00: [red]5[/red]?[2J") == 2
    assert "evaluation at step 5: accuracy 0.425 (95 %: 0.360 to 0.492)" in lines
    assert lines[-1].startswith("finished after ")
    progress.on_step(6, {"reward": 0.5})  # what was held out is many steps old: it says of which one it is
    assert text.getvalue().splitlines()[-1].startswith("step 6/5  reward 0.500  held-out 0.425 (step 5)")
    assert "hidden" not in text.getvalue()
    last = {"step": 3, "eval/reward": 0.9, "eval/accuracy": 0.3}
    progress.on_run_start({}, {"total_steps": 9, "start_step": 4, "name": "demo", "last_eval": last})  # a resume
    progress.on_step(6, {"reward": 0.5})
    assert text.getvalue().splitlines()[-1].startswith("step 6/9  reward 0.500  held-out 0.300 (step 3)")
    by_optimiser = {"schedule": {"max_optimizer_steps": 7}, "algorithm": {"num_iterations": 2, "num_minibatches": 1}}
    progress.on_run_start(by_optimiser, {"total_steps": 4, "start_step": 1, "name": "demo", "last_eval": last})
    progress.on_step(4, {"reward": 0.5})
    progress.on_event("adapter", "adapter/ holds the adapter of step 2, beside step_000002")
    *_, begun, line, said = text.getvalue().splitlines()
    for step in range(1, 6):
        progress.on_event("skipped", f"step {step}: nothing to train on")
    progress.on_run_end("finished")
    skipped = ["skipped: step 6: nothing to train on", "skipped: 5 steps in all, see log.txt"]
    assert text.getvalue().splitlines()[-3:-1] == skipped
    assert begun == "demo: 7 steps, from step 2"
    assert line.startswith("step 7/7  reward 0.500  held-out 0.300 (step 6)")
    assert said == "adapter: adapter/ holds the adapter of step 4, beside step_000002"


def test_a_notebook_has_one_output_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, shown, now = Mock(), Mock(), [100.0]
    shown.return_value = handle
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=shown))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    text = io.StringIO()
    progress = ConsoleProgress(Console(file=text, force_jupyter=True), logging_steps=2)
    progress.on_run_start({}, {"total_steps": 3, "name": "demo"})
    shown.assert_called_once_with({"text/plain": "demo: 3 steps"}, raw=True, display_id=True)
    progress.on_progress("sampling", 3, 8)  # a moment later
    assert handle.update.call_count == 0
    for step in (1, 2, 3):
        progress.on_step(step, {"reward": step / 10})
        now[0] += 1
    progress.on_eval(3, HELD_OUT)
    progress.on_progress("sampling", 4, 8)
    now[0] += 1
    progress.on_progress("sampling", 5, 8)
    outputs = [each.args[0]["text/plain"] for each in handle.update.call_args_list]
    shows = [f"step {step}/3  reward 0.{step}00  left 0 s" for step in (1, 2, 3)]
    assert [output.splitlines()[-1] for output in outputs[:3]] == shows
    evaluation = "evaluation at step 3: accuracy 0.250 (95 %: 0.100 to 0.500)"
    before = f"demo: 3 steps\n{evaluation}\nstep 3/3  reward 0.300  left 0 s"
    assert outputs[3:] == [before, f"{before}  sampling 5/8"]
    progress.on_run_end("finished")
    assert handle.update.call_args.args[0]["text/plain"].splitlines() == [*before.splitlines(), "finished after 4 s"]
    assert (shown.call_count, text.getvalue()) == (1, "")


def test_live_console_shows_a_bar_and_ends_cleanly() -> None:
    text = io.StringIO()
    tell_a_run(Observers([ConsoleProgress(Console(file=text, width=120, force_terminal=True))]))
    shown = text.getvalue()
    assert all(words in shown for words in ("2/2", "reward 0.200", "accuracy 0.250"))
    assert "finished after" in shown.rstrip().splitlines()[-1]
    assert shown.count("\x1b[?25h") == shown.count("\x1b[?25l") == 1  # the cursor is given back


def test_untrusted_text_is_made_harmless_and_numbers_short() -> None:
    assert visible("a\x1b]0;title\x07\nb\u202e") == "a?]0;title?\nb?"
    assert (visible("x" * 500, 3), visible("xxx", 3)) == ("xxx [...]", "xxx")
    numbers = {0.5: "0.500", 1e-5: "1.00e-05", 7: "7", 123.0: "123", None: "-", float("nan"): "-", "a": "-"}
    assert [format_number(value) for value in numbers] == list(numbers.values())


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard", "mlflow"])
def test_a_missing_tracker_says_what_to_install(run: RunFolder, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(name, name), None)
    raises(ConfigError, rf"pip install 'covey\[{name}\].* run.report_to", make_observers, name, run, console=False)


def test_unknown_trackers_are_refused(run: RunFolder) -> None:
    for names, folder, words in (
        ("wandbb", run, "did you mean 'wandb'"),
        (["zzz"], run, "tensorboard, wandb, trackio, mlflow, none"),
        ("wandb", None, "needs a run folder"),
    ):
        raises(ConfigError, words, make_observers, names, folder, console=False)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Mock:
    monkeypatch.setitem(sys.modules, "wandb", fake := Mock())
    return fake


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_run_trackers(run: RunFolder, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fake = Mock(Table=lambda columns, data, allow_mixed_types: (columns, data))
    monkeypatch.setitem(sys.modules, name, fake)
    tell_a_run(make_observers([name, name], run, console=False, report_completions=2))
    (_, _, options), *rest = fake.mock_calls
    assert (options["name"], options["config"]) == ("my-run", {"optim": {"learning_rate": 0.1}})
    assert (options["resume"], options.get("id")) == ("allow", "abc" if name == "wandb" else None)
    columns = ["group", "sample", "prompt", "completion", "reward"]
    sent = {"completions": (columns, [[0, n, "p", "c" * 1000 + " [...]", 1.0] for n in range(2)])}
    heads, events = ["step", "kind", "message"], [[0, "run", "started"], [2, "diagnosis", "all is well"]]
    assert rest == [
        call.log({"events": (heads, events[:1])}, step=0),
        call.log(HELD_OUT, step=0),
        call.log({"reward": 0.1}, step=1),
        call.log(sent, step=1),
        call.log({"reward": 0.2}, step=2),
        call.log(sent, step=2),
        call.log({"events": (heads, events)}, step=2),
        call.log({"events": (heads, [*events, [2, "run", "finished"]])}, step=2),
        call.finish(),
    ]


def test_completions_stay_here_unless_asked_for(run: RunFolder, wandb: Mock) -> None:
    tell_a_run(make_observers("wandb", run, console=False))
    sent = [name for told in wandb.log.call_args_list for name in told.args[0]]
    assert ("reward" in sent, "completions" in sent) == (True, False)


def test_tensorboard(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module := Mock())
    observers = make_observers("tensorboard", run, console=False, logging_steps=2, report_completions=1)
    observers.on_run_start({}, {"start_step": 3})
    for step in (4, 5):
        observers.on_step(step, {"reward": 0.5, "kl": None})
        observers.on_completions(step, [{"completion": "# no\nheading", "reward": 1.0}, {"completion": "second"}])
    observers.on_run_end("failed")
    assert module.mock_calls == [
        call.SummaryWriter(str(run.path / "tensorboard"), purge_step=4),
        call.SummaryWriter().add_text("event/run", "    resumed at step 3", 3),
        call.SummaryWriter().add_scalar("reward", 0.5, 4),
        call.SummaryWriter().add_text("completions", "    completion: # no\n    heading\n    reward: 1.0", 4),
        call.SummaryWriter().add_text("event/run", "    failed", 5),
        call.SummaryWriter().close(),
    ]


def test_mlflow(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    entities = Mock(Param=lambda *entry: entry, Metric=lambda name, value, _, step: (name, value, step))
    monkeypatch.setitem(sys.modules, "mlflow", fake := Mock(entities=entities))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    client = fake.MlflowClient.return_value
    client.create_run.return_value.info.run_id = "r1"
    client.search_runs.side_effect = [[], [client.create_run.return_value]]
    tell_a_run(make_observers("mlflow", run, console=False, report_completions=1))
    first = client.mock_calls.copy()
    client.reset_mock()
    again = make_observers("mlflow", run, console=False)
    again.on_run_start({}, {"run_id": "abc", "start_step": 2})
    again.on_run_end("stopped")
    fake.MlflowClient.assert_called_with(tracking_uri=f"sqlite:///{run.path / 'mlflow' / 'mlflow.db'}")
    assert client.search_runs.call_args.args[1] == "tags.`covey.run_id` = 'abc'"
    batches = [told for told in first if told[0] == "log_batch"]
    assert batches[0] == call.log_batch("r1", params=[("optim.learning_rate", "0.1")])
    assert call.log_batch("r1", metrics=[(name, value, 0) for name, value in HELD_OUT.items()]) in batches
    texts = [told.args[1:] for told in first if told[0] == "log_text"]
    (text, path) = next(told for told in texts if "completions" in told[1])
    assert (path, len(json.loads(text)["data"])) == ("completions/step_000001.json", 1)
    events = [text for text, path in texts if path == "events/from_step_000000.txt"][-1]
    assert events == "step 0 run: started\nstep 2 diagnosis: all is well\nstep 2 run: finished\n"
    assert first[-1] == call.set_terminated("r1", "FINISHED")
    assert call.update_run("r1", status="RUNNING") in client.mock_calls
    assert call.log_text("r1", "step 2 run: resumed at step 2\n", "events/from_step_000002.txt") in client.mock_calls
    assert client.mock_calls[-1] == call.set_terminated("r1", "KILLED")


def no_network(*_: Any, **__: Any) -> None:
    raise ConnectionError("no network")


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_tracker_that_fails(run: RunFolder, wandb: Mock, monkeypatch: Any, caplog: Any, where: str) -> None:
    monkeypatch.setattr(wandb, where, no_network if where != "init" else lambda **_: sys.exit("no key"))
    with caplog.at_level(logging.WARNING, logger="covey.observe"):
        observers = make_observers("wandb", run, console=False)
        tell_a_run(observers)
    assert [type(each).__name__ for each in observers.active] == ["RunFolderWriter"]
    assert [line["step"] for line in run.read_metrics()] == [0, 1, 2]
    (said,) = told_by_observers(run)
    assert said.startswith("WandbTracker failed in on_")
    assert ("SystemExit('no key')" if where == "init" else "no network") in said
    assert caplog.text.count("is switched off") == 1


def test_a_tracker_that_hangs_does_not_hold_a_run(run: RunFolder, wandb: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    release, started = threading.Event(), time.monotonic()
    monkeypatch.setattr(wandb, "init", lambda **_: release.wait(60))
    monkeypatch.setattr(_Tracker, "patience", 0.2)
    tell_a_run(make_observers("wandb", run, console=False))
    release.set()
    assert time.monotonic() - started < 30
    (said,) = told_by_observers(run)
    assert "did not finish within 0.2 s" in said


def test_a_run_trains_on_without_its_tracker(wandb: Mock, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def length(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    monkeypatch.setattr(wandb, "log", no_network)
    args = GRPOConfig(**settings | {"num_generations": 2, "report_to": "wandb", "report_completions": 2})
    GRPOTrainer(reward_funcs=[length], args=args, train_dataset=[{"prompt": "say one"}, {"prompt": "say two"}]).train()
    run = RunFolder.read(settings["output_dir"])
    assert (run.last_state(), len(told_by_observers(run))) == ("finished", 1)


def test_too_many_waiting_calls_are_an_error() -> None:
    release, done = threading.Event(), []
    sender = Sender("slow", most=2, patience=30)
    sender.submit(release.wait, 60)
    sender.submit(done.append, 1)

    def more() -> None:
        for _ in range(5):
            sender.submit(done.append, 1)

    raises(TimeoutError, "2 calls wait for slow, which takes none", more)
    release.set()
    sender.close()
    assert len(done) in (1, 2)  # whether the first call had begun by then
    assert not any(thread.name == "covey-slow" for thread in threading.enumerate())


def test_long_runs_send_rarely_and_tables_are_bounded() -> None:
    taken = [number for number in range(1, 1001) if is_due(number)]
    assert taken[:103] == [*range(1, 51), *range(52, 152, 2), 152, 156, 160]
    assert sum(map(is_due, range(1, 1_000_001))) < 750
    rows = [{"reward": float(n), "completion": "x" * 5000, "other": [n], "bad": "\ud800\0"} for n in range(1000)]
    columns, table = bounded_table(rows, 3)
    assert (columns, table[2]) == (["completion", "reward", "other", "bad"], ["x" * 1000 + " [...]", 2.0, "[2]", "??"])
    assert (len(table), len(bounded_table(rows, 1000)[1])) == (3, 200)
    columns, table = bounded_table([{f"column {n}": "y" * 5000 for n in range(100)}] * 200, 200)
    assert len(columns) == 30
    assert len(json.dumps(table)) < 260_000
    assert (bounded_table([], 5), bounded_text("abc", 2)) == (([], []), "ab [...]")


def test_events_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", Mock())
    tracker = MLflowTracker(tmp_path, "run")
    told: list[Any] = []
    monkeypatch.setattr(tracker, "_send_events", lambda every: told.append(every[-1]))
    for number in range(600):
        tracker.on_event("note", f"{number} " + "z" * 5000)
    tracker._sender.close()
    assert (len(told), len(told[0][2]) < 2100) == (500, True)
    assert told[-1][2] == "further events are in events.jsonl of the run folder"
