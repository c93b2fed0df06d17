"""A server on loopback whose completions somebody else samples: the generate route for programs that drive a model.

    endpoint = Endpoint(queue.put, context_length=2048)                  # the queue gets `Asked`
    asked.answer.set_result(generated([completion], len(prompt)))        # or set_exception(RequestError(...))

Each request waits in a thread of its own. Without the token nothing is read.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from covey.serving.generate import GenerateRequest
from covey.serving.requests import CompletionRequest, RequestError, read_request

_MOST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A request that waits for its answer, the body of a response."""

    request: CompletionRequest
    answer: Future[dict[str, Any]] = field(default_factory=Future)


class Endpoint:
    """Listens until it is closed. `url` ends in /v1, as clients of OpenAI's API want it."""

    def __init__(self, ask: Callable[[Asked], None], *, context_length: int) -> None:
        self.token = secrets.token_urlsafe(24)
        own = {"ask": staticmethod(ask), "bearer": f"Bearer {self.token}", "context_length": context_length}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), own))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version, timeout = "HTTP/1.1", 60
    ask: Callable[[Asked], None]
    bearer: str
    context_length: int

    def do_GET(self) -> None:
        """The list of models, or 404."""
        models = {"object": "list", "data": [{"id": "policy", "object": "model", "max_model_len": self.context_length}]}
        self._answer(lambda: models if self.path == "/v1/models" else None)

    def do_POST(self) -> None:
        """A completion, or 404."""
        self._answer(lambda: self._generated() if self.path == "/inference/v1/generate" else None)

    def _generated(self) -> dict[str, Any]:
        length = self.headers.get("content-length", "")
        if not length.isascii() or not length.isdecimal() or int(length) > _MOST_BYTES:
            self.close_connection = True
            raise RequestError(f"content-length {length:.20}: a body has up to {_MOST_BYTES} bytes")
        request = read_request(GenerateRequest, self.rfile.read(int(length)))
        asked = Asked(request.completion(self.context_length))
        self.ask(asked)
        return asked.answer.result()

    def _answer(self, make: Callable[[], dict[str, Any] | None]) -> None:
        status, body = 404, None
        try:
            if hmac.compare_digest(self.headers.get("authorization", "").encode(), self.bearer.encode()):
                body = make()
                status = 404 if body is None else 200
            else:
                status, self.close_connection = 401, True
        except RequestError as error:
            status, body = 400, {"error": {"message": str(error), "type": "RequestError", "code": 400}}
        content = json.dumps(body or {"error": {"message": f"{self.path:.100}", "code": status}}).encode()
        with suppress(OSError):  # the client is gone
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
