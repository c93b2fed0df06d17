"""A package `vllm` that is not vLLM: its server speaks the same JSON on a Unix socket, and samples with our engine.

`fake_python(folder)` is a Python in whose environment it is installed. The variable FAKE_VLLM lets it fail: "memory",
"crash" or "hang". As vLLM does, it starts a process that does not notice when its parent is killed.
"""

from __future__ import annotations

import argparse
import json
import os
import socketserver
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"
MAIN = """
import sys
sys.path.insert(0, {here!r})
from fake_vllm import main
main()
"""
SAID = {
    "memory": """
(EngineCore_DP0 pid=12) INFO 11-01 00:00:00 loader.py: 1 Error: none so far
(EngineCore_DP0 pid=12) ERROR 11-01 00:00:01 core.py: ValueError: Free memory on device (1.1/79.1 GiB) is less than
RuntimeError: Engine core initialization failed. See root cause above.
""",
    "crash": """
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above.
(EngineCore_DP0 pid=12) ValueError: the model has no such layer
""",
}


def fake_python(folder: Path, *, version: str = "0.32.0", name: str = "vllm") -> str:
    """A Python with the fake; `version=""` is one without."""
    package = folder / "environment" / "vllm" / "entrypoints"
    for inner in ("cli", "openai"):
        (package / inner).mkdir(parents=True)
        (package / inner / "__init__.py").touch()
    for path in (package, package.parent):
        (path / "__init__.py").touch()
    program = MAIN.format(here=str(Path(__file__).parent))
    (package / "cli" / "main.py").write_text(program)
    (package / "openai" / "api_server.py").write_text(program)
    if version:
        about = package.parents[1] / f"{name.replace('-', '_')}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (about / "top_level.txt").write_text("vllm\n")
    python = folder / "python"
    places = os.pathsep.join(map(str, (package.parents[1], SOURCE)))
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{places}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return str(python)


class Served:
    """The model, its adapters by name, and what was asked."""

    def __init__(self, folder: Path, context: int) -> None:
        from covey.pytorch.engine import Engine
        from covey.pytorch.models.loading import load_model

        self.folder, self.context, self.names, self.drawn = folder, context, dict[str, Path](), 0
        self.model = load_model(folder, dtype="float32", device="cpu").model
        self.engine = Engine(self.model)
        self.lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        from safetensors.torch import load_file

        from covey.pytorch.engine.merge import weights_of

        if path == "/v1/load_lora_adapter":
            self.names[body["lora_name"]] = Path(body["lora_path"])
        elif path == "/v1/unload_lora_adapter":
            del self.names[body["lora_name"]]
        elif path == "/v1/models":
            found = [{"id": name} for name in self.names]
            return 200, {"data": [{"id": str(self.folder), "max_model_len": self.context}, *found]}
        elif path == "/collective_rpc":
            (file,) = self.folder.glob("*.safetensors")
            self.model.load_state_dict(load_file(file), strict=False)
            self.engine.publish(weights_of(self.model, 0))
        elif path == "/v1/completions":
            return self.complete(body)
        return 200, {}

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        import numpy as np

        from covey.adapters import read_adapter_folder
        from covey.pytorch.engine.merge import AdaptedWeights
        from covey.rollout.learning import Weights
        from covey.types import Request, SamplingSettings

        if body["model"] in self.names:
            adapter = read_adapter_folder(self.names[body["model"]])
            self.engine.publish(Weights(0, lambda: AdaptedWeights(self.model, adapter)))
        elif body["model"] != str(self.folder):
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        settings = SamplingSettings(
            body["temperature"],
            max(body["top_k"], 0),
            body["top_p"],
            body["min_p"],
            body["max_tokens"],
            tuple(body["stop_token_ids"]),
        )
        requests = [Request(np.array(ids), (os.getpid(), self.drawn, i)) for i, ids in enumerate(body["prompt"])]
        self.drawn += 1
        choices = [
            {
                "index": index,
                "token_ids": one.token_ids.tolist(),
                "logprobs": {"token_logprobs": one.logprobs.tolist()},
                "finish_reason": one.finish_reason,
            }
            for index, one in enumerate(self.engine(requests, settings, policy_version=0))
        ]
        return 200, {"model": body["model"], "choices": choices}


def main() -> None:
    """`vllm serve MODEL --uds PATH ...`."""
    behaviour = os.environ.get("FAKE_VLLM", "")
    if behaviour in SAID:
        sys.stderr.write(SAID[behaviour])
        sys.exit(1)
    core = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)", "fake-engine-core"])
    if behaviour == "hang":
        core.wait()
    words = [word for word in sys.argv[1:] if word != "serve"]
    parser = argparse.ArgumentParser()
    parser.add_argument("positional", nargs="?")
    parser.add_argument("--model")
    parser.add_argument("--uds")
    parser.add_argument("--max-model-len", type=int, default=512)
    asked, _ = parser.parse_known_args(words)
    served = Served(Path(asked.positional or asked.model), asked.max_model_len)
    (Path(asked.uds).parent / "options").write_text(json.dumps(words))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def address_string(self) -> str:
            return ""

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            with served.lock:
                try:
                    status, found = served.answer(self.path, json.loads(body) if body else {})
                except Exception as error:
                    status, found = 400, {"error": {"message": f"{type(error).__name__}: {error}"}}
            content = json.dumps(found).encode()
            time.sleep(float(os.environ.get("FAKE_VLLM_SECONDS", "0")) if "completions" in self.path else 0.0)
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET  # noqa: N815

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True
        request_queue_size = 128

    Server(asked.uds, Handler).serve_forever()
