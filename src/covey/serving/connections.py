"""Connections that may wait for a client, but not for ever, nor all for one client.

At each time a connection waits for the engine, which is our concern, or for its client: to send a request's head
or body, or to read an answer. Heads and answers have a time limit here (a body has one in `covey.serving.gate`), and
when an address has as many connections as it may, the one that has waited for its client the longest makes room for
the newest. So silent connections cost others nothing, however many there are.

What arrives is read in turns: one connection at each step of the event loop, the one whose request has cost the least
so far, and a few events of it. So a body in a million chunks waits for others, and never they for it. Every fourth turn
is that of who has waited the longest: a flood of small requests does not hold up an upload.
"""

from __future__ import annotations

import asyncio
import re
import resource
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import h11
import uvicorn
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from covey.errors import ConfigError

_SWEEP_SECONDS = 0.5
_EVENTS_OF_A_TURN, _TURN_OF_THE_OLDEST = 16, 4
_MOST_CHUNKS, _LEAST_CHUNK = 1024, 64
"""Chunks that a body may have whatever their size, and how many bytes the further ones must have on average."""
_MOST_LINES, _LONGEST_CHUNK_LINE = 128, 256
"""Of a head, or of what follows a body; of what stands before a chunk, in bytes."""
_BLANKS = re.compile(rb"[ \t]{64}")
"""h11 reads a line in a time that grows with the square of these."""
_FULL = b'{"error": {"message": "too many connections; close some, or try again later", "code": 503}}'
_HEAD = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-type: application/json\r\n"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How long a client may take, and how many connections it may have."""

    head_seconds: float = 10.0
    idle_seconds: float = 30.0
    read_seconds: float = 60.0
    address: int = 512
    all: int = 2000


@dataclass(slots=True, eq=False)
class Connections:
    """All that are open. `protocol` is what uvicorn makes one of: `uvicorn.Config(app, http=connections.protocol)`."""

    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    _open: dict[_Connection, None] = field(default_factory=dict)  # the oldest first
    _from: dict[str, dict[_Connection, None]] = field(default_factory=dict)  # the same by address
    _ready: dict[_Connection, None] = field(default_factory=dict)  # something has arrived; the oldest first
    _most: int = 0
    _turns: int = 0
    _sweeping: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        # so many files the process may have open, after asking for more where that is allowed
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        self._most = self.limits.all if soft == resource.RLIM_INFINITY else min(self.limits.all, soft - 128)

    def protocol(self, *args: Any, **kwargs: Any) -> asyncio.Protocol:
        """A new connection's protocol; arguments are uvicorn's."""
        return _Connection(self, *args, **kwargs)

    def enter(self, new: _Connection) -> None:
        """A connection was opened: it, or another one, goes if there are too many."""
        self._open[new] = None
        same = self._from.setdefault(new.address, {})
        same[new] = None
        if len(same) > self.limits.address:
            self._make_room(same, new)
        elif len(self._open) > self._most:
            self._make_room(self._open, new)
        if self._sweeping is None:
            self._sweep()

    def leave(self, one: _Connection) -> None:
        """A connection was closed."""
        self._open.pop(one, None)
        self._ready.pop(one, None)
        same = self._from.get(one.address, {})
        same.pop(one, None)
        if not same:
            self._from.pop(one.address, None)

    def wants_turn(self, one: _Connection) -> None:
        """Something has arrived on a connection, or is left from before."""
        if not self._ready:
            asyncio.get_running_loop().call_soon(self._turn)
        self._ready[one] = None

    def _turn(self) -> None:
        if not self._ready:  # closed meanwhile
            return
        self._turns += 1
        if self._turns % _TURN_OF_THE_OLDEST == 0:
            next(iter(self._ready)).wire.events = 0
        one = min(self._ready, key=lambda each: each.wire.events)
        del self._ready[one]
        if self._ready:
            asyncio.get_running_loop().call_soon(self._turn)
        one.read_on()

    def _make_room(self, among: Iterable[_Connection], new: _Connection) -> None:
        waiting = [one for one in among if one is not new and one.owing is not None]
        if waiting:
            min(waiting, key=lambda one: (one.owing == "body", one.since)).drop()
        else:  # all the others are being served
            new.refuse()

    def _sweep(self) -> None:
        """Close what has waited too long, and come again while there is anything open."""
        limits, now = self.limits, time.monotonic()
        seconds = {"head": limits.head_seconds, "request": limits.idle_seconds, "read": limits.read_seconds}
        for one in list(self._open):
            one.note_progress()
            if one.owing is not None and now - one.since > seconds.get(one.owing, float("inf")):
                one.drop()
        running = asyncio.get_running_loop()
        self._sweeping = running.call_later(_SWEEP_SECONDS, self._sweep) if self._open else None


class _Lines(ReceiveBuffer):
    """What has arrived; lines that would take long to read are refused."""

    def maybe_extract_next_line(self) -> bytearray | None:
        line = super().maybe_extract_next_line()
        if len(self if line is None else line) > _LONGEST_CHUNK_LINE:
            raise h11.RemoteProtocolError("the line before a chunk is too long")
        return line

    def maybe_extract_lines(self) -> list[bytearray] | None:
        lines = super().maybe_extract_lines()
        if lines is not None and (len(lines) > _MOST_LINES or any(map(_BLANKS.search, lines))):
            raise h11.RemoteProtocolError("the head has too many lines, or too many blanks in one")
        return lines


class _Wire(h11.Connection):
    """HTTP, a few events at a time."""

    def __init__(self, longest: int) -> None:
        super().__init__(h11.SERVER, longest)
        self._receive_buffer = _Lines()
        self.left = self.events = self._excess = 0

    def next_event(self) -> Any:
        if self.left == 0:
            return h11.NEED_DATA
        event = super().next_event()
        self.left, self.events = self.left - 1, self.events + 1
        if isinstance(event, h11.Request):
            self.events, self._excess = 0, -_MOST_CHUNKS * _LEAST_CHUNK
        elif isinstance(event, h11.Data):
            self._excess += _LEAST_CHUNK * event.chunk_start - len(event.data)
            if self._excess > 0:
                raise h11.RemoteProtocolError("the chunks of the body are too small; send larger ones")
        return event


class _Flow(FlowControl):
    """Reading goes on when the application wants more and what has arrived is read: `full` says that it is not."""

    full = False

    def resume_reading(self) -> None:
        self.read_paused = False
        if not self.full:
            self._transport.resume_reading()


class _Connection(H11Protocol):
    """A connection that knows what its client owes it, and since when."""

    def __init__(self, among: Connections, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = self.wire = _Wire(self.config.h11_max_incomplete_event_size or 64 << 10)
        self._among, self.address, self._unread = among, "", 0
        self.owing: str | None = "head"
        self.since = time.monotonic()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._flow = _Flow(transport)
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        self._among.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._among.leave(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.owing == "request":
            self._owes("head")

    def handle_events(self) -> None:
        """Wait for a turn, and read nothing more until then."""
        self._flow.full = True
        self.transport.pause_reading()
        self._among.wants_turn(self)

    def read_on(self) -> None:
        """A turn: some events of what has arrived."""
        self.wire.left = _EVENTS_OF_A_TURN
        super().handle_events()
        self._look()
        if self.transport.is_closing():
            return
        if self.wire.left == 0:
            self.handle_events()
            return
        self._flow.full = False
        if not self._flow.read_paused:
            self.transport.resume_reading()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(f"{msg} {sys.exception()!s:.200}")
        else:  # the answer to what came before has begun
            self.drop()

    def on_response_complete(self) -> None:
        if not self.flow.write_paused:
            self._owes("request")
        super().on_response_complete()  # may begin with a request that has arrived already
        if self.owing == "request" and self.conn.trailing_data[0]:
            self._owes("head")
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._owes("read")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._owes("request" if self.cycle is None or self.cycle.response_complete else None)
        self._look()

    def note_progress(self) -> None:
        """A client that reads, however slowly, is not one that does not."""
        if self.owing == "read":
            before, self._unread = self._unread, self.transport.get_write_buffer_size()
            self.since = time.monotonic() if self._unread < before else self.since

    def drop(self) -> None:
        """Close it at once, whatever is still to be sent."""
        self._among.leave(self)
        self.transport.abort()

    def refuse(self) -> None:
        """Say that there are too many, and close it."""
        self._among.leave(self)
        self.transport.write(_HEAD + b"content-length: %d\r\n\r\n%b" % (len(_FULL), _FULL))
        self.transport.close()

    def _look(self) -> None:
        """What the present request, if any, lacks."""
        if self.owing != "read" and self.cycle is not None and not self.cycle.response_complete:
            self._owes("body" if self.cycle.more_body else None)

    def _owes(self, what: str | None) -> None:
        if what != self.owing:
            self.owing, self.since = what, time.monotonic()


def uvicorn_server(app: Any, limits: ConnectionLimits, **options: Any) -> uvicorn.Server:
    """What runs the application, with connections that may not wait for ever."""
    settings: dict[str, Any] = {
        "http": Connections(limits).protocol,
        "ws": "none",
        "log_level": "warning",
        "timeout_keep_alive": int(limits.idle_seconds),
        "timeout_graceful_shutdown": 15,
        "h11_max_incomplete_event_size": 64 << 10,
    }
    return uvicorn.Server(uvicorn.Config(app, **(settings | options)))


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound to an address; port 0 = any free one.

    Raises `ConfigError`: the address cannot be listened on.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        raise ConfigError(f"{host}:{port}: cannot be listened on ({error}); use another --port") from error
    return listening
