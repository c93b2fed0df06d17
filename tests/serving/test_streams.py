"""Streams: what each event says of its tokens; clients that go away before they have said what they want."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from typing import Any

import httpx
import pytest
from servers import RunningServer, serving
from test_server import ask, upload, wait_until

from covey.errors import CoveyError
from covey.serving.answers import Answering
from covey.serving.batching import Job
from covey.serving.requests import CompletionRequest


def events(server: RunningServer, path: str, **body: Any) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in ask(server, path, **body, stream=True).text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_events_name_the_version_of_their_tokens() -> None:
    """An upload between sampling and delivery changes nothing: the first three tokens are version 0's, the rest 7's."""

    class Engine:
        context_length, max_completion_length, vocabulary, version = 64, 16, 96, 9

        def submit(self, jobs: list[Job]) -> None:
            for version, token in ((0, 5), (0, 6), (0, 7), (7, 8)):
                assert jobs[0].on_tokens is not None
                jobs[0].on_tokens([token], [-1.0], version)
            jobs[0].on_end(CoveyError("the end"))

        def cancel(self, jobs: list[Job]) -> None:
            pass

    class Tokenizer:
        eos_token_id = None

        def decode(self, ids: list[int], **_: Any) -> str:
            return "x" * len(ids)

    async def versions() -> list[int]:
        answering = Answering(Engine(), Tokenizer(), "tiny")  # type: ignore[arg-type]
        said = [event async for event in await answering.stream(CompletionRequest(prompt=[5], stream=True))]
        answering.close()
        found = [json.loads(event.removeprefix("data: ")) for event in said[:-1]]
        return [one["policy_version"] for one in found if "choices" in one]

    assert asyncio.run(versions()) == [0, 0, 0, 7]


def test_log_probabilities_have_tokens_and_roles_come_once() -> None:
    with serving() as server:
        body: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 4, "seed": 1, "ignore_eos": True, "logprobs": 0}
        whole = ask(server, **body).json()["choices"][0]["logprobs"]
        assert len(whole["tokens"]) == len(whole["token_logprobs"]) == 4
        parts = [event["choices"][0]["logprobs"] for event in events(server, "/v1/completions", **body)]
        assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "n": 2, "ignore_eos": True}
        choices = [event["choices"][0] for event in events(server, "/v1/chat/completions", **chat)]
        for index in (0, 1):
            roles = [choice["delta"].get("role") for choice in choices if choice["index"] == index]
            assert roles[0] == "assistant"
            assert set(roles[1:]) == {None}


@pytest.mark.parametrize("path", ["/v1/completions", "/upload_adapter"])
def test_half_a_body_leaves_no_traceback(path: str, caplog: pytest.LogCaptureFixture) -> None:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n"
    head += "content-type: multipart/form-data; boundary=x\r\n\r\n{"
    with serving() as server, caplog.at_level(logging.WARNING):
        for _ in range(10):
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as gone:
                gone.sendall(head.encode())
        time.sleep(0.5)
        assert httpx.get(f"{server.url}/health", timeout=10, trust_env=False).status_code == 200
    assert not [record.getMessage() for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


def test_a_completion_is_finished_or_cancelled() -> None:
    """Of two completions in one request the shorter is over when the client goes away: one of each is counted."""
    with serving(max_rows=2) as server:
        choices = [[[5, 6]], None]
        body = {"prompt": [5], "n": 2, "max_tokens": 200, "ignore_eos": True, "choices": choices, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False) as response:
            next(response.iter_lines())
        wait_until(lambda: server.batching.load == (0, 0))
        counts = server.batching.counts
        wait_until(lambda: counts.completions + counts.cancelled >= 2)
        assert counts.completions + counts.cancelled == 2
        assert upload(server).status_code == 200
        assert counts.completions + counts.cancelled == 2
