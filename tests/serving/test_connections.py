"""Connections that say nothing, little or too slowly, and a great many of them; web pages of others; tokens."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import pytest
from servers import RunningServer, serving

from covey.errors import ConfigError
from covey.serving import InferenceClient, ServeSettings
from covey.serving.connections import ConnectionLimits

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


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as server:
        yield server


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
