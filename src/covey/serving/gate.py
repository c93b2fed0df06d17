"""The door: who may come in, and how much they may bring, in how much time. It stands before anything is read.

Web pages that reach a server without a token through a browser on its machine are refused too.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect

from covey.serving.client import check_token


def origin_problem(headers: Mapping[str, str], listening: str) -> str:
    """Why a request seems to come from a web page of somebody else; "" if it does not.

    A browser sends any page's forms without asking, and says in `Origin` whose they are. A page may also let its own
    name lead to loopback (DNS rebinding): then `Host` is that name. Names without a dot are nobody's on the internet.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    name, port = _parts(f"//{host}")
    if is_loopback(listening) and ("." in name.rstrip(".") or ":" in name) and not is_loopback(name):
        only = "a server on loopback without a token answers to localhost and 127.0.0.1 only"
        return f"Host: {host:.100}: {only}; use one of them, or start it with --token"
    if origin is None:
        return ""
    page = _parts(origin)
    if page[0] and page[1] == port and (page[0] == name or (is_loopback(page[0]) and is_loopback(name))):
        return ""
    pages = "web pages of another origin may not use a server without a token"
    return f"Origin: {origin:.100}: {pages}; start it with --token, or send no Origin"


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine alone."""
    if host.rstrip(".") == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _parts(url: str) -> tuple[str, int]:
    """Host and port; "" for what has none."""
    try:
        split = urlsplit(url)
        return (split.hostname or "").lower(), split.port or (443 if split.scheme == "https" else 80)
    except ValueError:
        return "", 0


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_UPLOADS = 8
"""Of the largest size: what all that are under way may hold on the disk together."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What a server allows its clients."""

    model_name: str = "model"
    token: str | None = None
    max_upload_bytes: int = 1 << 30
    max_body_bytes: int = 4 << 20
    body_seconds: float = 60.0
    lease_seconds: float = 600.0

    def __post_init__(self) -> None:
        """Refuse a token that no header can carry. Raises `ConfigError`: it is one."""
        check_token(self.token)


class Gate:
    """Between the connections and the application; ASGI."""

    def __init__(self, app: Any, settings: ServeSettings) -> None:
        self._app, self._settings = app, settings
        self._uploads: dict[_Body, None] = {}  # the oldest first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through to the application, or refuses it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        token, given = self._settings.token, headers.get("authorization", "")
        known = token is None or hmac.compare_digest(given.encode(), f"Bearer {token}".encode())
        if scope["path"] != "/health" and not known:
            return await _refuse(send, 401, "this server wants a bearer token: Authorization: Bearer TOKEN")
        listening = (scope.get("server") or ("", None))[0]
        if token is None and (trouble := origin_problem(headers, listening)):
            return await _refuse(send, 403, trouble)
        upload = scope["path"] == "/upload_adapter"
        limit = self._settings.max_upload_bytes if upload else self._settings.max_body_bytes
        length = headers.get("content-length", "0")
        if not re.fullmatch("[0-9]{1,18}", length) or int(length) > limit:
            return await _refuse(send, 413, f"the body has {length[:20]} bytes; this server takes up to {limit}")
        body = _Body(receive, limit, self._make_room)
        if upload:
            self._uploads[body] = None
        try:
            async with asyncio.timeout(self._settings.body_seconds) as body.clock:
                await self._app(scope, body.receive, send)
        except (_BodyError, TimeoutError) as error:
            if body.complete:
                raise
            await _refuse(send, *(error.args if isinstance(error, _BodyError) else body.problem))
        except ClientDisconnect:
            pass  # it went away in the middle of its body: there is nobody to tell
        finally:
            self._uploads.pop(body, None)

    def _make_room(self) -> None:
        """A slow upload holds up no other: what counts is what has arrived, and the oldest that is not whole goes."""
        arriving = [one for one in self._uploads if not one.complete]
        if arriving and sum(one.size for one in self._uploads) > _UPLOADS * self._settings.max_upload_bytes:
            del self._uploads[arriving[0]]
            arriving[0].give_up()


class _BodyError(Exception):
    """A status, and why."""


class _Body:
    """A body that may not grow beyond its limit nor take for ever."""

    clock: asyncio.Timeout

    def __init__(self, receive: Receive, limit: int, grown: Callable[[], None]) -> None:
        self._receive, self._limit, self._grown = receive, limit, grown
        self.problem = (408, "the request's body did not arrive in time")
        self.size, self.complete = 0, False

    async def receive(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        if self.complete:
            return message
        self.size += len(message.get("body", b""))
        if self.size > self._limit:
            raise _BodyError(413, f"the body has more than {self._limit} bytes")
        self.complete = message["type"] != "http.request" or not message.get("more_body", False)
        if self.complete:
            self.clock.reschedule(None)
        self._grown()
        return message

    def give_up(self) -> None:
        """Others need the room."""
        self.problem = (429, "newer uploads need the room on the disk; try again later")
        self.clock.reschedule(0.0)


async def _refuse(send: Send, status: int, message: str) -> None:
    body = json.dumps({"error": {"message": message, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
