"""The server's HTTP side: OpenAI's completion API with token ids, and uploads of adapters.

    app = create_app(batching_engine, tokenizer, ServeSettings(model_name="smollm2"))

Every answer carries the `policy_version` that produced it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, File, Form, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import ValidationError

from covey.errors import AdapterError, CoveyError, GenerationError
from covey.serving.adapters import read_adapter
from covey.serving.answers import Answering, chat_body, completion_body
from covey.serving.batching import BatchingEngine, QueueFullError
from covey.serving.metrics import prometheus_text
from covey.serving.requests import ChatRequest, CompletionRequest
from covey.serving.trainers import TrainerLease, TwoTrainersError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What a server allows.

    Attributes:
        model_name: that `/v1/models` lists.
        token: bearer token that every request but `/health` must carry; None = none.
        max_upload_bytes: of an adapter.
        max_body_bytes: of any other request.
        body_seconds: within which a request's body must arrive.
        lease_seconds: after which a trainer that is heard of no more may be replaced by another.
    """

    model_name: str = "model"
    token: str | None = None
    max_upload_bytes: int = 1 << 30
    max_body_bytes: int = 16 << 20
    body_seconds: float = 60.0
    lease_seconds: float = 600.0


def create_app(engine: BatchingEngine, tokenizer: Any, settings: ServeSettings, model: Any) -> FastAPI:
    """The application; whoever runs it closes it, which closes the engine.

    Args:
        engine: samples.
        tokenizer: text to ids and back.
        settings: limits.
        model: the bare model that uploads are checked against.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    app = FastAPI(title="covey", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    lease = TrainerLease(settings.lease_seconds)
    instance = uuid.uuid4().hex
    answering = Answering(engine, tokenizer, settings.model_name)
    uploading = asyncio.Lock()

    @app.get("/health")
    async def health() -> JSONResponse:
        running, waiting = engine.load
        body = {
            "status": "ok" if engine.healthy else "stopping",
            "model": settings.model_name,
            "policy_version": engine.version,
            "sha256": engine.sha256,
            "instance": instance,
            "running": running,
            "waiting": waiting,
            "max_completion_length": engine.max_completion_length,
            "context_length": engine.context_length,
        }
        return JSONResponse(body, status_code=200 if engine.healthy else 503)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(prometheus_text(engine), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": settings.model_name, "object": "model", "owned_by": "covey", "policy_version": engine.version}
        return {"object": "list", "data": [entry]}

    @app.post("/upload_adapter")
    async def upload_adapter(
        adapter_weights: UploadFile = File(),  # noqa: B008 (that is how FastAPI is told)
        adapter_config: UploadFile | str = File(),  # noqa: B008
        policy_version: int | None = Form(default=None, ge=1),
        trainer: str = Form(default="", max_length=200),
        takeover: bool = Form(default=False),
    ) -> dict[str, Any]:
        lease.check(trainer, takeover=takeover)
        weights = await adapter_weights.read()
        text = adapter_config if isinstance(adapter_config, str) else (await adapter_config.read()).decode("utf-8")
        try:
            config = json.loads(text)
        except ValueError as error:
            raise AdapterError(f"adapter_config is not JSON: {error}") from error
        adapter = await asyncio.to_thread(read_adapter, weights, config, model)
        digest = await asyncio.to_thread(lambda: adapter.sha256)
        async with uploading:
            lease.take(trainer, takeover=takeover)
            repeated = policy_version is not None and (policy_version, digest) == (engine.version, engine.sha256)
            if not repeated:  # else: the answer to the first try was lost
                await asyncio.wrap_future(engine.upload(adapter, policy_version))
            return {"policy_version": engine.version, "sha256": engine.sha256, "instance": instance}

    @app.post("/release_trainer")
    async def release_trainer(trainer: str = Form(max_length=200)) -> dict[str, Any]:
        lease.release(trainer)
        return {"policy_version": engine.version}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        asked = CompletionRequest.model_validate_json(await request.body())
        _check_version(asked.policy_version, engine)
        if asked.stream:
            return StreamingResponse(answering.stream_completion(asked), media_type="text/event-stream")
        return await _unless_gone(request, answering.complete(asked), lambda found: completion_body(asked, found))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        asked = ChatRequest.model_validate_json(await request.body())
        _check_version(asked.policy_version, engine)
        if asked.stream:
            return StreamingResponse(answering.stream_chat(asked), media_type="text/event-stream")
        return await _unless_gone(request, answering.chat(asked), lambda found: chat_body(asked, found))

    _add_errors(app)
    app.add_middleware(Gate, settings=settings)
    return app


async def _unless_gone(request: Request, work: Any, body: Callable[[Any], dict[str, Any]]) -> Any:
    """The answer; when the client goes away first, its completions are cancelled."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=0.2)
            if not task.done() and await request.is_disconnected():
                return PlainTextResponse("", status_code=499)
        return JSONResponse(body(task.result()))
    finally:
        task.cancel()


def _check_version(asked: int | None, engine: BatchingEngine) -> None:
    if asked is not None and asked != engine.version:
        raise VersionConflictError(f"policy_version={asked} was asked for; this server holds {engine.version}")


class VersionConflictError(CoveyError):
    """Completions of a version were asked for that the server does not hold."""


def _add_errors(app: FastAPI) -> None:
    statuses: dict[type[Exception], int] = {
        QueueFullError: 429,
        TwoTrainersError: 409,
        VersionConflictError: 409,
        AdapterError: 422,
        GenerationError: 400,
    }

    def answer(status: int) -> Any:
        async def handler(_: Request, error: Exception) -> JSONResponse:
            invalid = isinstance(error, ValidationError | RequestValidationError)
            message = _readable(error) if invalid else str(error)
            headers = {"Retry-After": "1"} if status == 429 else None
            body = {"error": {"message": message, "type": type(error).__name__, "code": status}}
            return JSONResponse(body, status_code=status, headers=headers)

        return handler

    for kind, status in statuses.items():
        app.add_exception_handler(kind, answer(status))
    app.add_exception_handler(ValidationError, answer(400))
    app.add_exception_handler(RequestValidationError, answer(422))
    app.add_exception_handler(UnicodeDecodeError, answer(422))


def _readable(error: Any) -> str:
    lines = (f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors())
    return "; ".join(lines)


class Gate:
    """Before anything is read: who may come in, and how much they may bring, in how much time."""

    def __init__(self, app: Any, settings: ServeSettings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if scope["path"] != "/health" and not self._may_enter(headers.get("authorization", "")):
            await _refuse(send, 401, "this server wants a bearer token: Authorization: Bearer TOKEN")
            return
        upload = scope["path"] == "/upload_adapter"
        limit = self._settings.max_upload_bytes if upload else self._settings.max_body_bytes
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > limit:
            await _refuse(send, 413, f"the body has {length[:20]} bytes; this server takes up to {limit}")
            return
        body = _Body(receive, limit, time.monotonic() + self._settings.body_seconds)
        try:
            await self._app(scope, body.receive, send)
        except _BodyError as error:
            await _refuse(send, error.status, str(error))

    def _may_enter(self, authorization: str) -> bool:
        token = self._settings.token
        return token is None or hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode())


class _BodyError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Body:
    """A body that may not grow beyond its limit nor take for ever."""

    def __init__(self, receive: Receive, limit: int, until: float) -> None:
        self._receive, self._limit, self._until = receive, limit, until
        self._size, self._complete = 0, False

    async def receive(self) -> MutableMapping[str, Any]:
        if self._complete:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), max(0.001, self._until - time.monotonic()))
        except TimeoutError:
            raise _BodyError(408, "the request's body did not arrive in time") from None
        self._size += len(message.get("body", b""))
        if self._size > self._limit:
            raise _BodyError(413, f"the body has more than {self._limit} bytes")
        self._complete = message["type"] != "http.request" or not message.get("more_body", False)
        return message


async def _refuse(send: Send, status: int, message: str) -> None:
    body = json.dumps({"error": {"message": message, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
