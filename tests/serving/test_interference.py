"""What one client asks does not cost another one its completions, its time or the server's memory."""

import gc
import json
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from servers import RunningServer, begun, refused, wait_until

from covey.errors import GenerationError
from covey.rollout.turns import Row
from covey.serving import batching
from covey.serving.answers import Answering
from covey.serving.batching import BatchingEngine, Job
from covey.types import Request, SamplingSettings
from fakes import slow

OTHERS = {"prompt": [[5, 6, 7], [9, 10]], "max_tokens": 150, "ignore_eos": True, "seed": 3, "return_token_ids": True}
MARK = 77
"""A token for which the model's logits are spoilt."""
LARGE = {
    "text": {"prompt": "hello world " * 80_000},
    "lists": {"prompt": [[5]] * 500_000},
    "texts": {"prompt": ["a"] * 400_000},
    "ids": {"prompt": [5] * 1_000_000},
    "message": {"messages": [{"role": "user", "content": "x" * 1_000_000}]},
    "messages": {"messages": [{"role": "user", "content": "x"}] * 4096, "max_tokens": 1},
    "stop": {"prompt": "x", "stop": ["a"] * 500_000},
    "streams": {"prompt": "x", "streams": [[1] * 1_000_000]},
    "choices": {"prompt": "x", "choices": [[[5]] * 500_000]},
}


def said(server: RunningServer) -> list[list[int]]:
    return [choice["token_ids"] for choice in server.ask(**OTHERS).json()["choices"]]


def beside_others(server: RunningServer, do: Callable[[], Any]) -> Any:
    """`do` while the others' completions run; these must be what they are alone."""
    alone, others = said(server), begun(said, server)
    wait_until(lambda: server.batching.load[0] >= 2)
    result = do()
    assert others.result() == said(server) == alone
    return result


def sampled(server: RunningServer, request: Request, **settings: Any) -> Any:
    """One completion straight from the engine, past everything that HTTP refuses."""
    done: Future[Any] = Future()
    server.batching.submit([Job(request, SamplingSettings(**settings), done.set_result)])
    return done.result(60)


def mostly_slow(*values: Any) -> list[Any]:
    """The first is in every run."""
    return [values[0], *map(slow, values[1:])]


WRONG = ([[[]]], [None, [[5]]], [[[5], []]], [[[-1]]], [[[5, 1 << 40]]], [[["x"]]], [[]])


@pytest.mark.parametrize("choices", [[[[1000]]], *map(slow, WRONG)])
def test_bad_choices_are_refused(server: RunningServer, choices: Any) -> None:
    ask = {"prompt": [5, 6], "choices": choices, "return_support": True}
    assert "choices" in refused(beside_others(server, lambda: server.ask(**ask)))


@pytest.mark.parametrize("choices", mostly_slow(((1000,), (1001,)), (), ((),), ((-5,), (-6,))))
def test_bad_choices_come_to_an_end(server: RunningServer, choices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second line: nothing is checked before the engine."""
    monkeypatch.setattr(BatchingEngine, "_check", lambda self, job: None)
    request = Request(np.array([5, 6]), (1,), choices)
    found = beside_others(server, lambda: sampled(server, request, max_tokens=5))
    assert isinstance(found, GenerationError)
    assert "choices allow" in str(found)


def spoil(server: RunningServer, monkeypatch: pytest.MonkeyPatch, more: Callable[[], Any] = lambda: None) -> None:
    """No number among the logits of a row that begins with the mark, and `more` at such a step."""
    forward = server.engine._runner.forward

    def spoilt(step: Any) -> torch.Tensor:
        logits = forward(step).clone()
        marked = [place for place, ids in enumerate(step.histories()) if MARK in ids[:2]]
        if marked:
            more()
            logits[marked] = torch.nan
        return logits

    monkeypatch.setattr(server.engine._runner, "forward", spoilt)


@pytest.mark.parametrize("stream", mostly_slow(False, True))
def test_bad_logits_end_their_row(server: RunningServer, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    spoil(server, monkeypatch)
    for _ in range(2):  # nor is anything of it remembered
        answer = beside_others(server, lambda: server.ask(prompt=[MARK, 5], n=3, max_tokens=5, stream=stream))
        assert "logits are not finite" in answer.text
        assert answer.status_code == (200 if stream else 400)
    monkeypatch.undo()
    assert server.ask(prompt=[MARK, 5], max_tokens=5).status_code == 200


def test_values_that_are_not_finite_stay_nowhere(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of a row that went wrong: slots and prompts of later rows are the same memory."""
    cache, alone = server.engine._cache, said(server)

    def stores() -> list[torch.Tensor]:
        return [store for segment in cache._segments for pair in segment.stores.values() for store in pair]

    def spoil_memory() -> None:
        for store in stores():
            store[store == 0] = torch.nan  # whatever nobody else uses

    spoil(server, monkeypatch, spoil_memory)
    assert server.ask(prompt=[MARK, 5, 6], max_tokens=5).status_code == 400
    monkeypatch.undo()
    place = cache.block_tensors(0, 0, 1, cache.slot_tokens)
    assert all(bool(part.isfinite().all()) for part in place)  # the slot that it had
    for store in stores():  # and the rest, which this test spoilt
        store.nan_to_num_(0.0)
    assert said(server) == alone


def test_choices_of_one_cost_others_no_memory(server: RunningServer) -> None:
    plain = Request(np.array([5, 6, 7]), (1,))
    other = begun(sampled, server, plain, max_tokens=60, keep_support=True, temperature=1.0)
    choices = tuple((5 + i, *range(5, 40)) for i in range(3))
    chosen = sampled(server, Request(np.array([5, 6]), (1,), choices), max_tokens=40)
    cut = sampled(server, plain, max_tokens=3, keep_support=True, top_k=5)
    assert np.diff(chosen.completion.support.offsets).tolist() == [3] + [1] * 35
    assert np.diff(cut.completion.support.offsets).tolist() == [5, 5, 5]
    assert other.result().completion.support is None  # nothing was cut off: it is the whole vocabulary


def test_kept_ids_and_prompts_are_bounded(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_MOST_KEPT_IDS", 2000)
    monkeypatch.setattr(server.batching, "longest_prompt", 100)
    body = {"prompt": [5, 6], "top_k": 90, "return_support": True, "max_tokens": 20, "ignore_eos": True}
    assert "return_support: more than 2000 ids" in refused(beside_others(server, lambda: server.ask(**body, n=8)))
    assert server.ask(**body).status_code == 200
    assert "has memory for 100" in refused(beside_others(server, lambda: server.ask(prompt=[5] * 101)))


def slowest_health(server: RunningServer, do: Callable[[], Any]) -> tuple[float, Any]:
    """How long somebody else waits at most meanwhile, and what `do` returns."""
    slowest, url = 0.0, f"{server.url}/health"
    with httpx.Client(trust_env=False, timeout=30) as http:
        busy = begun(do)
        while not busy.done():
            started = time.monotonic()
            assert http.get(url).status_code == 200
            slowest = max(slowest, time.monotonic() - started)
            time.sleep(0.01)
    return slowest, busy.result()


@pytest.mark.parametrize("path", mostly_slow("/v1/completions", "/v1/chat/completions"))
def test_texts_are_read_beside_the_loop(server: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Tokenising takes three seconds here: nobody else waits for it."""
    encoded = Answering._encoded

    def slow(self: Answering, text: str, *, special: bool) -> list[int]:
        time.sleep(3.0)
        return encoded(self, text, special=special)

    monkeypatch.setattr(Answering, "_encoded", slow)
    what = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    slowest, answer = slowest_health(server, lambda: server.ask(path, **what, max_tokens=1))
    assert answer.status_code == 200
    assert slowest < 1.5


@pytest.mark.parametrize("name", ["text", *mostly_slow(*[*LARGE][1:])])
def test_large_bodies_are_refused_and_hold_up_nobody(server: RunningServer, name: str) -> None:
    content = json.dumps(LARGE[name]).encode()
    assert len(content) < 4 << 20
    path = "/v1/chat/completions" if "messages" in LARGE[name] else "/v1/completions"
    slowest, answers = slowest_health(server, lambda: [server.post(path, content=content) for _ in range(3)])
    assert slowest < 3.0
    assert {answer.status_code for answer in answers} == {400}
    assert len(answers[0].json()["error"]["message"]) < 1000


def test_completions_leave_nothing_behind(server: RunningServer) -> None:
    for start in range(30):
        server.ask(prompt=[5 + start, 6], max_tokens=3, n=4)
    gc.collect()
    assert sum(type(one) is Row for one in gc.get_objects()) <= 8
