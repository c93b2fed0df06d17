"""Servers on a free loopback port, in threads of this process: ours with a tiny model, and fakes that misbehave."""

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
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from safetensors.torch import load, save
from tiny_models import tiny_model, tiny_tokenizer

from covey.pytorch.engine import Engine
from covey.pytorch.models.lora import attach_lora
from covey.serving import BatchingEngine, InferenceClient, ServeSettings, create_app, write_adapter
from covey.serving.connections import ConnectionLimits, listen, uvicorn_server
from covey.types import Completion, Request
from fakes import loopback


def adapted(seed: int = 1) -> Any:
    return with_lora(tiny_model("llama"), seed, r=3, scale=0.3)


def with_lora(model: Any, seed: int, *, r: int, scale: float) -> Any:
    model = attach_lora(model, r=r, alpha=2 * r, seed=0)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)
    return model


def as_mlx(weights: bytes, rank: int, scale: float) -> tuple[bytes, dict[str, Any]]:
    tensors = {}
    for name, tensor in load(weights).items():
        short = name.removeprefix("base_model.model.").removesuffix(".weight")
        short = short.replace("lora_A", "lora_a").replace("lora_B", "lora_b")
        tensors[short] = tensor.T.contiguous()
    return save(tensors), {"fine_tune_type": "lora", "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0}}


class RunningServer:
    def __init__(
        self,
        settings: Any = None,
        limits: Any = None,
        graceful: int = 2,
        tokenizer: Any = None,
        model: Any = None,
        **options: Any,
    ):
        self.tokenizer = tokenizer or tiny_tokenizer()
        self.model = model or tiny_model("llama", len(self.tokenizer))
        self.engine = Engine(self.model, self.tokenizer, kv_cache_bytes=8 << 20)
        options = {"max_rows": 8, "max_completion_length": 200} | options
        self.batching = BatchingEngine(self.engine, self.model, **options)
        app = create_app(self.batching, self.tokenizer, settings or ServeSettings("tiny"), self.model)
        self._socket = listen("127.0.0.1", 0)
        self._socket.listen(1024)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        limits = limits or ConnectionLimits()
        self._server = uvicorn_server(app, limits, log_level="error", timeout_graceful_shutdown=graceful)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.batching.close(0.1)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, trust_env=False, **options)

    def post(self, path: str, *, timeout: Any = 60, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=timeout, trust_env=False, **options)

    def ask(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return self.post(path, json=body)

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])

    def send(self, weights: Any, config: Any, **form: Any) -> httpx.Response:
        """Upload tensors, or a file's bytes, with a config or its text."""
        raw = weights if isinstance(weights, bytes) else save(weights)
        text = config if isinstance(config, bytes) else json.dumps(config).encode()
        return self.post("/upload_adapter", files={"adapter_weights": raw, "adapter_config": text}, data=form)

    def upload(self, seed: int = 1, **form: Any) -> httpx.Response:
        return self.send(*write_adapter(adapted(seed)), **form)


def serving(**options: Any) -> contextlib.closing[RunningServer]:
    return contextlib.closing(RunningServer(**options))


def refused(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    message = str(answer.json()["error"]["message"])
    assert 10 < len(message) < 1000
    return message


def events(answer: httpx.Response) -> list[Any]:
    """Those of a stream, without its end."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


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


def logprobs_are_of(model: Any, request: Request, completion: Completion, temperature: float, atol: float) -> None:
    ids = torch.tensor([*request.token_ids.tolist(), *completion.token_ids.tolist()])[None]
    with torch.no_grad():
        logp = (model(ids).logits[0].float() / temperature).log_softmax(-1)
    first = len(request.token_ids)
    expected = logp[first - 1 : -1].gather(1, ids[0, first:, None])[:, 0]
    np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=atol)


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

    def __enter__(self) -> "ServerProcess":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@contextlib.contextmanager
def fake_server(answer: Callable[[str, bytes], tuple[int, Any]]) -> Iterator[str]:
    """A server that answers what `answer(path, body)` says: a status (0: it hangs up), and JSON or bytes."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, found = answer(self.path, self.rfile.read(int(self.headers.get("content-length", 0))))
            if status == 0:
                self.connection.close()
                return
            content = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET  # noqa: N815

    with loopback(Handler) as url:
        yield url


def training_server(**deviations: Any) -> Callable[[str, bytes], tuple[int, Any]]:
    """The least server that can be trained with, for `fake_server`, but for changes of `health`, `upload`, `choice` or
    `answer` (`...` takes a name out); `choices` makes them of the right ones; `replace` is a path, and the status and
    answer said there in place of the right one.
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
