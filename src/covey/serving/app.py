"""The server: OpenAI's completion API with token ids, uploads of adapters, and starting it.

    app = create_app(batching_engine, tokenizer, ServeSettings(model_name="smollm2"), model)

Every answer carries the `policy_version` that produced it.
"""

from __future__ import annotations

import asyncio
import gc
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException

from covey.adapters import Adapter, MalformedConfigError, read_adapter, read_config
from covey.errors import AdapterError, DataError, GenerationError, ModelError
from covey.pytorch.engine import Engine
from covey.pytorch.engine.merge import bare_model
from covey.pytorch.models.loading import load_model
from covey.pytorch.models.lora import album_of, linear_layers
from covey.serving.answers import Answering, UnknownModelError
from covey.serving.batching import BatchingEngine, NoWeightsError, QueueFullError, VersionConflictError, prometheus_text
from covey.serving.connections import listen
from covey.serving.gate import Gate, ServeSettings
from covey.serving.generate import GenerateRequest
from covey.serving.requests import ChatRequest, CompletionRequest, RequestError, ScoreRequest
from covey.serving.scoring import Scorer
from covey.serving.uploads import TrainerLease, TwoTrainersError, read_parts, try_adapter

_PARTS = ("adapter_weights", "adapter_config", "policy_version", "trainer", "takeover", "restart")
_MOST_PARTS = 8  # of a form; one more than are known is still refused by its name


def create_app(engine: BatchingEngine, tokenizer: Any, settings: ServeSettings, model: Any) -> FastAPI:
    """Make the application. Closing it also closes the engine. Uploads are checked against `model` without adapter."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)
        answering.close()

    app = FastAPI(title="covey", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    lease = TrainerLease(settings.lease_seconds)
    instance, layers = uuid.uuid4().hex, linear_layers(model)
    layer = next(({"module": name, "out": out, "in": width} for name, (out, width) in layers.items()), None)
    scorer = Scorer(model, tokenizer)
    answering = Answering(engine, tokenizer, settings.model_name, album_of(model))
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
        found = {"id": settings.model_name, "object": "model", "owned_by": "covey", "policy_version": engine.version}
        return found | {"max_model_len": engine.context_length}

    @app.post("/upload_adapter")
    async def upload_adapter(request: Request) -> dict[str, Any]:
        received = request.form(max_files=_MOST_PARTS, max_fields=_MOST_PARTS)  # files arrive on the disk
        async with received as parts, uploading:  # one at a time is in memory
            adapter, form = await asyncio.to_thread(_read_upload, parts, layers, lease)
            lease.check(form.trainer, takeover=form.takeover)
            conflict = engine.conflict(form.policy_version, adapter.sha256, restart=form.restart)
            if conflict is not None:
                raise conflict
            if not engine.holds(form.policy_version, adapter.sha256):
                await asyncio.to_thread(try_adapter, model, adapter)
            lease.take(form.trainer, takeover=form.takeover)
            await asyncio.wrap_future(engine.upload(adapter, form.policy_version, restart=form.restart))
            return {"policy_version": engine.version, "sha256": engine.sha256, "instance": instance}

    @app.post("/release_trainer")
    async def release_trainer(request: Request) -> dict[str, Any]:
        async with request.form(max_files=_MOST_PARTS, max_fields=_MOST_PARTS) as parts:
            lease.release(_Form.of(read_parts(parts, ("trainer",))).trainer)
        return {"policy_version": engine.version}

    async def answer(request: Request, kind: type[Any], complete: Callable[[Any], Any] = answering.complete) -> Any:
        started = time.monotonic()
        asked = await answering.read(kind, await request.body())
        if asked.stream:
            events = _timed(await answering.chunks(asked), lambda: observe(time.monotonic() - started))
            return StreamingResponse(events, media_type="text/event-stream")
        response = await _until_disconnected(request, complete(asked))
        observe(time.monotonic() - started)
        return response

    observe = engine.latencies.request.observe

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        return await answer(request, CompletionRequest)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        return await answer(request, ChatRequest)

    @app.post("/v1/score")
    async def score(request: Request) -> Any:
        asked = await answering.read(ScoreRequest, await request.body())
        return await _until_disconnected(request, answering.score(asked, scorer))

    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> Any:
        return await answer(request, GenerateRequest, answering.generate)

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


async def _timed(chunks: AsyncIterator[list[str]], done: Callable[[], None]) -> AsyncIterator[str]:
    async for chunk in chunks:
        yield "".join(chunk)
    done()


def _digits(value: Any) -> Any:
    """A version as it stands in a form; Python would read 1_0, +1 and 1.0 too."""
    if isinstance(value, str) and not re.fullmatch("[0-9]{1,16}", value):
        raise ValueError("must be a whole number, written in digits")
    return value


class _Form(BaseModel):
    policy_version: Annotated[int | None, Field(ge=1, le=1 << 53), BeforeValidator(_digits)] = None
    trainer: str = Field(default="", max_length=200)
    takeover: bool = False
    restart: bool = False

    @classmethod
    def of(cls, parts: Mapping[str, bytes]) -> _Form:
        try:
            return cls.model_validate({name: value.decode("utf-8", "replace") for name, value in parts.items()})
        except ValidationError as error:
            lines = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise AdapterError("; ".join(lines)) from error


def _read_upload(
    received: FormData, layers: Mapping[str, tuple[int, int]], lease: TrainerLease
) -> tuple[Adapter, _Form]:
    parts = read_parts(received, _PARTS)
    form = _Form.of({name: parts[name] for name in _PARTS[2:] if name in parts})
    lease.check(form.trainer, takeover=form.takeover)
    if not {*_PARTS[:2]} <= parts.keys():
        raise AdapterError(f"an upload has the parts {_PARTS[0]} and {_PARTS[1]}; send both")
    adapter = read_adapter(parts[_PARTS[0]], read_config(parts[_PARTS[1]]), layers)
    assert adapter.sha256  # computed here, once
    return adapter, form


def _add_errors(app: FastAPI) -> None:
    statuses: dict[int, tuple[type[Exception], ...]] = {
        400: (MalformedConfigError, RequestError, GenerationError, DataError, ModelError),
        404: (UnknownModelError,),
        409: (TwoTrainersError, VersionConflictError),
        422: (AdapterError,),
        429: (QueueFullError,),
        503: (NoWeightsError,),
    }

    async def answer(_: Request, error: Any) -> JSONResponse:
        if isinstance(error, HTTPException):
            status, message, headers = error.status_code, str(error.detail), error.headers
        else:
            status = next(status for status, kinds in statuses.items() if isinstance(error, kinds))
            message = str(error).encode("utf-8", "replace").decode()  # half a character may stand in a name
            headers = {"Retry-After": "1"} if status == 429 else None
        body = {"error": {"message": message, "type": type(error).__name__, "code": status}}
        return JSONResponse(body, status_code=status, headers=headers)

    app.add_exception_handler(HTTPException, answer)
    for kind in chain.from_iterable(statuses.values()):
        app.add_exception_handler(kind, answer)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of `covey serve`, under the same names."""

    dtype: str = "float32"
    device: str | None = None
    kv_cache_gb: float = 1.0
    max_batch_size: int = 64
    max_completion_length: int = 512
    max_waiting: int = 1024
    max_upload_mb: int = 1024
    max_connections: int = 512
    swap: str = "finish"
    served_model_name: str | None = None


def open_server(
    model: str, host: str, port: int, token: str | None, options: ServeOptions
) -> tuple[Any, socket.socket]:
    """Load the model, and return the application with the socket for it to listen on.

    Raises `ConfigError`: the address cannot be used; `ModelError`: the model cannot be loaded.
    """
    listening = listen(host, port)  # before the model, which takes a while
    loaded = load_model(model, dtype=options.dtype, device=options.device or "auto")
    bare = bare_model(loaded.model)
    size, memory = options.max_batch_size, int(options.kv_cache_gb * 2**30)
    engine = Engine(bare, loaded.tokenizer, kv_cache_bytes=memory, max_batch_size=size)
    batching = BatchingEngine(
        engine,
        bare,
        max_rows=size,
        max_completion_length=min(options.max_completion_length, engine.context_length - 1),
        max_waiting=options.max_waiting,
        swap=options.swap,  # type: ignore[arg-type]
    )
    settings = ServeSettings(options.served_model_name or model, token, options.max_upload_mb << 20)
    gc.freeze()  # what is loaded stays: no collection has to look at it while clients wait
    listening.listen(1024)  # who asks from now on is answered
    return create_app(batching, loaded.tokenizer, settings, bare), listening
