"""Servers on a free loopback port, in threads of this process: ours with a tiny model, and fakes that misbehave."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import save
from test_adapters import adapted
from tiny_models import tiny_model, tiny_tokenizer

from covey.pytorch.engine import Engine
from covey.serving import BatchingEngine, InferenceClient, ServeSettings, create_app, write_adapter
from covey.serving.connections import ConnectionLimits, listen, uvicorn_server


class RunningServer:
    """`covey serve` with a tiny model."""

    def __init__(
        self,
        *,
        settings: ServeSettings | None = None,
        limits: ConnectionLimits | None = None,
        graceful: int = 2,
        **options: Any,
    ) -> None:
        self.model, self.tokenizer = tiny_model("llama"), tiny_tokenizer()
        self.engine = Engine(self.model, self.tokenizer, kv_cache_bytes=8 << 20)
        defaults: dict[str, Any] = {"max_rows": 8, "max_completion_length": 200}
        self.batching = BatchingEngine(self.engine, self.model, **(defaults | options))
        app = create_app(self.batching, self.tokenizer, settings or ServeSettings("tiny"), self.model)
        self._socket = listen("127.0.0.1", 0)
        self._socket.listen(1024)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        quiet: dict[str, Any] = {"log_level": "error", "timeout_graceful_shutdown": graceful}
        self._server = uvicorn_server(app, limits or ConnectionLimits(), **quiet)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.batching.close(0.1)


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[RunningServer]:
    server = RunningServer(**options)
    try:
        yield server
    finally:
        server.close()


def get(server: RunningServer, path: str, **options: Any) -> httpx.Response:
    return httpx.get(server.url + path, timeout=60, trust_env=False, **options)


def post(server: RunningServer, path: str, *, timeout: Any = 60, **options: Any) -> httpx.Response:
    return httpx.post(server.url + path, timeout=timeout, trust_env=False, **options)


def ask(server: RunningServer, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return post(server, path, json=body)


def events(answer: httpx.Response) -> list[Any]:
    """Those of a stream, without its end."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def send(server: RunningServer, weights: Any, config: Any, **form: Any) -> httpx.Response:
    """Upload tensors, or a file's bytes, with a config or its text."""
    files = {
        "adapter_weights": weights if isinstance(weights, bytes) else save(weights),
        "adapter_config": config if isinstance(config, bytes) else json.dumps(config).encode(),
    }
    return post(server, "/upload_adapter", files=files, data=form)


def upload(server: RunningServer, seed: int = 1, **form: Any) -> httpx.Response:
    return send(server, *write_adapter(adapted(seed)), **form)


def metric(server: RunningServer, name: str) -> float:
    lines = get(server, "/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


def begun(do: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
    """`do`, in a thread of its own."""
    return ThreadPoolExecutor(1).submit(do, *args, **options)


def at_once(do: Callable[[Any], Any], values: Any) -> list[Any]:
    """What `do` returns for each value, all at the same time."""
    return [one.result() for one in [begun(do, value) for value in values]]


def wait_until(holds: Callable[[], Any]) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.001)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class ServerProcess:
    """`covey serve` in a process of its own, which can be killed and started again at the same address."""

    def __init__(self, model: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        serve = ["-m", "covey", "serve", str(model), "--port", str(port), "--kv-cache-gb", "0.05"]
        self._command = [sys.executable, *serve]
        self._env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}

    def begin(self) -> None:
        """Start it, and let others wait until it answers."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, env=self._env)

    def start(self) -> None:
        self.begin()
        InferenceClient(self.url, retry_seconds=60).health(retry=True)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@contextlib.contextmanager
def fake_server(answer: Callable[[str, bytes], tuple[int, Any]]) -> Iterator[str]:
    """A server that answers what `answer(path, body)` says: a status (0: it hangs up), and JSON or bytes."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, found = answer(self.path, body)
            if status == 0:
                self.connection.close()
                return
            content = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def training_server(**deviations: Any) -> Callable[[str, bytes], tuple[int, Any]]:
    """The least server that can be trained with, for `fake_server`, but for what deviates.

    Args:
        deviations: `health`, `upload`, `choice`, `answer`: changes to these; `choices`: makes them of the right ones;
            `replace`: (path, status, answer) said in place of the right one. A value of `...` takes the name out.
    """

    def changed(what: dict[str, Any], name: str) -> dict[str, Any]:
        return {key: value for key, value in (what | deviations.get(name, {})).items() if value is not ...}

    def answer(path: str, body: bytes) -> tuple[int, Any]:
        if (instead := deviations.get("replace")) and path == instead[0]:
            return instead[1], instead[2]
        if path == "/health":
            return 200, changed({"status": "ok", "policy_version": 0}, "health")
        if path != "/v1/completions":
            return 200, changed({"policy_version": 1}, "upload")
        asked = json.loads(body)
        choice = {"token_ids": [5, 6], "logprobs": {"token_logprobs": [-1.0, -2.0]}, "finish_reason": "length"}
        choices = [changed(choice | {"text": "ab", "policy_version": 1}, "choice") for _ in asked["prompt"]]
        return 200, changed({"choices": deviations.get("choices", list)(choices), "policy_version": 1}, "answer")

    return answer
