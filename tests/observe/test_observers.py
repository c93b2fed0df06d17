import io
import logging
import sys

import pytest
from rich.console import Console

from covey.errors import ConfigError, RunFolderError
from covey.observe import BaseObserver, ConsoleProgress, Observers, RunFolder, RunFolderWriter, make_observers
from covey.observe.console import format_number, visible


class Recorder(BaseObserver):
    def __init__(self):
        self.seen = []

    def on_step(self, step, metrics):
        self.seen.append((step, dict(metrics)))

    def on_event(self, kind, message):
        self.seen.append((kind, message))


class Broken(BaseObserver):
    calls = 0

    def on_step(self, step, metrics):
        self.calls += 1
        raise ConnectionError("tracker is down")


def tell_a_run(observers):
    observers.on_run_start({"seed": 1}, {"total_steps": 2, "name": "demo", "run_id": "abc", "start_step": 0})
    observers.on_eval(0, {"eval/accuracy": 0.25, "eval/accuracy_low": 0.1, "eval/accuracy_high": 0.5})
    for step in (1, 2):
        observers.on_progress("sampling", 3, 8)
        observers.on_step(step, {"reward": step / 10, "kl": float("nan"), "note": "text"})
        observers.on_completions(step, [{"completion": "5", "reward": 1.0}])
    observers.on_event("doctor", "all is well")
    observers.on_run_end("finished")


def test_a_broken_observer_is_switched_off_and_the_others_go_on(caplog):
    broken, recorder = Broken(), Recorder()
    observers = Observers([broken, recorder])
    with caplog.at_level(logging.WARNING, logger="covey.observe"):
        observers.on_step(1, {"reward": 0.1})
        observers.on_step(2, {"reward": 0.2})
    assert broken.calls == 1
    assert caplog.text.count("Broken failed in on_step") == 1
    assert [entry for entry in recorder.seen if isinstance(entry[0], int)] == [
        (1, {"reward": 0.1}),
        (2, {"reward": 0.2}),
    ]
    kind, message = recorder.seen[1]
    assert kind == "observer"
    assert "tracker is down" in message


def test_a_broken_observer_of_events_does_not_recurse():
    class AlwaysBroken(BaseObserver):
        def on_event(self, kind, message):
            raise ValueError(kind)

    observers = Observers([AlwaysBroken(), AlwaysBroken()])
    observers.on_event("a", "b")
    assert list(observers) == []


def test_a_run_that_cannot_be_written_ends(tmp_path, monkeypatch):
    import os

    with RunFolder.create(tmp_path) as run:
        observers = Observers([RunFolderWriter(run), Recorder()])
        observers.on_step(1, {})

        def full(*_args):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(RunFolderError, match=r"the disk is full; free some space"):
                observers.on_step(2, {})
        assert [record["step"] for record in run.read_metrics()] == [1]


def test_the_run_folder_gets_everything(tmp_path):
    with RunFolder.create(tmp_path) as run:
        tell_a_run(make_observers("none", run, console=False))
        assert run.read_metrics() == [
            {"step": 0, "eval/accuracy": 0.25, "eval/accuracy_low": 0.1, "eval/accuracy_high": 0.5},
            {"step": 1, "reward": 0.1, "kl": None, "note": "text"},
            {"step": 2, "reward": 0.2, "kl": None, "note": "text"},
        ]
        assert run.read_completions(2) == [{"completion": "5", "reward": 1.0}]
        assert [event["message"] for event in run.read_events()] == ["started", "all is well", "finished"]


def test_completions_can_be_left_out(tmp_path):
    with RunFolder.create(tmp_path) as run:
        tell_a_run(make_observers((), run, console=False, log_completions=False))
        assert run.completion_steps() == []


def test_plain_console_prints_a_line_every_few_steps():
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
        "step 2/5  reward 0.286  KL 0.0123  length 31.0",
        "step 4/5  reward 0.571  KL 0.0123  length 31.0",
        "step 5/5  reward 0.714  KL 0.0123  length 31.0",
    ]
    assert lines.count("  reward 1.00: [red]5[/red]?[2J") == 2
    assert "evaluation at step 5: accuracy 0.425 (95 %: 0.360 to 0.492)" in lines
    assert lines[-1].startswith("finished after ")
    progress.on_step(6, {"reward": 0.5})  # what was held out is many steps old: it says of which one it is
    assert text.getvalue().splitlines()[-1].startswith("step 6/5  reward 0.500  held-out 0.425 (step 5)")
    assert "hidden" not in text.getvalue()


def test_a_resumed_console_knows_what_was_held_out():
    text = io.StringIO()
    progress = ConsoleProgress(Console(file=text, width=200))
    last = {"step": 3, "eval/reward": 0.9, "eval/accuracy": 0.425}
    progress.on_run_start({}, {"total_steps": 9, "start_step": 4, "name": "demo", "last_eval": last})
    progress.on_step(5, {"reward": 0.5})
    assert text.getvalue().splitlines()[-1].startswith("step 5/9  reward 0.500  held-out 0.425 (step 3)")


def test_live_console_shows_a_bar_and_ends_cleanly():
    text = io.StringIO()
    console = Console(file=text, width=120, force_terminal=True)
    tell_a_run(Observers([ConsoleProgress(console)]))
    shown = text.getvalue()
    assert "2/2" in shown
    assert "reward 0.200" in shown
    assert "accuracy 0.250" in shown
    assert "finished after" in shown.rstrip().splitlines()[-1]
    assert shown.count("\x1b[?25h") == shown.count("\x1b[?25l") == 1  # the cursor is given back


def test_untrusted_text_is_made_harmless():
    assert visible("a\x1b]0;title\x07\nb\u202e") == "a?]0;title?\nb?"
    assert visible("x" * 500, 3) == "xxx [...]"
    assert visible("xxx", 3) == "xxx"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.500"),
        (1e-5, "1.00e-05"),
        (7, "7"),
        (123.0, "123"),
        (None, "-"),
        (float("nan"), "-"),
        ("a", "-"),
    ],
)
def test_numbers_for_people(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard", "mlflow"])
def test_a_missing_tracker_says_what_to_install(tmp_path, monkeypatch, name):
    module = {"tensorboard": "torch.utils.tensorboard"}.get(name, name)
    monkeypatch.setitem(sys.modules, module, None)
    with RunFolder.create(tmp_path) as run, pytest.raises(ConfigError) as caught:
        make_observers(name, run, console=False)
    assert f"pip install covey[{name}]" in str(caught.value)
    assert "run.report_to" in str(caught.value)


def test_unknown_trackers_are_refused(tmp_path):
    with RunFolder.create(tmp_path) as run:
        with pytest.raises(ConfigError, match="did you mean 'wandb'"):
            make_observers("wandbb", run, console=False)
        with pytest.raises(ConfigError, match="tensorboard, wandb, trackio, mlflow or 'none'"):
            make_observers(["zzz"], run, console=False)
    with pytest.raises(ConfigError, match="needs a run folder"):
        make_observers("wandb", console=False)
