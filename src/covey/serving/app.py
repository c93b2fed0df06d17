"""The server's HTTP side: OpenAI's completion API with token ids, and uploads of adapters.

    app = create_app(batching_engine, tokenizer, ServeSettings(model_name="smollm2"))

Every answer carries the `policy_version` that produced it.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, File, Form, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BeforeValidator
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException

from covey.adapters import Adapter, MalformedConfigError, read_adapter, read_config
from covey.errors import AdapterError, GenerationError
from covey.pytorch.lora import linear_layers
from covey.serving.answers import Answering, UnknownModelError
from covey.serving.batching import BatchingEngine, NoWeightsError, QueueFullError, VersionConflictError, unheld
from covey.serving.gate import Gate, ServeSettings
from covey.serving.metrics import prometheus_text
from covey.serving.neutral import RequestError
from covey.serving.requests import ChatRequest, CompletionRequest
from covey.serving.trainers import TrainerLease, TwoTrainersError
from covey.serving.trial import try_adapter

_PARTS = ("adapter_weights", "adapter_config", "policy_version", "trainer", "takeover", "restart")
_LARGEST_CONFIG = 1 << 20


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
        answering.close()

    app = FastAPI(title="covey", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    lease = TrainerLease(settings.lease_seconds)
    instance, layers = uuid.uuid4().hex, linear_layers(model)
    layer = next(({"module": name, "out": out, "in": width} for name, (out, width) in layers.items()), None)
    answering = Answering(engine, tokenizer, settings.model_name)
    uploading = asyncio.Lock()

    @app.get("/health")
    async def health() -> JSONResponse:
        running, waiting = engine.load
        body = {
            "status": "ok" if engine.healthy else "no weights, or stopping",
            "model": settings.model_name,
            "policy_version": engine.version,
            "sha256": engine.sha256,
            "instance": instance,
            "running": running,
            "waiting": waiting,
            "max_completion_length": engine.max_completion_length,
            "context_length": engine.context_length,
            "example_layer": layer,
        }
        return JSONResponse(body, status_code=200 if engine.healthy else 503)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(prometheus_text(engine), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [await model_of("")]}

    @app.get("/v1/models/{name:path}")
    async def model_of(name: str) -> dict[str, Any]:
        answering.check_model(name)
        return {"id": settings.model_name, "object": "model", "owned_by": "covey", "policy_version": engine.version}

    @app.post("/upload_adapter")
    async def upload_adapter(
        request: Request,
        adapter_weights: UploadFile = File(),  # noqa: B008 (that is how FastAPI is told)
        adapter_config: UploadFile | str = File(),  # noqa: B008
        policy_version: Annotated[int | None, BeforeValidator(_digits), Form(ge=1, le=1 << 53)] = None,
        trainer: str = Form(default="", max_length=200),
        takeover: bool = Form(default=False),
        restart: bool = Form(default=False),
    ) -> dict[str, Any]:
        lease.check(trainer, takeover=takeover)
        _check_parts(await request.form(), _PARTS)
        async with uploading:  # one at a time is in memory
            adapter = await asyncio.to_thread(_read_upload, adapter_weights, adapter_config, layers)
            lease.check(trainer, takeover=takeover)
            conflict = engine.conflict(policy_version, adapter.sha256, restart=restart)
            if conflict is not None:
                raise conflict
            if not engine.holds(policy_version, adapter.sha256):
                await asyncio.to_thread(try_adapter, model, adapter)
            lease.take(trainer, takeover=takeover)
            await asyncio.wrap_future(engine.upload(adapter, policy_version, restart=restart))
            return {"policy_version": engine.version, "sha256": engine.sha256, "instance": instance}

    @app.post("/release_trainer")
    async def release_trainer(request: Request, trainer: str = Form(max_length=200)) -> dict[str, Any]:
        _check_parts(await request.form(), ("trainer",))
        lease.release(trainer)
        return {"policy_version": engine.version}

    async def answer(request: Request, kind: type[Any]) -> Any:
        started = time.monotonic()
        asked = await answering.read(kind, await request.body())
        if asked.policy_version not in (None, engine.version):
            raise unheld(asked.policy_version, engine.version)
        if asked.stream:
            events = _timed(await answering.stream(asked), lambda: observe(time.monotonic() - started))
            return StreamingResponse(events, media_type="text/event-stream")
        response = await _until_disconnected(request, answering.complete(asked))
        observe(time.monotonic() - started)
        return response

    observe = engine.latencies.request.observe

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        return await answer(request, CompletionRequest)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        return await answer(request, ChatRequest)

    _add_errors(app)
    app.add_middleware(Gate, settings=settings)
    return app


async def _until_disconnected(request: Request, work: Any) -> Response:
    """The answer; when the client goes away first, its completions are cancelled."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=0.2)
            if not task.done() and await request.is_disconnected():
                return PlainTextResponse("", status_code=499)
        return Response(task.result(), media_type="application/json")
    finally:
        task.cancel()


async def _timed(events: AsyncIterator[str], done: Callable[[], None]) -> AsyncIterator[str]:
    async for event in events:
        yield event
    done()


def _check_parts(form: FormData, known: Sequence[str]) -> None:
    """Each part once, and none that means nothing here."""
    names = [name for name, _ in form.multi_items()]
    for name, value in form.multi_items():
        if name not in known or names.count(name) > 1:
            raise AdapterError(
                f"the part {name!r:.80} is unknown, or comes twice; send each of {', '.join(known)} once"
            )
        if value == "" and name in ("policy_version", "takeover", "restart"):  # FastAPI would take its default
            raise AdapterError(f"the part {name!r} is empty; give it a value, or leave it out")


def _digits(value: Any) -> Any:
    """A version as it stands in a form; Python would read 1_0, +1 and 1.0 too."""
    if isinstance(value, str) and not re.fullmatch("[0-9]{1,16}", value):
        raise ValueError("must be a whole number, written in digits")
    return value


def _read_upload(weights: UploadFile, config: UploadFile | str, layers: Mapping[str, tuple[int, int]]) -> Adapter:
    """An upload, checked, with its hash."""
    text = config if isinstance(config, str) else config.file.read(_LARGEST_CONFIG + 1)
    if len(text) > _LARGEST_CONFIG:
        raise AdapterError(f"adapter_config has more than {_LARGEST_CONFIG} bytes; send PEFT's adapter_config.json")
    adapter = read_adapter(weights.file.read(), read_config(text), layers)
    assert adapter.sha256  # computed here, once
    return adapter


def _add_errors(app: FastAPI) -> None:
    statuses: dict[type[Exception], int] = {
        QueueFullError: 429,
        NoWeightsError: 503,
        TwoTrainersError: 409,
        VersionConflictError: 409,
        UnknownModelError: 404,
        MalformedConfigError: 400,
        AdapterError: 422,
        RequestError: 400,
        GenerationError: 400,
        RequestValidationError: 422,
    }

    def answer(status: int) -> Any:
        async def handler(_: Request, error: Exception) -> JSONResponse:
            message = _readable(error) if isinstance(error, RequestValidationError) else str(error)
            message = message.encode("utf-8", "replace").decode()  # half a character may stand in a name
            headers = {"Retry-After": "1"} if status == 429 else None
            body = {"error": {"message": message, "type": type(error).__name__, "code": status}}
            return JSONResponse(body, status_code=status, headers=headers)

        return handler

    async def unknown(_: Request, error: Any) -> JSONResponse:
        body = {"error": {"message": str(error.detail), "type": "HTTPException", "code": error.status_code}}
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    for kind, status in statuses.items():
        app.add_exception_handler(kind, answer(status))
    app.add_exception_handler(HTTPException, unknown)


def _readable(error: Any) -> str:
    lines = (f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors())
    return "; ".join(lines)
