"""Connections that say nothing, little, too much or too slowly; turns of reading; web pages of others; tokens."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from servers import RunningServer, ask, serving, upload, wait_until
from test_uploads import good, send

from covey.errors import ConfigError
from covey.serving import InferenceClient, ServeSettings
from covey.serving.connections import ConnectionLimits, Connections, _Connection, _Wire

SHORT = ConnectionLimits(head_seconds=0.5, idle_seconds=3, read_seconds=1.0, address=40, all=1000)
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


@contextmanager
def connected(server: RunningServer, count: int) -> Iterator[list[socket.socket]]:
    made = [connect(server) for _ in range(count)]
    try:
        yield made
    finally:
        for one in made:
            one.close()


def closed_after(one: socket.socket, seconds: float) -> float:
    """Seconds until the server closes a connection."""
    started = time.monotonic()
    one.settimeout(seconds)
    with suppress(ConnectionResetError):
        while one.recv(1 << 16):
            pass
    return time.monotonic() - started


def healthy(server: RunningServer) -> bool:
    answer = httpx.get(f"{server.url}/health", timeout=10, trust_env=False)
    done = httpx.post(
        f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=30, trust_env=False
    )
    return answer.status_code == done.status_code == 200


@pytest.mark.parametrize("said", [b"", b"G", HEAD, HEAD + b"x: y\r\n"], ids=["nothing", "a letter", "a line", "two"])
def test_heads_that_do_not_come_are_not_waited_for(said: bytes) -> None:
    with serving(limits=SHORT) as server, connected(server, 1) as (one,):
        if said:
            one.sendall(said)
        assert closed_after(one, 15) < 10
        assert healthy(server)


def test_a_head_letter_by_letter() -> None:
    with serving(limits=SHORT) as server, connected(server, 2) as (one, other):
        other.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")  # the second request of a connection is no other
        assert b"200 OK" in other.recv(1 << 16)
        stop = threading.Event()

        def letters() -> None:
            for _ in range(200):
                if stop.wait(0.1):
                    return
                for each in (one, other):
                    with suppress(OSError):
                        each.sendall(b"a")

        thread = threading.Thread(target=letters)
        thread.start()
        assert closed_after(one, 15) < 10
        assert closed_after(other, 15) < 10
        stop.set()
        thread.join()


def test_a_body_byte_by_byte_and_one_that_does_not_come() -> None:
    settings = ServeSettings("tiny", body_seconds=0.7)
    with serving(settings=settings, limits=SHORT) as server, connected(server, 2) as (one, other):
        one.sendall(HEAD + b"content-length: 1000\r\n\r\n")
        other.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(4):
            other.sendall(b"1\r\n{\r\n")
            time.sleep(0.1)
        assert b"408" in one.recv(1 << 16)
        assert b"408" in other.recv(1 << 16)
        assert healthy(server)


def test_an_answer_that_nobody_reads() -> None:
    with serving(limits=SHORT) as server:
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", server.port))
        body = {
            "prompt": [5, 6],
            "max_tokens": 200,
            "n": 64,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        text = json.dumps(body | {"return_support": True, "top_k": 60}).encode()  # some megabytes
        one.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(text) + text)
        until = time.monotonic() + 60
        while server.batching.counts.completions < 64:
            assert time.monotonic() < until
            time.sleep(0.05)
        time.sleep(4)
        one.settimeout(20)
        arrived = b""
        with suppress(ConnectionResetError):
            while part := one.recv(1 << 16):
                arrived += part
        one.close()
        length = int(arrived.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        assert 0 < len(arrived) < length  # what fitted the buffers, then it was over
        assert healthy(server)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"", id="silent"),
        pytest.param(HEAD, id="heads", marks=pytest.mark.slow),
        pytest.param(HEAD + b"content-length: 10\r\n\r\n", id="bodies", marks=pytest.mark.slow),
    ],
)
def test_many_connections_of_one_client(said: bytes) -> None:
    """The longest waiting makes room: the server answers as before."""
    limits = ConnectionLimits(head_seconds=60, idle_seconds=60, address=40, all=1000)
    with serving(limits=limits) as server, httpx.Client(base_url=server.url, timeout=20, trust_env=False) as early:
        assert early.get("/health").status_code == 200
        with connected(server, 0) as many:
            slowest = 0.0
            for count in range(300):
                many.append(connect(server))
                if said:
                    many[-1].sendall(said)
                if count % 20 == 0:
                    started = time.monotonic()
                    assert healthy(server)
                    slowest = max(slowest, time.monotonic() - started)
            assert slowest < 10
            assert early.get("/health").status_code == 200
            many[-1].sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" if not said else b"")
            assert not said or healthy(server)


@pytest.mark.slow
def test_those_that_are_served_are_not_sent_away() -> None:
    limits = ConnectionLimits(address=4)
    with serving(limits=limits, max_rows=4) as server:
        long = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "n": 12}
        found: list[httpx.Response] = []

        def one() -> None:
            found.append(httpx.post(f"{server.url}/v1/completions", json=long, timeout=120, trust_env=False))

        threads = [threading.Thread(target=one) for _ in range(4)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 30
        while sum(server.batching.load) < 48:
            assert time.monotonic() < until
            time.sleep(0.01)
        with connected(server, 1) as (fifth,):
            assert b"503" in fifth.recv(1 << 16)
        for thread in threads:
            thread.join()
        assert [answer.status_code for answer in found] == [200] * 4
        assert healthy(server)


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"origin": "https://evil.example"}, "Origin: https://evil.example"),
        ({"origin": "null"}, "Origin: null"),
        ({"origin": "http://localhost:1"}, "Origin: http://localhost:1"),
        ({"host": "evil.example"}, "Host: evil.example"),
        ({"host": "evil.example:PORT", "origin": "http://evil.example:PORT"}, "Host: evil.example"),
        ({"host": "192.168.1.5:PORT"}, "Host: 192.168.1.5"),
    ],
)
def test_pages_of_others_are_kept_out(server: RunningServer, headers: dict[str, str], words: str) -> None:
    headers = {name: value.replace("PORT", str(server.port)) for name, value in headers.items()}
    for path in ("/upload_adapter", "/release_trainer", "/v1/completions"):
        files = {"adapter_weights": b"x", "adapter_config": b"{}"}
        answer = httpx.post(server.url + path, files=files, headers=headers, timeout=30, trust_env=False)
        assert answer.status_code == 403
        assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("host", ["127.0.0.1:PORT", "localhost:PORT", "LOCALHOST:PORT", "[::1]:PORT", "127.0.0.1"])
@pytest.mark.parametrize("origin", [False, True])
def test_those_on_the_machine_come_in(server: RunningServer, host: str, origin: bool) -> None:
    host = host.replace("PORT", str(server.port))
    headers = {"host": host} | ({"origin": f"http://{host}"} if origin else {})
    answer = httpx.get(f"{server.url}/v1/models", headers=headers, timeout=30, trust_env=False)
    assert answer.status_code == 200


def test_with_a_token_pages_may_ask() -> None:
    headers = {"host": "covey.example", "origin": "https://ui.example", "authorization": "Bearer secret"}
    with serving(settings=ServeSettings("tiny", token="secret")) as server:
        assert httpx.get(f"{server.url}/v1/models", headers=headers, trust_env=False).status_code == 200


@pytest.mark.parametrize("token", ["pässwort", "two words", "line\n", "\x00"])
def test_tokens_that_no_header_carries(token: str) -> None:
    with pytest.raises(ConfigError, match="must be of visible ASCII characters"):
        ServeSettings("tiny", token=token)
    with pytest.raises(ConfigError, match="COVEY_SERVER_TOKEN"):
        InferenceClient("http://127.0.0.1:1", token)


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


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


def answers(server: RunningServer) -> bool:
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
    assert answers(server)
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
        assert answers(server)
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


@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.slow)])
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


@pytest.mark.slow
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
