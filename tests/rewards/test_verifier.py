"""Verifiers and reward functions, each as the other; process pools: limits that fire, order, failures."""

import base64
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from slow_verifiers import Slow

import covey.rewards
from covey.errors import RewardError
from covey.processes import start_python
from covey.rewards import SupportsBatchVerify, Verifier, exact_match, reward_name, verifier_from_reward
from covey.rewards.jail import messages
from covey.rewards.parallel import _SERVE, NotStartedError, ParallelVerifier, WorkerPool
from fakes import raises


class Longer(Verifier):
    def verify(self, prompt: str, completion: str) -> float:
        return float(len(completion) - len(prompt))


class Batched(Verifier):
    def batch_verify(self, pairs: list[tuple[str, str]]) -> list[float]:
        return [float(index) for index, _ in enumerate(pairs)]


def test_one_pair_at_a_time_or_all_at_once() -> None:
    assert (Longer().batch_verify([("ab", "abc"), ("abc", "a")]), Batched().verify("a", "b")) == ([1.0, -2.0], 0.0)
    assert isinstance(Longer(), SupportsBatchVerify)
    raises(NotImplementedError, "neither verify nor batch_verify", Verifier().verify, "a", "b")
    # and it is a reward function
    prompts = ["ab", [{"role": "system", "content": "long text"}, {"role": "user", "content": "ab"}]]
    completions = ["abc", [{"role": "assistant", "content": "abcd"}]]
    assert Longer()(prompts=prompts, completions=completions, answer=["x", "y"]) == [1.0, 2.0]


def test_a_failing_pair_is_named() -> None:
    class Picky(Verifier):
        def verify(self, prompt: str, completion: str) -> float:
            return float(completion)

    with pytest.raises(RewardError, match="ValueError: could not convert") as caught:
        Picky().batch_verify([("p", "1"), ("p", "one")])
    assert (caught.value.function, caught.value.sample) == ("Picky", 1)


def test_a_reward_function_is_a_verifier() -> None:
    verifier = verifier_from_reward(exact_match(), {"2+3=": {"answer": "5"}})
    assert verifier.batch_verify([("2+3=", "5"), ("2+3=", "6"), ("1+1=", "2")]) == [1.0, 0.0, None]
    assert (verifier.verify("2+3=", "5"), reward_name(verifier)) == (1.0, "exact_match")

    def length(completions: list[str], scale: float) -> list[float]:
        return [scale * len(text) for text in completions]

    assert (reward_name(length), reward_name(partial(length, scale=2.0))) == ("length", "length")
    assert reward_name(Longer()) == "Longer"


def test_what_the_room_exports() -> None:
    assert sorted(covey.rewards.__all__) == covey.rewards.__all__
    assert all(hasattr(covey.rewards, name) for name in covey.rewards.__all__)


sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def verifier() -> Iterator[ParallelVerifier]:
    with closing(ParallelVerifier(Slow(), workers=2, time_limit=0.5)) as verifier:
        yield verifier


def test_order_and_values(verifier: ParallelVerifier) -> None:
    assert (verifier.batch_verify([("", "a" * n) for n in range(9)]), verifier.batch_verify([])) == (list(range(9)), [])
    assert (verifier.batch_verify([("", "none")]), verifier.__name__) == ([None], "Slow")
    assert verifier(["p"], ["abc"]) == [3.0]


def test_a_limit_that_fires(verifier: ParallelVerifier) -> None:
    verifier.batch_verify([("", "a"), ("", "b")])  # the processes have started
    began = time.monotonic()
    scores = verifier.batch_verify([("", "forever"), ("", "a"), ("", "bb"), ("", "forever"), ("", "ccc")])
    assert scores == [0.0, 1.0, 2.0, 0.0, 3.0]
    assert time.monotonic() - began < 15
    assert verifier.timeouts >= 2


def test_failures_are_told(verifier: ParallelVerifier) -> None:
    for text, message in (("raise", "ValueError: no"), ("exit", "ended"), ("memory", "MemoryError")):
        with pytest.raises(RewardError, match=message) as caught:
            verifier.batch_verify([("", "ok"), ("", text)])
        assert caught.value.sample == 1
        assert verifier.batch_verify([("", "abc")]) == [3.0]  # and the next one is served


def test_two_processes_work_and_one_that_was_killed_while_idle_is_replaced(verifier: ParallelVerifier) -> None:
    processes = {int(found or 0) for found in verifier.batch_verify([("", "pid")] * 40)}
    assert len(processes) == 2
    for process in processes:
        os.kill(process, signal.SIGKILL)
    time.sleep(0.2)
    assert verifier.batch_verify([("", "abc")] * 2) == [3.0, 3.0]


def test_what_cannot_be_found_in_another_process() -> None:
    def local() -> None: ...

    local.__module__ = "__main__"
    raises(RewardError, "move it to a module", WorkerPool, local, workers=1, time_limit=1)


def test_a_process_that_does_not_start_is_no_items_fault() -> None:
    pool = WorkerPool(len, workers=1, time_limit=1, prepare=partial(int, "one"))
    raises(NotStartedError, "did not start: .*invalid literal", pool.map, [("a",)])


def test_a_process_without_its_parent_ends_itself() -> None:
    process, channel = start_python(_SERVE)
    with channel:
        functions = base64.b64encode(pickle.dumps((Slow().verify, int))).decode()
        messages.send(channel.fileno(), {"functions": functions, "files": {}, "memory": 4 << 30})
        assert messages.receive(channel.fileno()) == {"ready": True}
        messages.send(channel.fileno(), {"item": ["", "forever"], "alarm": 0.2})
        assert process.wait(30) == -signal.SIGALRM
