"""Connections that say nothing, little, too much or too slowly; turns of reading; web pages of others; tokens."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from servers import RunningServer, begun, refused, serving, wait_until

from covey.errors import ConfigError
from covey.serving import InferenceClient, ServeSettings
from covey.serving.connections import ConnectionLimits, Connections, _Connection, _Wire
from fakes import raises, slow

SHORT = ConnectionLimits(head_seconds=0.5, idle_seconds=3, read_seconds=1.0, address=40, all=1000)
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
HOSTS = ("127.0.0.1:PORT", "localhost:PORT", "LOCALHOST:PORT", "[::1]:PORT", "127.0.0.1")
PAGES = [
    *(({"origin": one}, f"Origin: {one}") for one in ("https://evil.example", "null", "http://localhost:1")),
    *(({"host": one}, f"Host: {one.removesuffix(':PORT')}") for one in ("evil.example", "192.168.1.5:PORT")),
    ({"host": "evil.example:PORT", "origin": "http://evil.example:PORT"}, "Host: evil.example"),
    *(({"host": one}, "") for one in HOSTS),
    *(({"host": one, "origin": f"http://{one}"}, "") for one in HOSTS),
]
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
    "many bad requests at once": (HEAD + b"content-length: 2\r\n\r\n{}") * 200,
}


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


@contextmanager
def connected(server: RunningServer, count: int, said: bytes = b"") -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        made = [stack.enter_context(connect(server)) for _ in range(count)]
        for one in made:
            one.sendall(said)
        yield made


def read_to_the_end(one: socket.socket) -> bytes:
    arrived = b""
    with suppress(ConnectionResetError):
        while part := one.recv(1 << 16):
            arrived += part
    return arrived


def healthy(server: RunningServer) -> bool:
    return server.get("/health").status_code == server.ask(prompt="x", max_tokens=1).status_code == 200


def test_heads_that_do_not_come_or_come_letter_by_letter_are_not_waited_for() -> None:
    heads = (b"", b"G", HEAD, HEAD + b"x: y\r\n", b"", GET + b"\r\n")
    with serving(limits=SHORT) as server, ExitStack() as stack:
        many = [stack.enter_context(connected(server, 1, head))[0] for head in heads]
        assert b"200 OK" in many[5].recv(1 << 16)  # the second request of a connection is no other
        stop = threading.Event()

        def letters() -> None:
            while not stop.wait(0.1):
                for each in many[4:]:
                    with suppress(OSError):
                        each.sendall(b"a")

        writing, started = begun(letters), time.monotonic()
        for each in many:
            each.settimeout(15)
            read_to_the_end(each)
        assert time.monotonic() - started < 10
        stop.set()
        writing.result()
        assert healthy(server)


def test_a_body_byte_by_byte_and_one_that_does_not_come() -> None:
    settings = ServeSettings("tiny", body_seconds=0.7)
    with serving(settings=settings, limits=SHORT) as server, connected(server, 2) as (one, other):
        one.sendall(HEAD + b"content-length: 1000\r\n\r\n")
        for part in (CHUNKED, *[b"1\r\n{\r\n"] * 4):
            other.sendall(part)
            time.sleep(0.1)
        assert all(b"408" in each.recv(1 << 16) for each in (one, other))
        assert healthy(server)


def test_an_answer_that_nobody_reads() -> None:
    body = {"prompt": [5, 6], "max_tokens": 200, "n": 64, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    text = json.dumps(body | {"return_support": True, "top_k": 60}).encode()  # some megabytes
    with serving(limits=SHORT) as server, socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", server.port))
        one.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(text) + text)
        one.settimeout(60)
        one.recv(1, socket.MSG_PEEK)  # the answer begins
        time.sleep(2.5)
        arrived = read_to_the_end(one)
        length = int(arrived.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        assert 0 < len(arrived) < length  # what fitted the buffers, then it was over
        assert healthy(server)


BODY = HEAD + b"content-length: 10\r\n\r\n"


@pytest.mark.parametrize("said", [pytest.param(b"", id="silent"), slow(HEAD, id="heads"), slow(BODY, id="bodies")])
def test_many_connections_of_one_client(said: bytes) -> None:
    """The longest waiting makes room: the server answers as before."""
    limits = ConnectionLimits(head_seconds=60, idle_seconds=60, address=40, all=1000)
    with serving(limits=limits) as server, httpx.Client(base_url=server.url, timeout=20, trust_env=False) as early:
        assert early.get("/health").status_code == 200
        with ExitStack() as many:
            for count in range(300):
                many.enter_context(connected(server, 1, said))
                if count % 20 == 0:
                    started = time.monotonic()
                    assert healthy(server)
                    assert time.monotonic() - started < 10
            assert early.get("/health").status_code == 200
            assert healthy(server)


@pytest.mark.slow
def test_those_that_are_served_are_not_sent_away() -> None:
    with serving(limits=ConnectionLimits(address=4), max_rows=4) as server:
        long = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "n": 12}
        running = [begun(server.ask, **long) for _ in range(4)]
        wait_until(lambda: sum(server.batching.load) == 48)
        with connected(server, 1) as (fifth,):
            assert b"503" in fifth.recv(1 << 16)
        assert [one.result().status_code for one in running] == [200] * 4
        assert healthy(server)


@pytest.mark.parametrize(("headers", "words"), PAGES)
def test_those_on_the_machine_come_in_pages_of_others_do_not(server: RunningServer, headers: Any, words: str) -> None:
    headers = {name: value.replace("PORT", str(server.port)) for name, value in headers.items()}
    assert server.get("/v1/models", headers=headers).status_code == (403 if words else 200)
    files = {"adapter_weights": b"x", "adapter_config": b"{}"}
    for path in ("/upload_adapter", "/release_trainer", "/v1/completions") if words else ():
        assert words in refused(server.post(path, files=files, headers=headers), 403)


def test_with_a_token_pages_may_ask_and_nobody_without_it() -> None:
    with serving(settings=ServeSettings("tiny", token="secret")) as server:
        for path in ("/v1/completions", "/upload_adapter"):
            assert server.post(path, json={"prompt": "x"}).status_code == 401
        assert server.get("/metrics", headers={"authorization": "Bearer secreT"}).status_code == 401
        assert server.get("/health").status_code == 200
        headers = {"host": "covey.example", "origin": "https://ui.example", "authorization": "Bearer secret"}
        assert server.get("/v1/models", headers=headers).status_code == 200
        assert server.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers).status_code == 200


@pytest.mark.parametrize("token", ["pässwort", "two words", "line\n", "\x00"])
def test_tokens_that_no_header_carries(token: str) -> None:
    raises(ConfigError, "must be of visible ASCII characters", ServeSettings, "tiny", token=token)
    raises(ConfigError, "COVEY_SERVER_TOKEN", InferenceClient, "http://127.0.0.1:1", token)


def answered(server: RunningServer, sent: bytes) -> bytes:
    """What the server says until it closes the connection, or to the end of its first answer."""
    with suppress(BrokenPipeError, ConnectionResetError), connected(server, 1, sent) as (one,):
        return one.recv(1 << 16)
    return b""


@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE)
def test_a_turn_reads_a_few_events_at_most(server: RunningServer, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert b"500 Internal" not in answered(server, sent)
    assert server.get("/health").status_code == 200
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
    with serving() as server, connected(server, 40, CHUNKED + b"1\r\nx\r\n" * 900):
        assert server.get("/health").status_code == 200
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
    with connected(server, 1, (GET + b"\r\n") * 300) as (one,):
        arrived = b""
        while arrived.count(b'"status":"ok"') < 300:
            arrived += (part := one.recv(1 << 16))
            assert part


def test_slow_uploads_hold_up_no_other(server: RunningServer) -> None:
    head = b"POST /upload_adapter HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n"
    head += b"content-type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
    with connected(server, 30, head):
        assert server.upload().status_code == 200


def test_uploads_share_the_disk_and_the_oldest_that_is_not_whole_makes_room() -> None:
    said = b"POST /upload_adapter HTTP/1.1\r\nhost: localhost\r\ncontent-length: 60000\r\n"
    said += b"content-type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
    said += b'content-disposition: form-data; name="adapter_weights"; filename="x"\r\n\r\n' + b"x" * 59_000
    # nine times that are more than eight of the largest
    with serving(settings=ServeSettings("tiny", max_upload_bytes=60_000)) as server, connected(server, 9, said) as many:
        assert b"429" in many[0].recv(1 << 16)
        assert server.upload().status_code == 200


@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_version_is_not_other_weights_of_the_same_number(stream: bool) -> None:
    with serving(max_rows=1) as server:
        assert server.upload(1, policy_version=1).status_code == 200
        busy = begun(server.ask, prompt=[5, 6], max_tokens=200, ignore_eos=True, n=2)
        wait_until(lambda: server.batching.load[0] == 1)
        waiting = begun(server.ask, prompt=[5], max_tokens=2, policy_version=1, stream=stream)
        wait_until(lambda: server.batching.load[1] == 2 or busy.done())
        assert server.upload(2, policy_version=1, restart=True).json()["policy_version"] == 1
        assert waiting.result().status_code == (200 if stream else 409)
        assert "with other weights, of a trainer that began again" in waiting.result().text
        assert server.ask(prompt=[5], max_tokens=2, policy_version=1).status_code == 200


def test_what_runs_is_not_finished_by_the_weights_of_a_trainer_that_began_again() -> None:
    with serving(swap="continue") as server:
        assert server.upload(1, policy_version=1).status_code == 200
        busy = begun(server.ask, prompt=[5, 6], max_tokens=200, ignore_eos=True, policy_version=1, n=8)
        wait_until(lambda: server.batching.load[0] == 8)
        assert (server.upload(2, policy_version=1, restart=True).status_code, busy.result().status_code) == (200, 409)


@pytest.mark.slow
def test_metrics_do_not_tell_somebodys_prompt_token_by_token() -> None:
    """Each next token of it, and a wrong one in its place: what is told after the one is told after the other."""
    secret, seen = [10 + place * 7 % 80 for place in range(12)], {0: [], 1: []}  # type: ignore[var-annotated]
    for wrong, told in seen.items():
        with serving() as server:
            assert server.ask(prompt=secret, max_tokens=1).status_code == 200
            for known in range(1, len(secret)):
                assert server.ask(prompt=[*secret[:known], secret[known] + wrong], max_tokens=1).status_code == 200
                told.append([line for line in server.get("/metrics").text.splitlines() if "reused" in line])
            assert server.batching.counts.reused_tokens == 0
    assert seen[0] == seen[1]
