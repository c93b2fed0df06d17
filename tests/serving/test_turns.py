"""How much is done for one connection at a time: counted, since seconds say nothing on a busy machine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from servers import RunningServer, serving
from test_server import ask, upload, wait_until
from test_uploads import good, send

from covey.serving import ServeSettings
from covey.serving.connections import Connections, _Connection, _Wire

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as server:
        yield server


def answered(server: RunningServer, sent: bytes) -> bytes:
    """What the server says until it closes the connection, or to the end of its first answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as one:
        try:
            one.sendall(sent)
        except (BrokenPipeError, ConnectionResetError):
            return b""
        try:
            return one.recv(1 << 16)
        except ConnectionResetError:
            return b""


def healthy(server: RunningServer) -> bool:
    return httpx.get(f"{server.url}/health", timeout=30, trust_env=False).status_code == 200


HOSTILE = {
    "a body in chunks of one byte": CHUNKED + b"1\r\nx\r\n" * 5000,
    "chunks after the answer": GET + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 5000,
    "a long line before a chunk": CHUNKED + b"1;" + b"a" * 1000 + b"\r\nx\r\n",
    "blanks before a chunk": CHUNKED + b"1;" + b" " * 60_000 + b"\nz\r\nx\r\n",
    "blanks in a head": GET + b"x:" + b" " * 60_000 + b"\0\r\n\r\n",
    "a head of many lines": GET + b"a:\r\n" * 15_000 + b"\r\n",
    "a folded head": GET + b"x: y\r\n" + b" z\r\n" * 15_000 + b"\r\n",
    "many lines after a body": CHUNKED + b"0\r\n" + b"a:\r\n" * 15_000 + b"\r\n",
    "many requests at once": (GET + b"\r\n") * 500,
    "many bad requests at once": (CHUNKED[:-31] + b"content-length: 2\r\n\r\n{}") * 200,
}


@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE)
def test_a_turn_reads_a_few_events_of_one_connection(
    server: RunningServer, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen at most, of lines that are short and few; and a body in tiny chunks is over after a few thousand."""
    counts: list[int] = []
    read_on, next_event = _Connection.read_on, _Wire.next_event

    def turn(self: _Connection) -> None:
        counts.append(0)
        read_on(self)

    def event(self: _Wire) -> Any:
        counts[-1] += self.left > 0
        return next_event(self)

    monkeypatch.setattr(_Connection, "read_on", turn)
    monkeypatch.setattr(_Wire, "next_event", event)
    said = answered(server, sent)
    assert b"500 Internal" not in said
    assert healthy(server)
    assert max(counts) <= 16
    assert sum(counts) < 4000


def test_who_has_cost_the_least_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """While forty bodies in small chunks wait for their turns, the next turn is that of a new request."""
    turns: list[tuple[int, list[int]]] = []
    read_on = _Connection.read_on

    def turn(self: _Connection) -> None:
        turns.append((self.wire.events, [one.wire.events for one in self._among._ready]))
        read_on(self)

    monkeypatch.setattr(_Connection, "read_on", turn)
    with serving() as server:
        many = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(40)]
        for one in many:
            one.sendall(CHUNKED + b"1\r\nx\r\n" * 900)
        assert healthy(server)
        for one in many:
            one.close()
    assert max(len(waiting) for _, waiting in turns) > 3
    assert all(mine <= min(waiting, default=mine) for mine, waiting in turns)


def test_a_flood_of_small_requests_does_not_hold_up_a_large_one() -> None:
    """Twenty connections always have a new request: a body that has cost a thousand events still gets its turns."""
    among, turns = Connections(), []

    class One:
        def __init__(self, events: int) -> None:
            self.wire, self.cost = SimpleNamespace(events=events), events

        def read_on(self) -> None:
            turns.append(self.cost)
            self.wire.events += self.cost
            if len(turns) < 400:
                among.wants_turn(self)  # type: ignore[arg-type]

    async def flood() -> None:
        for one in (One(1000), *(One(0) for _ in range(20))):
            among.wants_turn(one)  # type: ignore[arg-type]
        while among._ready:
            await asyncio.sleep(0)

    asyncio.run(flood())
    assert turns.count(1000) >= 400 // 40  # one in twenty would be as fair as can be
    assert turns.count(0) >= 300


@pytest.mark.parametrize("chunk", [1, 64, 5000])
def test_ordinary_bodies_in_chunks_are_read(server: RunningServer, chunk: int) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1, "user": "u" * 800}).encode()
    parts = [body[place : place + chunk] for place in range(0, len(body), chunk)]
    sent = CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\nx: y\r\n\r\n"
    assert b"200 OK" in answered(server, sent)


def test_requests_one_after_the_other_on_one_connection(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as one:
        one.sendall((GET + b"\r\n") * 300)
        arrived = b""
        while arrived.count(b'"status":"ok"') < 300:
            part = one.recv(1 << 16)
            assert part
            arrived += part


def test_slow_uploads_hold_up_no_other() -> None:
    head = b"POST /upload_adapter HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n"
    head += b"content-type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
    with serving(settings=ServeSettings("tiny")) as server:
        many = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(30)]
        for one in many:
            one.sendall(head)
        assert upload(server, trainer="one").status_code == 200
        for one in many:
            one.close()


def test_uploads_share_the_disk_and_the_oldest_that_is_not_whole_makes_room() -> None:
    settings = ServeSettings("tiny", max_upload_bytes=60_000)
    head = b"POST /upload_adapter HTTP/1.1\r\nhost: localhost\r\ncontent-length: 60000\r\n\r\n"
    with serving(settings=settings) as server:
        many = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(9)]
        for one in many:
            one.sendall(head + b"x" * 59_000)  # nine times that are more than eight of the largest
        assert b"429" in many[0].recv(1 << 16)
        assert send(server, *good(1)).status_code == 200
        for one in many:
            one.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_version_is_not_other_weights_of_the_same_number(stream: bool) -> None:
    with serving(max_rows=1) as server:
        assert upload(server, 1, policy_version=1).status_code == 200
        long = {"prompt": [5, 6], "max_tokens": 200, "ignore_eos": True, "n": 2}
        busy = threading.Thread(target=lambda: ask(server, **long))
        busy.start()
        wait_until(lambda: server.batching.load[0] == 1)
        found: list[httpx.Response] = []
        asks = {"prompt": [5], "max_tokens": 2, "policy_version": 1, "stream": stream}
        waiting = threading.Thread(target=lambda: found.append(ask(server, **asks)))
        waiting.start()
        wait_until(lambda: server.batching.load[1] == 2 or not busy.is_alive())
        assert upload(server, 2, policy_version=1, restart=True).json()["policy_version"] == 1
        busy.join()
        waiting.join()
        assert found[0].status_code == (200 if stream else 409)
        assert "with other weights, of a trainer that began again" in found[0].text
        assert ask(server, prompt=[5], max_tokens=2, policy_version=1).status_code == 200


def test_what_runs_is_not_finished_by_the_weights_of_a_trainer_that_began_again() -> None:
    with serving(swap="continue") as server:
        assert upload(server, 1, policy_version=1).status_code == 200
        long = {"prompt": [5, 6], "max_tokens": 200, "ignore_eos": True, "policy_version": 1, "n": 8}
        found: list[httpx.Response] = []
        busy = threading.Thread(target=lambda: found.append(ask(server, **long)))
        busy.start()
        wait_until(lambda: server.batching.load[0] == 8)
        assert upload(server, 2, policy_version=1, restart=True).status_code == 200
        busy.join()
        assert found[0].status_code == 409


def test_metrics_do_not_tell_somebodys_prompt_token_by_token() -> None:
    """Each next token of it, and a wrong one in its place: what is told after the one is told after the other."""

    def told(server: RunningServer) -> list[str]:
        text = httpx.get(f"{server.url}/metrics", trust_env=False).text
        return [line for line in text.splitlines() if "reused" in line]

    secret = [10 + place * 7 % 80 for place in range(12)]
    seen = []
    for wrong in (0, 1):
        with serving() as server:
            assert ask(server, prompt=secret, max_tokens=1).status_code == 200
            for known in range(1, len(secret)):
                guess = [*secret[:known], secret[known] + wrong]
                assert ask(server, prompt=guess, max_tokens=1).status_code == 200
                seen.append((wrong, known, told(server)))
            assert server.batching.counts.reused_tokens == 0
    assert [one[1:] for one in seen if one[0]] == [one[1:] for one in seen if not one[0]]


def test_whole_blocks_that_are_reused_are_told() -> None:
    with serving() as server:
        for _ in range(2):
            assert ask(server, prompt=[5, 6] * 100, max_tokens=1).status_code == 200
        text = httpx.get(f"{server.url}/metrics", trust_env=False).text
        assert "covey_reused_tokens 128.0" in text  # of 199 or 200
        assert "covey_reused_prompts" not in text
