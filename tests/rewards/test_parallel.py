"""Process pools: limits that fire, order, failures."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.errors import RewardError
from covey.rewards.parallel import ParallelVerifier, WorkerPool

sys.path.insert(0, str(Path(__file__).parent))
from slow_verifiers import Slow


@pytest.fixture(scope="module")
def verifier() -> Iterator[ParallelVerifier]:
    verifier = ParallelVerifier(Slow(), workers=2, time_limit=0.5)
    yield verifier
    verifier.close()


def test_order_and_values(verifier: ParallelVerifier) -> None:
    assert verifier.batch_verify([("", "a" * n) for n in range(9)]) == list(range(9))
    assert verifier.batch_verify([]) == []
    assert verifier.batch_verify([("", "none")]) == [None]
    assert verifier.__name__ == "Slow"
    assert verifier(["p"], ["abc"]) == [3.0]


def test_a_limit_that_fires(verifier: ParallelVerifier) -> None:
    verifier.batch_verify([("", "a"), ("", "b")])  # the processes have started
    began = time.monotonic()
    scores = verifier.batch_verify([("", "forever"), ("", "a"), ("", "bb"), ("", "forever"), ("", "ccc")])
    assert scores == [0.0, 1.0, 2.0, 0.0, 3.0]
    assert time.monotonic() - began < 15
    assert verifier.timeouts >= 2


def test_several_processes_work(verifier: ParallelVerifier) -> None:
    assert len(set(verifier.batch_verify([("", "pid")] * 40))) == 2


@pytest.mark.parametrize(
    ("text", "message"), [("raise", "ValueError: no"), ("exit", "ended"), ("memory", "MemoryError")]
)
def test_failures_are_told(verifier: ParallelVerifier, text: str, message: str) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        verifier.batch_verify([("", "ok"), ("", text)])
    assert caught.value.sample == 1
    assert verifier.batch_verify([("", "abc")]) == [3.0]  # and the next one is served


def test_a_process_that_was_killed_while_idle_is_replaced(verifier: ParallelVerifier) -> None:
    for process in {int(found or 0) for found in verifier.batch_verify([("", "pid")] * 40)}:
        os.kill(process, signal.SIGKILL)
    time.sleep(0.2)
    assert verifier.batch_verify([("", "abc")] * 2) == [3.0, 3.0]


def test_what_cannot_be_found_in_another_process() -> None:
    def local() -> None: ...

    local.__module__ = "__main__"
    with pytest.raises(RewardError, match="move it to a module"):
        WorkerPool(local, workers=1, time_limit=1)
