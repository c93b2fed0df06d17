"""Signals end a run with a checkpoint of its last whole step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.signals import EndedError, ended_by_signals, held


@pytest.fixture(autouse=True)
def not_ignored() -> Iterator[None]:
    """A shell's background job, such as these tests may be, ignores SIGINT."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # the interpreter handles it between two instructions


def test_a_signal_ends_the_block() -> None:
    for number, reason in ((signal.SIGINT, "keyboard"), (signal.SIGTERM, "ended by SIGTERM")):
        before = signal.getsignal(number)
        with pytest.raises(EndedError, match=reason) as caught, ended_by_signals():
            send(number)
        assert caught.value.exit_status == 128 + number
        assert signal.getsignal(number) is before
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what is ignored stays so
    try:
        with ended_by_signals():
            send(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_it_waits_for_what_must_be_whole() -> None:
    done = []

    def step(*signals: int) -> None:
        with ended_by_signals():
            with held():
                for number in signals:
                    send(number)
                done.append("the step")
            done.append("the next one")

    with pytest.raises(EndedError, match="SIGTERM"):
        step(signal.SIGTERM)
    assert done == ["the step"]
    with pytest.raises(EndedError, match="keyboard"):
        step(signal.SIGTERM, signal.SIGINT)  # no patience
    assert done == ["the step"]
    with ended_by_signals(), held():
        pass


def test_an_interrupt_of_somebody_elses_keeps_the_signal() -> None:
    def wait() -> None:
        try:
            send(signal.SIGTERM)
        except KeyboardInterrupt:  # as compiled code does that asks for signals
            raise KeyboardInterrupt from None

    with pytest.raises(EndedError, match="SIGTERM"), ended_by_signals():
        wait()


def test_the_command_leaves_a_checkpoint_of_its_last_step(recipe_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train", recipe_folder, f"run.output_dir={run}", "schedule.max_steps=1000", "run.save_steps=0"]
    command = [sys.executable, "-m", "covey", *map(str, words), "run.report_to=[]"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_text().count("time/update") < 2:
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            process.terminate()
            printed, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, "ended by SIGTERM" in printed) == (143, True)
    steps = (run / "metrics.jsonl").read_text().count("time/update")
    assert (run / "checkpoints" / f"step_{steps:06d}" / "COMPLETE").exists()
