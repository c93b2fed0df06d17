"""Reward functions in C code that hold Python's lock are named, and the process ends; signals end a run at a step."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from covey.signals import EndedError, ended_by_signals, held
from fakes import raises, slow

FUNCTIONS = """
import asyncio, ctypes, hashlib, os, re, signal, sys, time
import numpy as np
import covey.overseer
from covey.errors import RewardError
from covey.rollout.calls import AsyncRunner
from covey.rollout.scoring import Scorer
from covey.environments.actions import Call
from covey.rollout.tools import Calls, Order
from covey.types import Episode, Prompt

real = covey.overseer.start_python  # limits of a test in place of five seconds and a minute
covey.overseer.start_python = lambda code: real(
    f"import covey.overseer as o; o._SILENT_SECONDS, o._WORD_SECONDS = {sys.argv[3]}; {code}"
)
def regex(completions): return [float(bool(re.match("(a+)+$", "a" * 99 + "b")))]
def power(completions): return [float(pow(3, 10**11) > 0)]
def total(completions): return [float(sum(range(10**13)))]
def asleep(completions): ctypes.PyDLL(None).sleep(1000)
def derives(completions): hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2**31 - 1)
def quick(completions): return [1.0]
def waits(completions):
    time.sleep(1.0)
    return [0.5]
def waits_longer(completions):
    time.sleep(4.0)
    return [0.5]
async def soon(completions):
    await asyncio.sleep(0.01)
    return [1.0]
async def late(completions): await asyncio.sleep(1000)
async def blocks(completions): time.sleep(1000)
async def later_total(completions):
    await asyncio.sleep(0.01)
    return total(completions)
functions = [globals()[name] for name in sys.argv[1].removeprefix("tool").split()]
episode = Episode(np.array([1, 2]), np.array([False, True]), np.zeros(2, np.float32), "a", "stop", 0)
prompt = Prompt(np.array([1]), "p")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job
    signal.signal(signal.SIGINT, signal.default_int_handler)
print("begins", flush=True)
if sys.argv[1] == "tool":
    Calls(AsyncRunner(), 0.5).run([Order(0, Call("total", {"completions": []}), {"total": total})])
try:
    print(Scorer(functions, timeout=eval(sys.argv[2])).score([prompt], [episode])[0])
except RewardError as error:
    print(error)
"""


def begun(folder: Path, functions: str, timeout: float | None, silent: float = 1.0, word: float = 60.0) -> Any:
    file = folder / "rewards.py"
    file.write_text(FUNCTIONS)
    command = [sys.executable, str(file), functions, str(timeout), f"{silent}, {word}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begins\n"
    return process


def ended(process: subprocess.Popen[str], status: int) -> tuple[str, str]:
    printed, said = process.communicate(timeout=300)
    assert process.returncode == status, said
    return printed, said


def interrupted(folder: Path, functions: str, timeout: float | None) -> subprocess.Popen[str]:
    process = begun(folder, functions, timeout)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    return process


def line_of(words: str) -> int:
    return FUNCTIONS[: FUNCTIONS.index(words)].count("\n") + 1


@pytest.mark.parametrize(
    ("functions", "name", "at"),
    [
        ("quick power", "power", "def power"),
        slow("regex", "regex", "def regex"),
        slow("total", "total", "def total"),
        slow("asleep soon", "asleep", "def asleep"),
        slow("soon later_total late", "later_total", "def total"),
    ],
)
def test_a_function_that_holds_pythons_lock_ends_the_run(tmp_path: Path, functions: str, name: str, at: str) -> None:
    printed, said = ended(begun(tmp_path, functions, 0.5), -signal.SIGKILL)
    assert printed == ""
    (line,) = said.strip().splitlines()
    assert line.startswith(f"covey: reward function '{name}' at {tmp_path / 'rewards.py'}:{line_of(at)}, in ")
    assert all(words in line for words in ("did not return within reward_timeout=0.5 seconds", "resume the run"))


@pytest.mark.slow
def test_a_tool_that_holds_pythons_lock_is_named_with_its_limit(tmp_path: Path) -> None:
    _, said = ended(begun(tmp_path, "tool", 1000.0), -signal.SIGKILL)
    assert f"tool 'total' at {tmp_path}/rewards.py:{line_of('def total')}, in total did not return within " in said
    assert "within environment.step_seconds=0.5 seconds" in said


@pytest.mark.parametrize(
    ("functions", "name", "at"),
    [
        ("waits late soon", "late", "async def late"),
        slow("derives", "derives", "def derives"),
        slow("soon late blocks", "blocks", "async def blocks"),
    ],
)
def test_one_that_lets_others_run_is_an_error_with_its_line(tmp_path: Path, functions: str, name: str, at: str) -> None:
    printed, said = ended(begun(tmp_path, functions, 2.0), 0)
    assert said == ""
    where = f"{tmp_path / 'rewards.py'}:{line_of(at)}, in {name}"
    wanted = f"reward function '{name}' did not return within reward_timeout=2.0 seconds, and is at {where};"
    assert printed.startswith(wanted)


@pytest.mark.parametrize(("names", "timeout"), [("total", 1e3), slow("soon later_total", None), slow("derives", None)])
def test_an_interrupt_ends_what_does_not_hear_it(tmp_path: Path, names: str, timeout: float | None) -> None:
    printed, said = ended(interrupted(tmp_path, names, timeout), -signal.SIGKILL)
    assert printed == ""
    assert re.search(r"reward function '\w+' at \S+/rewards.py:\d+, in \w+ does not let the run end", said)


def test_an_interrupt_of_what_hears_it_is_an_interrupt_and_no_word_is_said_of_what_ends(tmp_path: Path) -> None:
    assert "covey:" not in ended(interrupted(tmp_path, "late", 1000.0), -signal.SIGINT)[1]
    assert ended(begun(tmp_path, "quick waits soon", 30.0, silent=0.3), 0) == ("[2.5]\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [1000.0, None])
def test_one_word_names_what_takes_long(tmp_path: Path, timeout: float | None) -> None:
    said = "\ncovey: reward function 'waits_longer' has been running for 0.1 s\n"
    assert ended(begun(tmp_path, "waits_longer", timeout, word=0.1), 0) == ("[0.5]\n", said)


def test_a_process_that_a_reward_forks_off_keeps_its_signals_to_itself() -> None:
    program = """
import os, signal
from covey.overseer import overseen
with overseen(["f"]):
    if os.fork() == 0:
        os._exit(signal.set_wakeup_fd(-1) + 2)
    print(os.waitstatus_to_exitcode(os.wait()[1]) - 2, signal.set_wakeup_fd(-1) > 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("-1 True\n", "")


@pytest.mark.slow
def test_a_run_whose_reward_hangs_in_c_code_is_resumed(recipe_folder: Path, tmp_path: Path) -> None:
    """It ends in its third step, with the checkpoint of the second; with the reward mended it goes on to the fourth."""

    def covey(*words: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "covey", *map(str, words)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    run, reward = tmp_path / "run", tmp_path / "counted.py"
    hanging = "def counted(prompts, completions, **columns):\n    {}\n    return [len(c) % 3.0 for c in completions]\n"
    reward.write_text(hanging.format("if columns['trainer_state'].global_step == 2: sum(range(10**13))"))
    words = [f"run.output_dir={run}", "schedule.max_steps=4", "run.save_steps=1", "run.report_to=[]"]
    words += [f"rewards.functions=['{reward}:counted']", "rewards.reward_timeout=1"]
    _, said = ended(covey("train", recipe_folder, *words), -signal.SIGKILL)
    assert f"reward function 'counted' at {reward}:2, in counted did not return within reward_timeout=1 s" in said
    reward.write_text(hanging.format("pass"))
    ended(covey("resume", run), 0)
    assert (run / "metrics.jsonl").read_text().count("time/update") == 4


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

    raises(EndedError, "SIGTERM", step, signal.SIGTERM)
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
