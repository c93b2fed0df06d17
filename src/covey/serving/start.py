"""From a model's name to a server that can be run."""

from __future__ import annotations

import gc
import socket
from dataclasses import dataclass
from typing import Any, cast

from covey.pytorch.engine import Engine
from covey.pytorch.engine.merge import bare_model
from covey.pytorch.models.loading import load_model
from covey.serving.app import create_app
from covey.serving.batching import BatchingEngine, SwapMode
from covey.serving.gate import ServeSettings
from covey.serving.listening import listen


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `covey serve` may be told. Names are those of its options."""

    dtype: str = "float32"
    device: str | None = None
    kv_cache_gb: float = 1.0
    max_batch_size: int = 64
    max_completion_length: int = 512
    max_waiting: int = 1024
    max_upload_mb: int = 1024
    max_connections: int = 512
    swap: str = "finish"


def open_server(
    model: str, host: str, port: int, token: str | None, options: ServeOptions
) -> tuple[Any, socket.socket]:
    """An application with its model loaded, and the socket that it is to listen on.

    Raises:
        ConfigError: the address cannot be listened on.
        ModelError: the model cannot be loaded.
    """
    listening = listen(host, port)  # before the model, which takes a while
    loaded = load_model(model, dtype=options.dtype, device=options.device or "auto")
    bare = bare_model(loaded.model)
    engine = Engine(
        bare, loaded.tokenizer, kv_cache_bytes=int(options.kv_cache_gb * 2**30), max_batch_size=options.max_batch_size
    )
    batching = BatchingEngine(
        engine,
        bare,
        max_rows=options.max_batch_size,
        max_completion_length=min(options.max_completion_length, engine.context_length - 1),
        max_waiting=options.max_waiting,
        swap=cast(SwapMode, options.swap),
    )
    settings = ServeSettings(model_name=model, token=token, max_upload_bytes=options.max_upload_mb << 20)
    gc.freeze()  # what is loaded stays: no collection has to look at it while clients wait
    listening.listen(1024)  # who asks from now on is answered
    return create_app(batching, loaded.tokenizer, settings, bare), listening
